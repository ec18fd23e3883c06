// Gated delta rule over a draft tree, in one launch.
//
// A block owns one value head and a few rows of its transposed state (columns of S). Eight threads share a row: each
// keeps its part of the live state in registers and parts of saved states in its own words of shared memory, so the
// whole order is walked without a state ever going through device memory. The block prepares the nodes that it is about
// to visit (normalised q and k, gates, values) in shared memory, a chunk at a time.

#include "spec-device.cuh"

#include <algorithm>

namespace ggml_spec_cuda {
namespace {

constexpr int row_lanes     = 8;    // threads that share a state row
constexpr int block_threads = 128;
constexpr int block_warps   = block_threads / warp_lanes;
constexpr int block_rows    = block_threads / row_lanes;
constexpr int chunk_nodes   = 16;
constexpr int columns_max   = 65536;

struct delta_operands {
    strided       q, k, v;        // nb1: heads, nb2: columns
    strided       g, beta;        // nb1: columns
    float *       state;          // [S_k, S_v, H_v, n_slots]
    float *       bank_k;         // [S_k, H_k, n_rows, n_banks]
    float *       bank_u;         // [S_v + 4, H_v, n_rows, n_banks]
    const float * gates;          // [dt_bias | A], or null: g and beta are ready
    float *       out;            // [S_v * H_v, N]
    int64_t       H_k, S_v, H_v, n_rows;
    float         l2_eps;         // negative: q and k are ready
    schedule      sched;
};

// What a node's update needs, the same for every row of the head.
struct node_gate {
    float decay;
    float beta;
    float log_g;
};

// The part of shared memory that does not depend on the tree.
template <int S_k>
struct chunk {
    float     q[chunk_nodes][S_k];  // scaled by 1/sqrt(S_k)
    float     k[chunk_nodes][S_k];
    float     v[chunk_nodes][block_rows];  // values; of pending rows, their deltas
    node_gate gate[chunk_nodes];
    int       visit[chunk_nodes][GGML_SPEC_SCHED_NODE_WORDS];
};

// How a row lies in the registers of its threads: a vector of neighbouring values, then the one 8 vectors further on.
template <int S_k>
struct layout {
    static constexpr int n_values  = S_k / row_lanes;
    static constexpr int width     = n_values < 4 ? n_values : 4;
    static constexpr int n_vectors = n_values / width;

    struct alignas(width * sizeof(float)) vector {
        float values[width];
    };
};

// Values of one thread, from or to a row.
template <int S_k>
__device__ __forceinline__ void load_lane(float (&out)[layout<S_k>::n_values], const float * row, int lane) {
    using L = layout<S_k>;
#pragma unroll
    for (int i = 0; i < L::n_vectors; i++) {
        const typename L::vector v = ((const typename L::vector *) row)[i * row_lanes + lane];
#pragma unroll
        for (int j = 0; j < L::width; j++) {
            out[i * L::width + j] = v.values[j];
        }
    }
}

template <int S_k>
__device__ __forceinline__ void store_lane(float * row, const float (&values)[layout<S_k>::n_values], int lane) {
    using L = layout<S_k>;
#pragma unroll
    for (int i = 0; i < L::n_vectors; i++) {
        typename L::vector v;
#pragma unroll
        for (int j = 0; j < L::width; j++) {
            v.values[j] = values[i * L::width + j];
        }
        ((typename L::vector *) row)[i * row_lanes + lane] = v;
    }
}

template <int n>
__device__ __forceinline__ float dot(const float (&a)[n], const float (&b)[n]) {
    float part[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
#pragma unroll
    for (int i = 0; i < n; i++) {
        part[i & 3] = madd(a[i], b[i], part[i & 3]);
    }
    return lanes_sum<row_lanes>(plus(plus(part[0], part[1]), plus(part[2], part[3])));
}

// S = decay * S + k u^T: the first pass and the replay both come here, so they agree in every bit.
template <int n>
__device__ __forceinline__ void update(float (&state)[n], float decay, const float (&k)[n], float u) {
#pragma unroll
    for (int i = 0; i < n; i++) {
        state[i] = madd(k[i], u, times(state[i], decay));
    }
}

__device__ __forceinline__ float * bank_k_row(const delta_operands & o, int S_k, int bank, int row, int key_head) {
    return o.bank_k + (((int64_t) bank * o.n_rows + row) * o.H_k + key_head) * S_k;
}

__device__ __forceinline__ float * bank_u_row(const delta_operands & o, int bank, int row, int head) {
    return o.bank_u + (((int64_t) bank * o.n_rows + row) * o.H_v + head) * (o.S_v + GGML_SPEC_BANK_U_EXTRA);
}

// A thread's part of the work, and where it lies: its state row, and its value in column 0 and in bank row 0.
struct place {
    int     head, key_head;
    int     row;   // state row of this thread, S_v or more where there is none
    int     lane;  // its part of the row
    float * state;
    float * out;
    float * deltas;
    bool    fold;

    __device__ __forceinline__ place(const delta_operands & o, int S_k) {
        head     = blockIdx.x;
        key_head = head % (int) o.H_k;
        row      = blockIdx.y * block_rows + threadIdx.x / row_lanes;
        lane     = threadIdx.x % row_lanes;
        state    = o.state + (((int64_t) o.sched.state_slot() * o.H_v + head) * o.S_v + row) * S_k;
        out      = o.out + head * o.S_v + row;
        deltas   = bank_u_row(o, o.sched.write_bank(), 0, head) + row;
        fold     = o.sched.fold();
    }
};

// --- pending rows ------------------------------------------------------------------------------------------------------

template <int S_k>
__device__ void read_pending(chunk<S_k> & c, const delta_operands & o, const place & p, int first, int n) {
    const int bank      = o.sched.pending_bank();
    const int row_begin = blockIdx.y * block_rows;
    for (int i = threadIdx.x; i < n * S_k; i += block_threads) {
        c.k[i / S_k][i % S_k] = bank_k_row(o, S_k, bank, o.sched.pending_row(first + i / S_k), p.key_head)[i % S_k];
    }
    for (int i = threadIdx.x; i < n * block_rows; i += block_threads) {
        const int row = row_begin + i % block_rows;
        if (row < o.S_v) {
            c.v[i / block_rows][i % block_rows] = bank_u_row(o, bank, o.sched.pending_row(first + i / block_rows), p.head)[row];
        }
    }
    for (int i = threadIdx.x; i < n; i += block_threads) {
        c.gate[i].decay = ggml_spec_decay(bank_u_row(o, bank, o.sched.pending_row(first + i), p.head)[o.S_v]);
    }
}

template <int S_k>
__device__ void fold_pending(float (&state)[layout<S_k>::n_values], chunk<S_k> & c, const delta_operands & o, const place & p) {
    for (int first = 0; first < o.sched.n_pending(); first += chunk_nodes) {
        const int n = min(chunk_nodes, o.sched.n_pending() - first);
        __syncthreads();
        read_pending(c, o, p, first, n);
        __syncthreads();
        for (int i = 0; i < n; i++) {
            float k[layout<S_k>::n_values];
            load_lane<S_k>(k, c.k[i], p.lane);
            update(state, c.gate[i].decay, k, c.v[i][threadIdx.x / row_lanes]);
        }
    }
}

// --- nodes ---------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ node_gate make_gate(const delta_operands & o, int head, int node) {
    const float g    = o.g.row(node)[head];
    const float beta = o.beta.row(node)[head];
    node_gate gate;
    gate.log_g = o.gates ? ggml_spec_log_decay(g, o.gates[head], o.gates[o.H_v + head]) : g;
    gate.beta  = o.gates ? ggml_spec_write_strength(beta) : beta;
    gate.decay = ggml_spec_decay(gate.log_g);
    return gate;
}

// One vector, by one warp: out = x * scale / |x|.
template <int S_k>
__device__ __forceinline__ void normalise(float * out, const float * x, float scale, float l2_eps) {
    constexpr int n = (S_k + warp_lanes - 1) / warp_lanes;
    const int lane  = threadIdx.x % warp_lanes;
    float values[n];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < n; i++) {
        const int at = i * warp_lanes + lane;
        values[i] = at < S_k ? x[at] : 0.0f;
        sum       = madd(values[i], values[i], sum);
    }
    if (l2_eps >= 0.0f) {
        scale = scale / sqrtf(plus(lanes_sum<warp_lanes>(sum), l2_eps));
    }
#pragma unroll
    for (int i = 0; i < n; i++) {
        const int at = i * warp_lanes + lane;
        if (at < S_k) {
            out[at] = times(values[i], scale);
        }
    }
}

// Key and log decay of a node; the deltas are written by the walk. One block of a head does it.
template <int S_k>
__device__ __forceinline__ void write_bank(const chunk<S_k> & c, const delta_operands & o, const place & p, int at, int node) {
    const int lane = threadIdx.x % warp_lanes;
    if (p.head < o.H_k) {
        float * key = bank_k_row(o, S_k, o.sched.write_bank(), node, p.head);
        for (int i = lane; i < S_k; i += warp_lanes) {
            key[i] = c.k[at][i];
        }
    }
    if (lane < GGML_SPEC_BANK_U_EXTRA) {
        bank_u_row(o, o.sched.write_bank(), node, p.head)[o.S_v + lane] = lane == 0 ? c.gate[at].log_g : 0.0f;
    }
}

// Visits first .. first + n - 1.
template <int S_k>
__device__ void prepare_nodes(chunk<S_k> & c, const delta_operands & o, const place & p, int first, int n) {
    const int   lane  = threadIdx.x % warp_lanes;
    const float scale = 1.0f / sqrtf((float) S_k);
    for (int at = threadIdx.x / warp_lanes; at < n; at += block_warps) {
        const int32_t * visit = o.sched.visit(first + at);
        const int       node  = p.fold ? first + at : visit[0];
        if (lane < GGML_SPEC_SCHED_NODE_WORDS) {
            c.visit[at][lane] = p.fold ? (lane == 0 ? node : -1) : visit[lane];
        }
        if (lane == 0) {
            c.gate[at] = make_gate(o, p.head, node);
        }
        for (int i = lane; i < block_rows; i += warp_lanes) {
            const int row = blockIdx.y * block_rows + i;
            c.v[at][i] = row < o.S_v ? o.v.row(p.head, node)[row] : 0.0f;
        }
        normalise<S_k>(c.q[at], o.q.row(p.key_head, node), scale, o.l2_eps);
        normalise<S_k>(c.k[at], o.k.row(p.key_head, node), 1.0f, o.l2_eps);
        __syncwarp();
        if (!p.fold && blockIdx.y == 0) {
            write_bank(c, o, p, at, node);
        }
    }
}

// Saved states: value i of a thread at [level][i][thread].
template <int n>
__device__ __forceinline__ float * stack_slot(float * stack, int level) {
    return stack + level * n * block_threads + threadIdx.x;
}

template <int S_k>
__device__ __forceinline__ void visit_node(float (&state)[layout<S_k>::n_values], const chunk<S_k> & c, const delta_operands & o,
                                           const place & p, float * stack, int at) {
    constexpr int n      = layout<S_k>::n_values;
    const int     node   = c.visit[at][0];
    const int     source = c.visit[at][2];
    const int     save   = c.visit[at][3];
    if (source >= 0) {
        const float * saved = stack_slot<n>(stack, source);
#pragma unroll
        for (int i = 0; i < n; i++) {
            state[i] = saved[i * block_threads];
        }
    }
    float k[n], q[n];
    load_lane<S_k>(k, c.k[at], p.lane);
    load_lane<S_k>(q, c.q[at], p.lane);
    const node_gate gate = c.gate[at];
    const float     u    = times(gate.beta, madd(-gate.decay, dot(state, k), c.v[at][threadIdx.x / row_lanes]));
    update(state, gate.decay, k, u);
    const float out = dot(state, q);
    if (p.lane == 0 && p.row < o.S_v) {
        p.out[node * o.H_v * o.S_v] = out;
        if (!p.fold) {
            p.deltas[node * o.H_v * (o.S_v + GGML_SPEC_BANK_U_EXTRA)] = u;
        }
    }
    if (save >= 0) {
        float * saved = stack_slot<n>(stack, save);
#pragma unroll
        for (int i = 0; i < n; i++) {
            saved[i * block_threads] = state[i];
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
    for (int column = p.lane; column < o.sched.n_columns; column += row_lanes) {
        if (!(visited[column / 32] >> column % 32 & 1) && p.row < o.S_v) {
            p.out[column * o.H_v * o.S_v] = 0.0f;
        }
    }
}

template <int S_k>
__global__ void __launch_bounds__(block_threads) delta_net_tree_kernel(const delta_operands o) {
    extern __shared__ float4 shared[];
    chunk<S_k> & c     = *(chunk<S_k> *) shared;
    float *      stack = (float *) (&c + 1);

    const place p(o, S_k);
    const bool  is_real = p.row < o.S_v;
    const int   n_nodes = o.sched.n_nodes();
    float       state[layout<S_k>::n_values] = {};
    if (is_real) {
        load_lane<S_k>(state, p.state, p.lane);
    }
    fold_pending<S_k>(state, c, o, p);
    if (is_real && !p.fold && o.sched.n_pending() > 0) {
        store_lane<S_k>(p.state, state, p.lane);
    }
    for (int first = 0; first < n_nodes; first += chunk_nodes) {
        const int n = min(chunk_nodes, n_nodes - first);
        __syncthreads();
        prepare_nodes<S_k>(c, o, p, first, n);
        __syncthreads();
        for (int at = 0; at < n; at++) {
            visit_node<S_k>(state, c, o, p, stack, at);
        }
    }
    if (is_real && p.fold) {
        store_lane<S_k>(p.state, state, p.lane);
    }
    zero_padding(o, p, (uint32_t *) shared);
}

size_t shared_bytes_needed(int64_t S_k, int64_t n_columns, int64_t n_rows) {
    const size_t fixed  = chunk_nodes * ((2 * S_k + block_rows) * sizeof(float) + sizeof(node_gate) + GGML_SPEC_SCHED_NODE_WORDS * sizeof(int));
    const int    levels = ggml_spec_levels_max(std::min(n_columns, n_rows));
    return std::max(fixed + levels * block_rows * S_k * sizeof(float), (size_t) (n_columns + 31) / 32 * sizeof(uint32_t));
}

template <int S_k>
void launch(const delta_operands & o, cudaStream_t stream) {
    const dim3   grid((unsigned) o.H_v, (unsigned) ((o.S_v + block_rows - 1) / block_rows));
    const size_t shared = shared_bytes_needed(S_k, o.sched.n_columns, o.n_rows);
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
