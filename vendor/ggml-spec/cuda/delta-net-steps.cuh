// Steps of the tree delta net and how they are prepared: rows to replay, then nodes to visit.
#pragma once

#include "spec-device.cuh"

namespace ggml_spec_cuda {
namespace {

constexpr int row_lanes     = 8;    // threads that share a state row
constexpr int walkers       = 128;
constexpr int helper_warps  = 2;
constexpr int block_threads = walkers + helper_warps * warp_lanes;
constexpr int block_rows    = walkers / row_lanes;
constexpr int chunk_steps   = 8;
constexpr int helper_steps  = chunk_steps / helper_warps;
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

// What a step needs beside vectors, the same for every row of the head.
struct step_words {
    float decay;
    float beta;
    int   node;     // -1: a row to replay
    int   restore;  // stack levels, or -1
    int   save;
};

template <int S_k>
struct chunk {
    float      q[chunk_steps][S_k];  // scaled by 1/sqrt(S_k)
    float      k[chunk_steps][S_k];
    float      v[chunk_steps][block_rows];  // values; of rows to replay, their deltas
    step_words words[chunk_steps];
    float      log_g[chunk_steps];
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
    int     n_pending, n_steps;

    __device__ __forceinline__ place(const delta_operands & o, int S_k) {
        head     = blockIdx.x;
        key_head = head % (int) o.H_k;
        row      = blockIdx.y * block_rows + threadIdx.x / row_lanes;
        lane     = threadIdx.x % row_lanes;
        state    = o.state + (((int64_t) o.sched.state_slot() * o.H_v + head) * o.S_v + row) * S_k;
        out      = o.out + head * o.S_v + row;
        deltas   = bank_u_row(o, o.sched.write_bank(), 0, head) + row;
        fold      = o.sched.fold();
        n_pending = o.sched.n_pending();
        n_steps   = n_pending + o.sched.n_nodes();
    }

    __device__ __forceinline__ bool is_real(const delta_operands & o) const { return row < o.S_v; }
};

// --- preparing steps -----------------------------------------------------------------------------------------------------

// The words of a step: a row to replay has nothing but its decay.
__device__ __forceinline__ step_words make_words(const delta_operands & o, const place & p, int step, float & log_g) {
    if (step < p.n_pending) {
        log_g = bank_u_row(o, o.sched.pending_bank(), o.sched.pending_row(step), p.head)[o.S_v];
        return { ggml_spec_decay(log_g), 0.0f, -1, -1, -1 };
    }
    const int       i     = step - p.n_pending;
    const int32_t * visit = o.sched.visit(i);
    const int       node  = p.fold ? i : visit[0];
    const float     g     = o.g.row(node)[p.head];
    const float     beta  = o.beta.row(node)[p.head];
    log_g = o.gates ? ggml_spec_log_decay(g, o.gates[p.head], o.gates[o.H_v + p.head]) : g;
    return { ggml_spec_decay(log_g), o.gates ? ggml_spec_write_strength(beta) : beta, node, p.fold ? -1 : visit[2],
             p.fold ? -1 : visit[3] };
}

// A vector of S_k values as a warp holds it.
template <int S_k>
struct warp_vector {
    static constexpr int n = (S_k + warp_lanes - 1) / warp_lanes;
    float values[n];

    __device__ __forceinline__ void load(const float * x, int lane) {
#pragma unroll
        for (int i = 0; i < n; i++) {
            values[i] = i * warp_lanes + lane < S_k ? x[i * warp_lanes + lane] : 0.0f;
        }
    }

    // out = x * scale, or x * scale / |x| with eps >= 0.
    __device__ __forceinline__ void store(float * out, int lane, float scale, float eps) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < n; i++) {
            sum = madd(values[i], values[i], sum);
        }
        if (eps >= 0.0f) {
            scale = scale / sqrtf(plus(lanes_sum<warp_lanes>(sum), eps));
        }
#pragma unroll
        for (int i = 0; i < n; i++) {
            if (i * warp_lanes + lane < S_k) {
                out[i * warp_lanes + lane] = times(values[i], scale);
            }
        }
    }
};

// Key and log decay of a node; the deltas are written by the walk. One block of a head does it.
template <int S_k>
__device__ __forceinline__ void write_bank(const chunk<S_k> & c, const delta_operands & o, const place & p, int at, int lane) {
    const int node = c.words[at].node;
    if (p.head < o.H_k) {
        float * key = bank_k_row(o, S_k, o.sched.write_bank(), node, p.head);
        for (int i = lane; i < S_k; i += warp_lanes) {
            key[i] = c.k[at][i];
        }
    }
    if (lane < GGML_SPEC_BANK_U_EXTRA) {
        bank_u_row(o, o.sched.write_bank(), node, p.head)[o.S_v + lane] = lane == 0 ? c.log_g[at] : 0.0f;
    }
}

// Steps first .. of a chunk by the helpers: a warp takes every other one, and loads all of its own before it uses any.
template <int S_k>
__device__ void prepare_steps(chunk<S_k> & c, const delta_operands & o, const place & p, int first) {
    const int lane      = threadIdx.x % warp_lanes;
    const int warp      = (threadIdx.x - walkers) / warp_lanes;
    const int row_begin = blockIdx.y * block_rows;
    if (lane < helper_steps && first + warp + lane * helper_warps < p.n_steps) {
        const int at = warp + lane * helper_warps;
        c.words[at]  = make_words(o, p, first + at, c.log_g[at]);
    }
    __syncwarp();
    warp_vector<S_k> q[helper_steps], k[helper_steps];
    float            v[helper_steps];
#pragma unroll
    for (int j = 0; j < helper_steps; j++) {
        const int at = warp + j * helper_warps;
        const int row = row_begin + lane;
        if (first + at >= p.n_steps) {
            break;
        }
        const bool has_row = lane < block_rows && row < o.S_v;
        if (first + at < p.n_pending) {
            const int bank = o.sched.pending_bank(), bank_row = o.sched.pending_row(first + at);
            k[j].load(bank_k_row(o, S_k, bank, bank_row, p.key_head), lane);
            v[j] = has_row ? bank_u_row(o, bank, bank_row, p.head)[row] : 0.0f;
        } else {
            const int node = c.words[at].node;
            q[j].load(o.q.row(p.key_head, node), lane);
            k[j].load(o.k.row(p.key_head, node), lane);
            v[j] = has_row ? o.v.row(p.head, node)[row] : 0.0f;
        }
    }
#pragma unroll
    for (int j = 0; j < helper_steps; j++) {
        const int at = warp + j * helper_warps;
        if (first + at >= p.n_steps) {
            break;
        }
        const bool is_node = first + at >= p.n_pending;
        if (lane < block_rows) {
            c.v[at][lane] = v[j];
        }
        k[j].store(c.k[at], lane, 1.0f, is_node ? o.l2_eps : -1.0f);
        if (is_node) {
            q[j].store(c.q[at], lane, 1.0f / sqrtf((float) S_k), o.l2_eps);
        }
        __syncwarp();
        if (is_node && !p.fold && blockIdx.y == 0) {
            write_bank(c, o, p, at, lane);
        }
    }
}

}  // namespace
}  // namespace ggml_spec_cuda
