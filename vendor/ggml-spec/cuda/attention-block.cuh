// A block of the attention kernel: what its threads do with one KV head, a few nodes and one split of the list.
#pragma once

#include "ggml-spec-attention.h"
#include "spec-device.cuh"

namespace ggml_spec_cuda {
namespace {

constexpr int tile_keys     = GGML_SPEC_ATTENTION_TILE;
constexpr int block_threads = 128;
constexpr int block_warps   = block_threads / warp_lanes;

// --- splits --------------------------------------------------------------------------------------------------------------

// Short lists need many splits to fill the chip, long ones few to keep their number bounded.
struct split_zone {
    int begin;   // first list entry of the zone
    int first;   // number of its first split
    int length;  // entries a split
};

__host__ __device__ __forceinline__ split_zone split_zone_of_entry(int entry) {
    return entry < 4096 ? split_zone { 0, 0, 128 } : entry < 16384 ? split_zone { 4096, 32, 512 } :
           entry < 65536 ? split_zone { 16384, 56, 2048 } : split_zone { 65536, 80, 8192 };
}

__host__ __device__ __forceinline__ int split_of_entry(int entry) {
    const split_zone zone = split_zone_of_entry(entry);
    return zone.first + (entry - zone.begin) / zone.length;
}

__device__ __forceinline__ int split_begin(int split) {
    const split_zone zone = split_zone_of_entry(split < 32 ? 0 : split < 56 ? 4096 : split < 80 ? 16384 : 65536);
    return zone.begin + (split - zone.first) * zone.length;
}

// --- operands ------------------------------------------------------------------------------------------------------------

enum cell_type { cell_f32, cell_f16, cell_q8_0 };

struct cells {
    const char * data;
    int64_t      nb1;
    cell_type    type;
};

struct attention_operands {
    strided         q, gate;    // nb1: heads, nb2: columns
    cells           k, v;
    const int32_t * nodes;
    const int32_t * committed;
    float *         out;        // [D * H, N]
    float *         partial;    // [N][H][n_splits][D], not normalised; null: one split, the result itself
    float2 *        weight;     // [N][H][n_splits]: largest score, sum of exponentials
    int2 *          range;      // [N]: first and last split that a node has
    int             n_heads, n_heads_kv, n_columns, n_list, n_splits, window, visibility;
    float           scale;
};

// The list of one node.
struct row_list {
    int n_listed;  // leading entries of the committed list
    int n_total;
    int first;     // entries before this one are outside the window
};

struct q8_0_block {
    __half  scale;
    int8_t  values[32];
};

// Eight neighbouring values of a cell, as f32.
__device__ __forceinline__ void load_values(float (&out)[8], const cells & table, int64_t cell, int at) {
    const char * row = table.data + cell * table.nb1;
    if (table.type == cell_f32) {
        const float4 a = *(const float4 *) (row + at * sizeof(float));
        const float4 b = *(const float4 *) (row + at * sizeof(float) + sizeof(float4));
        out[0] = a.x; out[1] = a.y; out[2] = a.z; out[3] = a.w;
        out[4] = b.x; out[5] = b.y; out[6] = b.z; out[7] = b.w;
    } else if (table.type == cell_f16) {
        union { uint4 words; __half values[8]; } packed;
        packed.words = *(const uint4 *) (row + at * sizeof(__half));
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = __half2float(packed.values[i]);
        }
    } else {
        const q8_0_block * block = (const q8_0_block *) row + at / 32;
        const float        scale = __half2float(block->scale);
#pragma unroll
        for (int i = 0; i < 4; i++) {  // blocks lie at even addresses only
            const uint16_t pair = *(const uint16_t *) (block->values + at % 32 + 2 * i);
            out[2 * i]     = times(scale, (float) (int8_t) (pair & 0xff));
            out[2 * i + 1] = times(scale, (float) (int8_t) (pair >> 8));
        }
    }
}

// --- a block -------------------------------------------------------------------------------------------------------------

// How threads share the two products of a tile: scores (rows x keys), then the result (rows x D).
template <int D, int rows>
struct shares {
    static constexpr int score_rows   = rows == 8 ? 2 : rows / 8;  // of a thread
    static constexpr int row_groups   = rows / score_rows;
    static constexpr int key_groups   = block_threads / row_groups;
    static constexpr int score_keys   = tile_keys / key_groups;
    static constexpr int value_groups = D / 4;
    static constexpr int result_rows  = rows * value_groups / block_threads;
};

template <int D, int rows>
struct block_memory {
    float    tile[tile_keys][D + 4];      // keys, then values
    float    q[rows][D + 4];
    float    scores[rows][tile_keys + 4];
    float    largest[rows];
    float    sum[rows];
    float    shrink[rows];
    row_list list[rows];                  // of node i of the block
    int      cell[tile_keys];
};

template <int D, int rows>
struct attention_block {
    using S = shares<D, rows>;

    const attention_operands & o;
    block_memory<D, rows> &    m;
    int *                      words;     // (cell, parent) per node of the call; empty in a prefill
    int *                      branches;  // [n_own_nodes][n_columns]: cells from a node up to the root
    int kv_head, heads, first_node, n_own_nodes;
    int n_nodes, n_committed;
    const int32_t * committed;

    __device__ attention_block(const attention_operands & o, block_memory<D, rows> & m) : o(o), m(m) {
        words       = (int *) (&m + 1);
        branches    = words + 2 * o.n_columns;
        kv_head     = blockIdx.z;
        heads       = o.n_heads / o.n_heads_kv;
        n_nodes     = o.nodes[1];
        n_committed = o.nodes[2];
        committed   = o.committed + (int64_t) o.nodes[3] * o.n_list;
        first_node  = blockIdx.y * (rows / heads);
        n_own_nodes = min(rows / heads, n_nodes - first_node);
    }

    __device__ int node_of_row(int row) const { return first_node + row / heads; }
    __device__ int head_of_row(int row) const { return kv_head * heads + row % heads; }
    __device__ int n_rows() const { return n_own_nodes * heads; }

    __device__ row_list find_list(int own_node) {
        const int node     = first_node + own_node;
        int       position = n_committed + node;
        row_list  list     = { n_committed, n_committed, 0 };
        if (o.visibility == GGML_SPEC_VISIBLE_PREFIX) {
            list.n_listed = list.n_total = position + 1;
        } else if (o.visibility == GGML_SPEC_VISIBLE_BLOCK) {
            list.n_total += n_nodes;
        } else {
            int depth = 0;
            for (int i = node; i >= 0; i = words[2 * i + 1]) {
                branches[own_node * o.n_columns + depth++] = words[2 * i];
            }
            list.n_total += depth;
            position = list.n_total - 1;
        }
        list.first = o.window > 0 ? max(0, position - o.window + 1) : 0;
        return list;
    }

    __device__ void find_lists() {
        if (o.visibility != GGML_SPEC_VISIBLE_PREFIX) {
            for (int i = threadIdx.x; i < 2 * n_nodes; i += block_threads) {
                words[i] = o.nodes[GGML_SPEC_NODES_HEADER + i];
            }
            __syncthreads();
        }
        if ((int) threadIdx.x < n_own_nodes) {
            m.list[threadIdx.x] = find_list(threadIdx.x);
        }
    }

    __device__ void start_rows() {
        for (int i = threadIdx.x; i < rows * (D / 4); i += block_threads) {
            const int row = i / (D / 4), at = i % (D / 4) * 4;
            float4    q   = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (row < n_rows()) {
                const float * source = o.q.row(head_of_row(row), node_of_row(row)) + at;
                q = make_float4(source[0], source[1], source[2], source[3]);
            }
            *(float4 *) &m.q[row][at] = q;
        }
        if (threadIdx.x < rows) {
            m.largest[threadIdx.x] = -INFINITY;
            m.sum[threadIdx.x]     = 0.0f;
        }
    }

    // Cell of list entry `entry` of an own node.
    __device__ int cell_of(int own_node, int entry) const {
        const row_list list = m.list[own_node];
        if (entry < list.n_listed) {
            return committed[entry];
        }
        const int own = entry - list.n_listed;
        return o.visibility == GGML_SPEC_VISIBLE_BLOCK ? words[2 * own]
                                                       : branches[own_node * o.n_columns + list.n_total - 1 - entry];
    }

    // n cells of a table into the tile; entries beyond n are zero. Several loads are on their way before the first is used.
    __device__ void load_tile(const cells & table, int n) {
        constexpr int n_ahead = 4;
        for (int first = threadIdx.x; first < tile_keys * (D / 8); first += n_ahead * block_threads) {
            float values[n_ahead][8] = {};
#pragma unroll
            for (int j = 0; j < n_ahead; j++) {
                const int i = first + j * block_threads;
                if (i / (D / 8) < n) {
                    load_values(values[j], table, m.cell[i / (D / 8)], kv_head * D + i % (D / 8) * 8);
                }
            }
#pragma unroll
            for (int j = 0; j < n_ahead; j++) {
                const int i = first + j * block_threads;
                float *   to = &m.tile[i / (D / 8)][i % (D / 8) * 8];
                *(float4 *) to       = make_float4(values[j][0], values[j][1], values[j][2], values[j][3]);
                *(float4 *) (to + 4) = make_float4(values[j][4], values[j][5], values[j][6], values[j][7]);
            }
        }
    }

    // Rows [row_begin, row_end) take part.
    __device__ void make_scores(int row_begin, int row_end) {
        const int row0 = threadIdx.x / S::key_groups * S::score_rows;
        const int key0 = threadIdx.x % S::key_groups;
        if (row0 + S::score_rows <= row_begin || row0 >= row_end) {
            return;
        }
        float sum[S::score_rows][S::score_keys] = {};
#pragma unroll 4
        for (int d = 0; d < D; d += 4) {
            float4 q[S::score_rows], k[S::score_keys];
#pragma unroll
            for (int i = 0; i < S::score_rows; i++) {
                q[i] = *(const float4 *) &m.q[row0 + i][d];
            }
#pragma unroll
            for (int j = 0; j < S::score_keys; j++) {
                k[j] = *(const float4 *) &m.tile[key0 + j * S::key_groups][d];
            }
#pragma unroll
            for (int i = 0; i < S::score_rows; i++) {
#pragma unroll
                for (int j = 0; j < S::score_keys; j++) {
                    sum[i][j] = madd(q[i].x, k[j].x, sum[i][j]);
                    sum[i][j] = madd(q[i].y, k[j].y, sum[i][j]);
                    sum[i][j] = madd(q[i].z, k[j].z, sum[i][j]);
                    sum[i][j] = madd(q[i].w, k[j].w, sum[i][j]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < S::score_rows; i++) {
#pragma unroll
            for (int j = 0; j < S::score_keys; j++) {
                m.scores[row0 + i][key0 + j * S::key_groups] = times(sum[i][j], o.scale);
            }
        }
    }

    // Scores become weights; a warp a row.
    __device__ void soften(int tile_begin, int row_begin, int row_end) {
        const int lane = threadIdx.x % warp_lanes;
        for (int row = row_begin + threadIdx.x / warp_lanes; row < row_end; row += block_warps) {
            const row_list list = m.list[row / heads];
            float          score[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int entry = tile_begin + lane + i * warp_lanes;
                score[i] = entry >= list.first && entry < list.n_total ? m.scores[row][lane + i * warp_lanes] : -INFINITY;
            }
            const float before  = m.largest[row];
            const float largest = fmaxf(before, warp_max(fmaxf(score[0], score[1])));
            const bool  is_seen = largest > -INFINITY;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                score[i] = is_seen ? expf(score[i] - largest) : 0.0f;
                m.scores[row][lane + i * warp_lanes] = score[i];
            }
            const float sum    = lanes_sum<warp_lanes>(plus(score[0], score[1]));
            const float shrink = is_seen ? expf(before - largest) : 1.0f;
            if (lane == 0) {
                m.largest[row] = largest;
                m.shrink[row]  = shrink;
                m.sum[row]     = madd(m.sum[row], shrink, sum);
            }
        }
    }

    // result = result * shrink + weights x values, keys in order.
    __device__ void add_values(float4 (&result)[S::result_rows], int row_begin, int row_end) {
        const int row0 = threadIdx.x / S::value_groups * S::result_rows;
        const int at   = threadIdx.x % S::value_groups * 4;
        const auto is_active = [&](int i) { return row0 + i >= row_begin && row0 + i < row_end; };
#pragma unroll
        for (int i = 0; i < S::result_rows; i++) {
            if (is_active(i)) {
                const float shrink = m.shrink[row0 + i];
                result[i] = make_float4(times(result[i].x, shrink), times(result[i].y, shrink), times(result[i].z, shrink),
                                        times(result[i].w, shrink));
            }
        }
        for (int key = 0; key < tile_keys; key += 4) {
            float4 v[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                v[j] = *(const float4 *) &m.tile[key + j][at];
            }
#pragma unroll
            for (int i = 0; i < S::result_rows; i++) {
                if (is_active(i)) {
                    const float4 weights = *(const float4 *) &m.scores[row0 + i][key];
                    const float  w[4]    = { weights.x, weights.y, weights.z, weights.w };
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        result[i].x = madd(w[j], v[j].x, result[i].x);
                        result[i].y = madd(w[j], v[j].y, result[i].y);
                        result[i].z = madd(w[j], v[j].z, result[i].z);
                        result[i].w = madd(w[j], v[j].w, result[i].w);
                    }
                }
            }
        }
    }

    // One tile for own nodes [node_begin, node_end), which share its cells.
    __device__ void fold_tile(float4 (&result)[S::result_rows], int tile_begin, int node_begin, int node_end) {
        const int n = min(tile_keys, longest_list(node_begin, node_end) - tile_begin);
        if (n <= 0) {
            return;
        }
        const int row_begin = node_begin * heads, row_end = node_end * heads;
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += block_threads) {
            m.cell[i] = cell_of(node_end - 1, tile_begin + i);
        }
        __syncthreads();
        load_tile(o.k, n);
        __syncthreads();
        make_scores(row_begin, row_end);
        __syncthreads();
        load_tile(o.v, n);
        soften(tile_begin, row_begin, row_end);
        __syncthreads();
        add_values(result, row_begin, row_end);
    }

    __device__ void fold_entries(float4 (&result)[S::result_rows], int begin, int end) {
        int first = end;
        for (int node = 0; node < n_own_nodes; node++) {
            first = min(first, m.list[node].first);
        }
        const bool share_all = o.visibility != GGML_SPEC_VISIBLE_ANCESTORS;
        for (int tile = max(begin, first / tile_keys * tile_keys); tile < end; tile += tile_keys) {
            if (share_all || tile + tile_keys <= n_committed) {
                fold_tile(result, tile, 0, n_own_nodes);
                continue;
            }
            for (int node = 0; node < n_own_nodes; node++) {
                fold_tile(result, tile, node, node + 1);
            }
        }
    }

    __device__ int longest_list(int node_begin, int node_end) const {
        int longest = 0;
        for (int node = node_begin; node < node_end; node++) {
            longest = max(longest, m.list[node].n_total);
        }
        return longest;
    }

    template <typename Write>
    __device__ void for_each_result(const float4 (&result)[S::result_rows], Write write) const {
        const int row0 = threadIdx.x / S::value_groups * S::result_rows;
        const int at   = threadIdx.x % S::value_groups * 4;
#pragma unroll
        for (int i = 0; i < S::result_rows; i++) {
            if (row0 + i < n_rows()) {
                write(row0 + i, at, result[i]);
            }
        }
    }
};

}  // namespace
}  // namespace ggml_spec_cuda
