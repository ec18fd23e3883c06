// What attention over listed cells reads and in which order: operands, the lists of nodes, and how lists are cut.
//
// A list is cut into tiles of 64 entries by position alone. Tiles of the committed list serve all nodes of a call
// ("shared"); from the tile on in which branches begin, a node's tiles are its own ("tail"). A run of shared tiles, a
// "split", is folded by one block; splits are cut by position and by the length of the row's own list. A second kernel
// joins splits and tail tiles of a row in list order with the same arithmetic, so that a row's bits depend neither on
// where its branch began nor on the rows beside it.
#pragma once

#include "ggml-spec-attention.h"
#include "spec-device.cuh"

namespace ggml_spec_cuda {

constexpr int tile_keys = GGML_SPEC_ATTENTION_TILE;

// --- splits --------------------------------------------------------------------------------------------------------------

constexpr int shortest_split = 2 * tile_keys;

__host__ __device__ __forceinline__ int round_down(int n, int step) {
    return n / step * step;
}

// --- operands ------------------------------------------------------------------------------------------------------------

enum cell_type { cell_f32, cell_f16, cell_q8_0, cell_q4_0 };

struct cells {
    const char * data;
    int64_t      nb1;
    cell_type    type;
};

// 32 quantised values: a f16 scale, then bytes (q8_0), or nibbles above 8 with values i and i + 16 in byte i (q4_0).
// Blocks lie at even addresses only.
struct cell_block {
    const char * data;
    bool         is_q8_0;

    __device__ __forceinline__ cell_block(const cells & table, const char * row, int index)
        : data(row + index * (table.type == cell_q8_0 ? 34 : 18)), is_q8_0(table.type == cell_q8_0) {}

    __device__ __forceinline__ float scale() const { return __half2float(*(const __half *) data); }

    __device__ __forceinline__ int value(int i) const {
        const uint8_t byte = ((const uint8_t *) data)[sizeof(__half) + (is_q8_0 ? i : i % 16)];
        return is_q8_0 ? (int8_t) byte : (i < 16 ? byte & 15 : byte >> 4) - 8;
    }

    // Bytes 2 i and 2 i + 1 after the scale.
    __device__ __forceinline__ unsigned pair(int i) const { return ((const uint16_t *) data)[1 + i]; }
};

// f32 values and the weight they have in a softmax: the largest score, and the sum of powers of 2 relative to it.
struct weighted {
    float largest;
    float sum;
};

struct attention_operands {
    strided         q, gate;       // nb1: heads, nb2: columns
    cells           k, v;
    const int32_t * nodes;
    const int32_t * committed;
    float *         out;           // [D * H, N]
    float *         partial;       // [N][H][n_parts][D], not normalised; null: one split, which is the result
    weighted *      weight;        // [N][H][n_parts]
    int2 *          range;         // [N]: first entry in the window and end of a node's list; of trees only
    int             n_heads, n_heads_kv, n_columns, n_list, window, visibility;
    int             n_groups;      // of rows that share their tiles
    int             group_rows;    // rows of a group
    int             most_splits;   // that a list may be cut into
    int             n_splits, n_tails;  // parts of a row that there is room for: splits, then tail tiles
    float           scale;         // of scores that are exponents of 2

    __device__ __forceinline__ int n_nodes()     const { return nodes[1]; }
    __device__ __forceinline__ int n_committed() const { return nodes[2]; }
    __device__ __forceinline__ const int32_t * list() const { return committed + (int64_t) nodes[3] * n_list; }
    __device__ __forceinline__ int node_cell(int node)   const { return nodes[GGML_SPEC_NODES_HEADER + 2 * node]; }
    __device__ __forceinline__ int node_parent(int node) const { return nodes[GGML_SPEC_NODES_HEADER + 2 * node + 1]; }
    __device__ __forceinline__ bool is_tree() const { return visibility == GGML_SPEC_VISIBLE_ANCESTORS; }

    // End of what is read for all rows together: in a tree the last whole tile of committed cells.
    __device__ __forceinline__ int shared_end(int longest) const {
        return is_tree() ? round_down(n_committed(), tile_keys) : longest;
    }

    // Entries a split of a row whose list has `total` entries: so many that about all of the chip has one split.
    __device__ __forceinline__ int split_length(int total) const {
        const int n_read = is_tree() || window == 0 ? total : min(total, window), step = most_splits * tile_keys;
        return max(shortest_split, (n_read + step - 1) / step * tile_keys);
    }

    // Where a part lies: splits that one row has follow each other, so their places differ.
    __device__ __forceinline__ int split_place(int split) const { return split % n_splits; }

    // First part of a row.
    __device__ __forceinline__ int64_t parts(int node, int head) const {
        return ((int64_t) node * n_heads + head) * (n_splits + n_tails);
    }
};

// Entries [first, total) of a node's list are visible.
struct row_range {
    int first;
    int total;
};

__device__ __forceinline__ row_range make_range(const attention_operands & o, int position, int total) {
    return { o.window > 0 ? max(0, position - o.window + 1) : 0, total };
}

// The range of a node where no tree has to be walked for it.
__device__ __forceinline__ row_range plain_range(const attention_operands & o, int node) {
    const int position = o.n_committed() + node;
    return make_range(o, position, o.visibility == GGML_SPEC_VISIBLE_PREFIX ? position + 1 : o.n_committed() + o.n_nodes());
}

// --- joining -------------------------------------------------------------------------------------------------------------

// What the sums so far and a new part are multiplied with when they come together; a part without weight changes nothing.
struct join_factors {
    float before;
    float part;
};

__device__ __forceinline__ join_factors join(float & largest, float & sum, float part_largest, float part_sum) {
    if (part_largest == -INFINITY) {
        return { 1.0f, 0.0f };
    }
    const float        new_largest = fmaxf(largest, part_largest);
    const join_factors factors     = { power_of_2(plus(largest, -new_largest)),
                                     power_of_2(plus(part_largest, -new_largest)) };
    largest = new_largest;
    sum     = madd(sum, factors.before, times(part_sum, factors.part));
    return factors;
}

__device__ __forceinline__ float joined(float before, float part, join_factors factors) {
    return madd(before, factors.before, times(part, factors.part));
}

__device__ __forceinline__ float4 times(float4 x, float factor) {
    return make_float4(times(x.x, factor), times(x.y, factor), times(x.z, factor), times(x.w, factor));
}

__device__ __forceinline__ float4 joined(float4 before, float4 part, join_factors factors) {
    return make_float4(joined(before.x, part.x, factors), joined(before.y, part.y, factors),
                       joined(before.z, part.z, factors), joined(before.w, part.w, factors));
}

// Results at .. at + 3, multiplied by the sigmoid of the gate where there is one.
__device__ __forceinline__ float4 gated(const attention_operands & o, int node, int head, int at, float4 x) {
    if (o.gate.data == nullptr) {
        return x;
    }
    const float * gate = o.gate.row(head, node) + at;
    const auto    one  = [&](float value, int i) { return value / plus(1.0f, expf(-gate[i])); };
    return make_float4(one(x.x, 0), one(x.y, 1), one(x.z, 2), one(x.w, 3));
}

}  // namespace ggml_spec_cuda
