// Causal convolution over a draft tree. A block owns a few channels and all nodes: the window is updated in place, and
// nobody else reads these channels of it.

#include "spec-device.cuh"

#include <algorithm>

namespace ggml_spec_cuda {
namespace {

constexpr int block_channels = 32;
constexpr int block_walkers  = 8;    // threads that share the nodes of a channel
constexpr int columns_max    = 4096; // of a tree: their parents lie in shared memory
constexpr int not_visited    = -2;

struct conv_operands {
    strided       x;
    const float * w;       // [K, C]
    float *       window;  // [K-1, C, n_slots]
    float *       bank_x;  // [C, n_rows, n_banks]
    float *       out;     // [C, N]
    int64_t       n_channels;
    int64_t       n_rows;
    schedule      sched;
};

// sum of weights x taps, oldest first, then SiLU; taps[K - 1] is the node itself.
template <int K>
__device__ __forceinline__ float convolve(const float (&w)[K], const float (&taps)[K]) {
    float sum = times(w[0], taps[0]);
#pragma unroll
    for (int i = 1; i < K; i++) {
        sum = madd(w[i], taps[i], sum);
    }
    return sum / plus(1.0f, expf(-sum));
}

// The K - 1 inputs before the root, oldest first: the window with the pending rows shifted in.
template <int K>
__device__ __forceinline__ void read_history(float (&history)[K], const conv_operands & o, int64_t channel) {
    const float * window    = o.window + ((int64_t) o.sched.state_slot() * o.n_channels + channel) * (K - 1);
    const float * bank      = o.bank_x + (int64_t) o.sched.pending_bank() * o.n_rows * o.n_channels + channel;
    const int     n_pending = o.sched.n_pending();
#pragma unroll
    for (int i = 0; i < K - 1; i++) {
        const int row = n_pending - (K - 1) + i;
        history[i] = row >= 0 ? bank[(int64_t) o.sched.pending_row(row) * o.n_channels] : window[i + n_pending];
    }
}

template <int K>
__device__ void run_tree(const conv_operands & o, const int * parents, const float (&w)[K], const float (&history)[K],
                         int64_t channel) {
    float * bank = o.bank_x + (int64_t) o.sched.write_bank() * o.n_rows * o.n_channels + channel;
    for (int node = threadIdx.y; node < o.sched.n_columns; node += block_walkers) {
        if (parents[node] == not_visited) {
            o.out[(int64_t) node * o.n_channels + channel] = 0.0f;
            continue;
        }
        float taps[K];
        int   at = node;
        int   n_before = 0;  // steps back from the root into the history
#pragma unroll
        for (int i = K - 1; i >= 0; i--) {
            if (at >= 0) {
                taps[i] = o.x.row(at)[channel];
                at      = parents[at];
            } else {
                n_before++;
                taps[i] = 0.0f;
#pragma unroll
                for (int j = 0; j < K - 1; j++) {  // a register array takes no run-time index
                    taps[i] = K - 1 - n_before == j ? history[j] : taps[i];
                }
            }
        }
        bank[(int64_t) node * o.n_channels]            = taps[K - 1];
        o.out[(int64_t) node * o.n_channels + channel] = convolve<K>(w, taps);
    }
}

// Consecutive nodes of the chain slide through the taps.
template <int K>
__device__ void run_chain(const conv_operands & o, const float (&w)[K], const float (&history)[K], int64_t channel) {
    const int n_nodes = o.sched.n_nodes();
    const int share   = (o.sched.n_columns + block_walkers - 1) / block_walkers;
    const int begin   = threadIdx.y * share;
    const int end     = min(begin + share, o.sched.n_columns);
    float     taps[K];
#pragma unroll
    for (int i = 0; i < K - 1; i++) {  // what precedes `begin`, one place late: the loop shifts first
        const int node = begin - (K - 1) + i;
        taps[i + 1] = 0.0f;
        if (node >= 0 && node < n_nodes) {
            taps[i + 1] = o.x.row(node)[channel];
        }
#pragma unroll
        for (int j = 0; j < K - 1; j++) {
            taps[i + 1] = node < 0 && node + K - 1 == j ? history[j] : taps[i + 1];
        }
    }
    for (int node = begin; node < end; node++) {
        if (node >= n_nodes) {
            o.out[(int64_t) node * o.n_channels + channel] = 0.0f;
            continue;
        }
#pragma unroll
        for (int i = 0; i < K - 1; i++) {
            taps[i] = taps[i + 1];
        }
        taps[K - 1] = o.x.row(node)[channel];
        o.out[(int64_t) node * o.n_channels + channel] = convolve<K>(w, taps);
    }
}

// The window after the pending rows, and in a prefill after all nodes.
template <int K>
__device__ void commit(const conv_operands & o, const float (&history)[K], int64_t channel) {
    const int n_new = o.sched.fold() ? o.sched.n_nodes() : 0;
    if (!o.sched.fold() && o.sched.n_pending() == 0) {
        return;
    }
    float * window = o.window + ((int64_t) o.sched.state_slot() * o.n_channels + channel) * (K - 1);
#pragma unroll
    for (int i = 0; i < K - 1; i++) {
        const int node  = n_new - (K - 1) + i;
        float     value = node >= 0 ? o.x.row(node)[channel] : 0.0f;
#pragma unroll
        for (int j = 0; j < K - 1; j++) {
            value = node < 0 && i + n_new == j ? history[j] : value;
        }
        window[i] = value;
    }
}

template <int K>
__global__ void __launch_bounds__(block_channels * block_walkers) conv_tree_kernel(const conv_operands o) {
    extern __shared__ int parents[];
    const bool fold = o.sched.fold();
    if (!fold) {
        const int thread = threadIdx.y * block_channels + threadIdx.x;
        for (int i = thread; i < o.sched.n_columns; i += block_channels * block_walkers) {
            parents[i] = not_visited;
        }
        __syncthreads();
        for (int i = thread; i < o.sched.n_nodes(); i += block_channels * block_walkers) {
            const int32_t * visit = o.sched.visit(i);
            parents[visit[0]] = visit[1];
        }
    }
    const int64_t channel = (int64_t) blockIdx.x * block_channels + threadIdx.x;
    const bool    is_real = channel < o.n_channels;
    float w[K], history[K];
    if (is_real) {
#pragma unroll
        for (int i = 0; i < K; i++) {
            w[i] = o.w[channel * K + i];
        }
        read_history<K>(history, o, channel);
    }
    __syncthreads();  // every reader of the window has its copy, and the parents are there
    if (!is_real) {
        return;
    }
    if (threadIdx.y == 0) {
        commit<K>(o, history, channel);
    }
    if (fold) {
        run_chain<K>(o, w, history, channel);
    } else {
        run_tree<K>(o, parents, w, history, channel);
    }
}

template <int K>
void launch(const conv_operands & o, cudaStream_t stream) {
    const dim3   block(block_channels, block_walkers);
    const int    n_blocks = (int) ((o.n_channels + block_channels - 1) / block_channels);
    const size_t shared   = std::min(o.sched.n_columns, columns_max) * sizeof(int);
    conv_tree_kernel<K><<<n_blocks, block, shared, stream>>>(o);
}

}  // namespace

bool conv_tree_supported(const ggml_tensor * op, size_t shared_bytes) {
    return op->ne[1] <= columns_max && columns_max * sizeof(int) <= shared_bytes;
}

void conv_tree_launch(ggml_tensor * op, cudaStream_t stream) {
    const ggml_tensor * x      = op->src[GGML_SPEC_CONV_SRC_X];
    const ggml_tensor * w      = op->src[GGML_SPEC_CONV_SRC_W];
    const ggml_tensor * bank_x = op->src[GGML_SPEC_CONV_SRC_BANK_X];
    const conv_operands o = {
        strided_view(x),
        (const float *) w->data,
        (float *) op->src[GGML_SPEC_CONV_SRC_WINDOW]->data,
        (float *) bank_x->data,
        (float *) op->data,
        x->ne[0],
        bank_x->ne[1],
        { (const int32_t *) op->src[GGML_SPEC_CONV_SRC_SCHED]->data, (int) x->ne[1] },
    };
    switch (w->ne[0]) {
        case 2: launch<2>(o, stream); break;
        case 3: launch<3>(o, stream); break;
        case 4: launch<4>(o, stream); break;
        case 5: launch<5>(o, stream); break;
        case 6: launch<6>(o, stream); break;
        case 7: launch<7>(o, stream); break;
        case 8: launch<8>(o, stream); break;
    }
}

}  // namespace ggml_spec_cuda
