// Causal convolution over a draft tree: each node's taps are its ancestors' inputs, then the committed window.

#include "spec-cpu.h"
#include "spec-simd.h"
#include "vec.h"

#include <algorithm>
#include <cstring>

namespace ggml_spec {
namespace {

constexpr int     taps_max = 8;
constexpr int64_t step     = 64;   // threads share the channels in multiples of it, itself one of every ISA's lanes
constexpr int64_t block    = 256;  // channels handled at once: their weights and history stay in the first cache

// Channels [begin, begin + n) and their rows in the work buffer.
struct conv_part {
    int64_t begin;
    int64_t n;
    int     n_taps;
    float * weights;    // [n_taps][n], tap n_taps-1 is the node itself
    float * history;    // [n_taps-1][n], oldest first
    float * committed;  // [n_taps-1][n], the window after a prefill
};

constexpr size_t part_bytes = block * (3 * taps_max - 2) * sizeof(float);

// Between [n][R] in a tensor and [R][n] in the work buffer; R is known so that the compiler interleaves vectors.
template <int R>
void transpose_rows(float * __restrict out, const float * __restrict in, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        for (int row = 0; row < R; row++) {
            out[row * n + i] = in[i * R + row];
        }
    }
}

template <int R>
void transpose_back(float * __restrict out, const float * __restrict in, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        for (int row = 0; row < R; row++) {
            out[i * R + row] = in[row * n + i];
        }
    }
}

using transpose_fn = void (*)(float *, const float *, int64_t);

constexpr transpose_fn to_rows[taps_max + 1] = {
    nullptr, transpose_rows<1>, transpose_rows<2>, transpose_rows<3>, transpose_rows<4>, transpose_rows<5>,
    transpose_rows<6>, transpose_rows<7>, transpose_rows<8>,
};
constexpr transpose_fn from_rows[taps_max] = {
    nullptr, transpose_back<1>, transpose_back<2>, transpose_back<3>, transpose_back<4>, transpose_back<5>,
    transpose_back<6>, transpose_back<7>,
};

// The last n_history of (history, appended) become the history.
void advance(float * history, const conv_part & part, const float * const * appended, int64_t n_appended) {
    const int64_t n_history = part.n_taps - 1;
    const int64_t n_new     = n_appended < n_history ? n_appended : n_history;
    const size_t  row_bytes = part.n * sizeof(float);
    memmove(history, history + n_new * part.n, (n_history - n_new) * row_bytes);
    for (int64_t i = 0; i < n_new; i++) {
        memcpy(history + (n_history - n_new + i) * part.n, appended[i], row_bytes);
    }
}

// Only the newest n_history of the rows matter; fills `newest` and returns how many.
template <typename RowOf>
int64_t newest_rows(const float ** newest, int64_t n_rows, int64_t n_history, RowOf row_of) {
    const int64_t n = n_rows < n_history ? n_rows : n_history;
    for (int64_t i = 0; i < n; i++) {
        newest[i] = row_of(n_rows - n + i);
    }
    return n;
}

void convolve(const conv_part & part, const float * const * taps, float * out) {
    for (int64_t i = 0; i < part.n; i += lanes) {
        vec sum = mul(load(part.weights + i), load(taps[0] + i));
        for (int t = 1; t < part.n_taps; t++) {
            sum = madd(load(part.weights + t * part.n + i), load(taps[t] + i), sum);
        }
        store(out + i, sum);
    }
    ggml_vec_silu_f32((int) part.n, out, out);
}

// taps[n_taps-1] is the node; older taps are its ancestors, then the history.
void collect_taps(const conv_part & part, const ggml_tensor * x, const int32_t * parents, int32_t node, const float ** taps) {
    int t = part.n_taps - 1;
    for (; t >= 0 && node >= 0; t--) {
        taps[t] = column(x, node) + part.begin;
        node    = parents[node];
    }
    for (int64_t row = part.n_taps - 2; t >= 0; t--, row--) {
        taps[t] = part.history + row * part.n;
    }
}

void run_nodes(const conv_part & part, const schedule & s, const int32_t * parents, const ggml_tensor * op) {
    const ggml_tensor * x      = op->src[GGML_SPEC_CONV_SRC_X];
    const ggml_tensor * bank_x = op->src[GGML_SPEC_CONV_SRC_BANK_X];
    for (int32_t i = 0; i < s.n_nodes; i++) {
        const int32_t node = s.fold ? i : s.nodes[i].node;
        const float * taps[taps_max];
        collect_taps(part, x, parents, node, taps);
        convolve(part, taps, column(op, node) + part.begin);
        if (!s.fold) {
            memcpy(column(bank_x, node, s.write_bank) + part.begin, column(x, node) + part.begin, part.n * sizeof(float));
        }
    }
}

void mark_nodes(const schedule & s, int64_t n_columns, int32_t * parents, uint8_t * visited) {
    memset(visited, 0, n_columns);
    for (int32_t i = 0; i < s.n_nodes; i++) {
        const int32_t node = s.fold ? i : s.nodes[i].node;
        parents[node] = s.fold ? i - 1 : s.nodes[i].parent;
        visited[node] = 1;
    }
}

void zero_padding(const conv_part & part, const uint8_t * visited, ggml_tensor * op) {
    for (int64_t i = 0; i < op->ne[1]; i++) {
        if (!visited[i]) {
            memset(column(op, i) + part.begin, 0, part.n * sizeof(float));
        }
    }
}

void commit(const conv_part & part, const schedule & s, const ggml_tensor * op) {
    const ggml_tensor * x         = op->src[GGML_SPEC_CONV_SRC_X];
    const ggml_tensor * window    = op->src[GGML_SPEC_CONV_SRC_WINDOW];
    const ggml_tensor * bank_x    = op->src[GGML_SPEC_CONV_SRC_BANK_X];
    const int64_t       n_history = part.n_taps - 1;
    const float *       newest[taps_max];

    int64_t n = newest_rows(newest, s.n_pending, n_history, [&](int64_t i) {
        return column(bank_x, s.pending[i], s.pending_bank) + part.begin;
    });
    advance(part.history, part, newest, n);
    float * committed = part.history;
    if (s.fold) {
        // The nodes still need this history, so what follows them is made beside it.
        committed = part.committed;
        memcpy(committed, part.history, n_history * part.n * sizeof(float));
        n = newest_rows(newest, s.n_nodes, n_history, [&](int64_t i) { return column(x, i) + part.begin; });
        advance(committed, part, newest, n);
    }
    if (s.fold || s.n_pending > 0) {
        from_rows[n_history](column(window, 0, s.state_slot) + part.begin * n_history, committed, part.n);
    }
}

}  // namespace

size_t conv_tree_work_size(int n_threads, const ggml_tensor * op) {
    return n_threads * (part_bytes + padded(op->ne[1] * (sizeof(int32_t) + sizeof(uint8_t))));
}

void conv_tree_compute(const ggml_compute_params * params, ggml_tensor * op) {
    const ggml_tensor * w      = op->src[GGML_SPEC_CONV_SRC_W];
    const ggml_tensor * window = op->src[GGML_SPEC_CONV_SRC_WINDOW];
    const ggml_tensor * bank_x = op->src[GGML_SPEC_CONV_SRC_BANK_X];
    const schedule s = read_schedule(op->src[GGML_SPEC_CONV_SRC_SCHED], op->ne[1], bank_x->ne[1], window->ne[2]);

    char *    work    = (char *) params->wdata + params->ith * (conv_tree_work_size(params->nth, op) / params->nth);
    int32_t * parents = (int32_t *) (work + part_bytes);
    uint8_t * visited = (uint8_t *) (parents + op->ne[1]);
    mark_nodes(s, op->ne[1], parents, visited);

    const range channels = share(op->ne[0], step, params->ith, params->nth);
    for (int64_t begin = channels.begin; begin < channels.end; begin += block) {
        conv_part part = { begin, std::min(block, channels.end - begin), (int) w->ne[0], (float *) work, nullptr, nullptr };
        part.history   = part.weights + part.n_taps * part.n;
        part.committed = part.history + (part.n_taps - 1) * part.n;
        to_rows[part.n_taps](part.weights, (const float *) w->data + begin * part.n_taps, part.n);
        to_rows[part.n_taps - 1](part.history, column(window, 0, s.state_slot) + begin * (part.n_taps - 1), part.n);
        commit(part, s, op);
        run_nodes(part, s, parents, op);
        zero_padding(part, visited, op);
    }
}

}  // namespace ggml_spec
