// CPU kernel of ggml_spec_attention: online softmax over tiles of listed cells.
//
// A tile is a fixed run of a row's cell list (tile t holds list entries 64 t .. 64 t + 63), so the grouping of the sums
// depends on the row's own list only. Rows of one KV head that share a whole tile of committed cells share its
// conversion to f32; the tile in which a row's ancestors begin, and later ones, are done row by row.

#include "attention.h"

#include "ggml-spec-attention.h"

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "vec.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>

namespace {

constexpr int TILE       = GGML_SPEC_ATTENTION_TILE;
constexpr int GROUP_ROWS = 4;  // nodes that share a converted tile

struct shape {
    int64_t D, H, H_kv, N, n_cells, n_list;
    int64_t heads_per_kv;
    int     n_nodes, n_committed;
    const int32_t * committed;
    const int32_t * node_words;  // (cell, parent) per node
    float   scale;
    int     window, visibility;
};

shape read_shape(const ggml_tensor * dst) {
    const ggml_tensor * q         = dst->src[0];
    const ggml_tensor * k         = dst->src[1];
    const ggml_tensor * committed = dst->src[4];
    const int32_t *     nodes     = (const int32_t *) dst->src[3]->data;
    shape s;
    s.D            = q->ne[0];
    s.H            = q->ne[1];
    s.N            = q->ne[2];
    s.H_kv         = k->ne[0] / s.D;
    s.heads_per_kv = s.H / s.H_kv;
    s.n_cells      = k->ne[1];
    s.n_list       = committed->ne[0];
    s.n_nodes      = nodes[1];
    s.n_committed  = nodes[2];
    s.committed    = (const int32_t *) committed->data + (int64_t) nodes[3] * s.n_list;
    s.node_words   = nodes + GGML_SPEC_NODES_HEADER;
    memcpy(&s.scale, &dst->op_params[0], sizeof(float));
    s.window     = dst->op_params[1];
    s.visibility = dst->op_params[2];
    return s;
}

// One (node, query head): the running softmax.
struct running {
    float   max;
    float   sum;
    float * acc;  // [D]
};

void start(running & r, float * acc, int64_t D) {
    r = { -INFINITY, 0.0f, acc };
    std::fill(acc, acc + D, 0.0f);
}

void convert_row(const ggml_tensor * table, int64_t cell, int64_t head, int64_t D, float * out) {
    const char * row = (const char *) table->data + cell * table->nb[1] +
                       head * D / ggml_blck_size(table->type) * table->nb[0];
    if (table->type == GGML_TYPE_F32) {
        memcpy(out, row, D * sizeof(float));
    } else if (table->type == GGML_TYPE_F16) {
        ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) row, out, D);
    } else {
        ggml_get_type_traits(table->type)->to_float(row, out, D);
    }
}

// Fold n <= TILE converted cells into one row; entries [first, n) are visible.
void fold_tile(running & r, const float * q, const float * k, const float * v, int first, int n, float scale, int64_t D) {
    float p[TILE];
    float tile_max = -INFINITY;
    for (int i = 0; i < TILE; i++) {
        p[i] = -INFINITY;
    }
    for (int i = first; i < n; i++) {
        float dot;
        ggml_vec_dot_f32((int) D, &dot, 0, k + i * D, 0, q, 0, 1);
        p[i]     = dot * scale;
        tile_max = std::max(tile_max, p[i]);
    }
    if (tile_max == -INFINITY) {
        return;
    }
    if (tile_max > r.max) {
        const float shrink = expf(r.max - tile_max);  // 0 for the first tile
        ggml_vec_scale_f32((int) D, r.acc, shrink);
        r.sum *= shrink;
        r.max = tile_max;
    }
    r.sum += (float) ggml_vec_soft_max_f32(TILE, p, p, r.max);
    for (int i = first; i < n; i++) {
        ggml_vec_mad_f32((int) D, r.acc, v + i * D, p[i]);
    }
}

// The cells one row reads: entries of the committed list, then its own branch.
struct visible {
    int n_listed;  // leading entries of the committed list
    int n_own;
    int first;     // entries before this one are outside the window
};

visible find_visible(const shape & s, int node, int32_t * own) {
    visible seen     = { s.n_committed, 0, 0 };
    int     position = s.n_committed + node;
    if (s.visibility == GGML_SPEC_VISIBLE_PREFIX) {
        seen.n_listed = position + 1;
    } else if (s.visibility == GGML_SPEC_VISIBLE_BLOCK) {
        for (; seen.n_own < s.n_nodes; seen.n_own++) {
            own[seen.n_own] = s.node_words[2 * seen.n_own];
        }
    } else {
        for (int i = node; i >= 0; i = s.node_words[2 * i + 1]) {
            own[seen.n_own++] = s.node_words[2 * i];
        }
        std::reverse(own, own + seen.n_own);
        position = s.n_committed + seen.n_own - 1;
    }
    seen.first = s.window > 0 ? std::max(0, position - s.window + 1) : 0;
    return seen;
}

struct workspace {
    float *   k;      // [TILE, D]
    float *   v;      // [TILE, D]
    float *   acc;    // [GROUP_ROWS * heads_per_kv, D]
    int32_t * own;    // [GROUP_ROWS, N]
};

size_t floats_per_thread(int64_t D, int64_t heads_per_kv, int64_t N) {
    const int64_t apart = 16;  // threads keep off each other's cache lines
    return (size_t) (2 * TILE * D + GROUP_ROWS * heads_per_kv * D + GROUP_ROWS * N + apart);
}

void attend_group(const shape & s, ggml_tensor * dst, int64_t kv_head, int node_begin, int node_end, workspace w,
                  running * rows) {
    const ggml_tensor * q = dst->src[0];
    const ggml_tensor * k = dst->src[1];
    const ggml_tensor * v = dst->src[2];
    const int64_t       D = s.D;

    const auto query = [&](int node, int64_t j) {
        return (const float *) ((const char *) q->data + node * q->nb[2] + (kv_head * s.heads_per_kv + j) * q->nb[1]);
    };
    const auto load = [&](const int32_t * cells, int n, int at) {
        for (int i = 0; i < n; i++) {
            convert_row(k, cells[i], kv_head, D, w.k + (at + i) * D);
            convert_row(v, cells[i], kv_head, D, w.v + (at + i) * D);
        }
    };
    const int n_rows = node_end - node_begin;
    visible   seen[GROUP_ROWS];
    int       first_tile = INT_MAX;
    int       n_shared   = INT_MAX;  // tiles that every row reads whole from the committed list
    for (int row = 0; row < n_rows; row++) {
        seen[row]  = find_visible(s, node_begin + row, w.own + row * s.N);
        first_tile = std::min(first_tile, seen[row].first / TILE);
        n_shared   = std::min(n_shared, seen[row].n_listed / TILE);
        for (int64_t j = 0; j < s.heads_per_kv; j++) {
            const int64_t r = row * s.heads_per_kv + j;
            start(rows[r], w.acc + r * D, D);
        }
    }
    const auto fold = [&](int row, int tile, int n) {
        const int first = std::max(0, seen[row].first - tile * TILE);
        for (int64_t j = 0; j < s.heads_per_kv; j++) {
            fold_tile(rows[row * s.heads_per_kv + j], query(node_begin + row, j), w.k, w.v, first, n, s.scale, D);
        }
    };

    for (int tile = first_tile; tile < n_shared; tile++) {
        load(s.committed + tile * TILE, TILE, 0);
        for (int row = 0; row < n_rows; row++) {
            fold(row, tile, TILE);
        }
    }
    for (int row = 0; row < n_rows; row++) {
        const int n_total = seen[row].n_listed + seen[row].n_own;
        for (int tile = std::max(n_shared, seen[row].first / TILE); tile * TILE < n_total; tile++) {
            const int begin    = tile * TILE;
            const int n        = std::min(TILE, n_total - begin);
            const int n_listed = std::clamp(seen[row].n_listed - begin, 0, n);
            load(s.committed + begin, n_listed, 0);
            load(w.own + row * s.N + std::max(0, begin - seen[row].n_listed), n - n_listed, n_listed);
            fold(row, tile, n);
        }
    }
}

void write_rows(const shape & s, ggml_tensor * dst, int64_t kv_head, int node_begin, int node_end, const running * rows) {
    const ggml_tensor * gate = dst->src[5];
    for (int node = node_begin; node < node_end; node++) {
        for (int64_t j = 0; j < s.heads_per_kv; j++) {
            const running & r    = rows[(node - node_begin) * s.heads_per_kv + j];
            const int64_t   head = kv_head * s.heads_per_kv + j;
            float *         out  = (float *) ((char *) dst->data + node * dst->nb[1]) + head * s.D;
            const float     norm = 1.0f / r.sum;
            if (gate == nullptr) {
                for (int64_t d = 0; d < s.D; d++) {
                    out[d] = r.acc[d] * norm;
                }
                continue;
            }
            const float * g = (const float *) ((const char *) gate->data + node * gate->nb[2] + head * gate->nb[1]);
            for (int64_t d = 0; d < s.D; d++) {
                out[d] = r.acc[d] * norm / (1.0f + expf(-g[d]));
            }
        }
    }
}

}  // namespace

size_t ggml_spec_cpu_attention_work_size(int n_threads, const ggml_tensor * dst) {
    const shape  s    = { dst->src[0]->ne[0], dst->src[0]->ne[1], dst->src[1]->ne[0] / dst->src[0]->ne[0],
                          dst->src[0]->ne[2], 0, 0, 0, 0, 0, nullptr, nullptr, 0.0f, 0, 0 };
    const size_t rows = GROUP_ROWS * (s.H / s.H_kv);
    return n_threads * (floats_per_thread(s.D, s.H / s.H_kv, s.N) * sizeof(float) + rows * sizeof(running));
}

void ggml_spec_cpu_attention(const ggml_compute_params * params, ggml_tensor * dst) {
    const shape  s        = read_shape(dst);
    const size_t n_floats = floats_per_thread(s.D, s.heads_per_kv, s.N);
    const size_t n_rows   = GROUP_ROWS * s.heads_per_kv;

    char *    base = (char *) params->wdata + params->ith * (n_floats * sizeof(float) + n_rows * sizeof(running));
    running * rows = (running *) base;
    workspace w;
    w.k   = (float *) (rows + n_rows);
    w.v   = w.k + TILE * s.D;
    w.acc = w.v + TILE * s.D;
    w.own = (int32_t *) (w.acc + n_rows * s.D);

    // A group of one row a task until every thread has work: the result does not depend on the grouping.
    const int64_t rows_per_task = std::clamp<int64_t>(s.n_nodes * s.H_kv / (2 * params->nth), 1, GROUP_ROWS);
    const int64_t n_groups      = (s.n_nodes + rows_per_task - 1) / rows_per_task;
    for (int64_t task = params->ith; task < n_groups * s.H_kv; task += params->nth) {
        const int64_t kv_head    = task % s.H_kv;
        const int     node_begin = (int) (task / s.H_kv * rows_per_task);
        const int     node_end   = (int) std::min<int64_t>(node_begin + rows_per_task, s.n_nodes);
        attend_group(s, dst, kv_head, node_begin, node_end, w, rows);
        write_rows(s, dst, kv_head, node_begin, node_end, rows);
    }
    for (int64_t node = s.n_nodes + params->ith; node < s.N; node += params->nth) {
        memset((char *) dst->data + node * dst->nb[1], 0, s.D * s.H * sizeof(float));
    }
}
