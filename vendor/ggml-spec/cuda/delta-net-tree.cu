// Gated delta rule over a draft tree, in one launch.
//
// A block owns one value head and a few rows of its transposed state (columns of S). Eight threads share a row: each
// keeps its part of the live state in registers and parts of saved states in its own words of shared memory, so the
// whole order is walked without a state ever going through device memory. Two more warps prepare the steps ahead
// (normalised q and k, gates, values) in shared memory, a chunk at a time, while the chunk before is walked.

#include "delta-net-steps.cuh"

#include <algorithm>

namespace ggml_spec_cuda {
namespace {

// --- walking -------------------------------------------------------------------------------------------------------------

// Saved states: value i of a thread at [level][i][thread].
template <int n>
__device__ __forceinline__ float * stack_slot(float * stack, int level) {
    return stack + level * n * walkers + threadIdx.x;
}

// What a walker needs first of a step; the next step's is loaded while this one's result is summed up.
template <int S_k>
struct step_start {
    step_words words;
    float      v;
    float      k[layout<S_k>::n_values];

    __device__ __forceinline__ void load(const chunk<S_k> & c, const place & p, int at) {
        words = c.words[at];
        v     = c.v[at][threadIdx.x / row_lanes];
        load_lane<S_k>(k, c.k[at], p.lane);
    }
};

template <int S_k>
__device__ void walk_chunk(float (&state)[layout<S_k>::n_values], const chunk<S_k> & c, const delta_operands & o, const place & p,
                           float * stack, int first, int n_steps) {
    constexpr int n = layout<S_k>::n_values;
    step_start<S_k> step;
    step.load(c, p, 0);
    for (int at = 0; at < n_steps; at++) {
        const step_words words = step.words;
        if (first + at == p.n_pending && p.n_pending > 0 && !p.fold && p.is_real(o)) {
            store_lane<S_k>(p.state, state, p.lane);
        }
        if (words.restore >= 0) {
            const float * saved = stack_slot<n>(stack, words.restore);
#pragma unroll
            for (int i = 0; i < n; i++) {
                state[i] = saved[i * walkers];
            }
        }
        const float u = words.node < 0 ? step.v
                                       : times(words.beta, madd(-words.decay, dot(state, step.k), step.v));
        update(state, words.decay, step.k, u);
        step.load(c, p, min(at + 1, n_steps - 1));
        if (words.node < 0) {
            continue;
        }
        if (words.save >= 0) {
            float * saved = stack_slot<n>(stack, words.save);
#pragma unroll
            for (int i = 0; i < n; i++) {
                saved[i * walkers] = state[i];
            }
        }
        float q[n];
        load_lane<S_k>(q, c.q[at], p.lane);
        const float out = dot(state, q);
        if (p.lane == 0 && p.is_real(o)) {
            p.out[words.node * o.H_v * o.S_v] = out;
            if (!p.fold) {
                p.deltas[words.node * o.H_v * (o.S_v + GGML_SPEC_BANK_U_EXTRA)] = u;
            }
        }
    }
}

// Columns that no visit names; a schedule that fills its columns has none.
__device__ void zero_padding(const delta_operands & o, const place & p, uint32_t * visited) {
    const int n_nodes = o.sched.n_nodes();
    if (n_nodes == o.sched.n_columns) {
        return;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < (o.sched.n_columns + 31) / 32; i += block_threads) {
        visited[i] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_nodes; i += block_threads) {
        const int node = p.fold ? i : o.sched.visit(i)[0];
        atomicOr(&visited[node / 32], 1u << node % 32);
    }
    __syncthreads();
    for (int column = p.lane; column < o.sched.n_columns && threadIdx.x < walkers; column += row_lanes) {
        if (!(visited[column / 32] >> column % 32 & 1) && p.is_real(o)) {
            p.out[column * o.H_v * o.S_v] = 0.0f;
        }
    }
}

template <int S_k>
__global__ void __launch_bounds__(block_threads, 3) delta_net_tree_kernel(const delta_operands o) {
    extern __shared__ float4 shared[];
    chunk<S_k> * chunks = (chunk<S_k> *) shared;  // two
    float *      stack  = (float *) (chunks + 2);

    const place p(o, S_k);
    const bool  walks     = threadIdx.x < walkers;
    const bool  has_state = walks && p.is_real(o);
    float       state[layout<S_k>::n_values] = {};
    if (has_state) {
        load_lane<S_k>(state, p.state, p.lane);
    }
    for (int first = -chunk_steps, slot = 1; first < p.n_steps; first += chunk_steps, slot ^= 1) {
        if (!walks) {
            prepare_steps<S_k>(chunks[slot ^ 1], o, p, first + chunk_steps);
        } else if (first >= 0) {
            walk_chunk<S_k>(state, chunks[slot], o, p, stack, first, min(chunk_steps, p.n_steps - first));
        }
        __syncthreads();
    }
    if (has_state && (p.fold || (p.n_pending > 0 && p.n_steps == p.n_pending))) {
        store_lane<S_k>(p.state, state, p.lane);
    }
    zero_padding(o, p, (uint32_t *) shared);
}

template <int S_k>
size_t shared_bytes_needed(int64_t n_columns, int64_t n_rows) {
    const int levels = ggml_spec_levels_max(std::min(n_columns, n_rows));
    return std::max(2 * sizeof(chunk<S_k>) + levels * block_rows * S_k * sizeof(float),
                    (size_t) (n_columns + 31) / 32 * sizeof(uint32_t));
}

size_t shared_bytes_needed(int64_t S_k, int64_t n_columns, int64_t n_rows) {
    return S_k == 16 ? shared_bytes_needed<16>(n_columns, n_rows) : S_k == 32 ? shared_bytes_needed<32>(n_columns, n_rows) :
           S_k == 64 ? shared_bytes_needed<64>(n_columns, n_rows) : shared_bytes_needed<128>(n_columns, n_rows);
}

template <int S_k>
void launch(const delta_operands & o, cudaStream_t stream) {
    const dim3   grid((unsigned) o.H_v, (unsigned) ((o.S_v + block_rows - 1) / block_rows));
    const size_t shared = shared_bytes_needed<S_k>(o.sched.n_columns, o.n_rows);
    allow_shared_bytes(delta_net_tree_kernel<S_k>, shared);
    delta_net_tree_kernel<S_k><<<grid, block_threads, shared, stream>>>(o);
}

}  // namespace

bool delta_net_tree_supported(const ggml_tensor * op, size_t shared_bytes) {
    const ggml_tensor * q   = op->src[GGML_SPEC_DELTA_SRC_Q];
    const int64_t       S_k = q->ne[0];
    return (S_k == 16 || S_k == 32 || S_k == 64 || S_k == 128) && q->ne[2] <= columns_max &&
           shared_bytes_needed(S_k, q->ne[2], op->src[GGML_SPEC_DELTA_SRC_BANK_K]->ne[2]) <= shared_bytes;
}

void delta_net_tree_launch(ggml_tensor * op, cudaStream_t stream) {
    const ggml_tensor * v     = op->src[GGML_SPEC_DELTA_SRC_V];
    const ggml_tensor * gates = op->src[GGML_SPEC_DELTA_SRC_GATES];
    const int           flags = ggml_spec_flags(op);
    const delta_operands o = {
        strided_view(op->src[GGML_SPEC_DELTA_SRC_Q]),
        strided_view(op->src[GGML_SPEC_DELTA_SRC_K]),
        strided_view(v),
        strided_view(op->src[GGML_SPEC_DELTA_SRC_G]),
        strided_view(op->src[GGML_SPEC_DELTA_SRC_BETA]),
        (float *) op->src[GGML_SPEC_DELTA_SRC_STATE]->data,
        (float *) op->src[GGML_SPEC_DELTA_SRC_BANK_K]->data,
        (float *) op->src[GGML_SPEC_DELTA_SRC_BANK_U]->data,
        flags & GGML_SPEC_FLAG_RAW_GATES ? (const float *) gates->data : nullptr,
        (float *) op->data,
        op->src[GGML_SPEC_DELTA_SRC_Q]->ne[1],
        v->ne[0],
        v->ne[1],
        op->src[GGML_SPEC_DELTA_SRC_BANK_K]->ne[2],
        flags & GGML_SPEC_FLAG_QK_L2NORM ? ggml_spec_eps(op) : -1.0f,
        { (const int32_t *) op->src[GGML_SPEC_DELTA_SRC_SCHED]->data, (int) v->ne[2] },
    };
    switch (op->src[GGML_SPEC_DELTA_SRC_Q]->ne[0]) {
        case 16:  launch<16>(o, stream);  break;
        case 32:  launch<32>(o, stream);  break;
        case 64:  launch<64>(o, stream);  break;
        case 128: launch<128>(o, stream); break;
    }
}

}  // namespace ggml_spec_cuda
