// What attention over listed cells reads and in which order: operands, the lists of nodes, and how lists are cut.
//
// A list is cut into tiles of 64 entries by position alone. Tiles of the committed list serve all nodes of a call
// ("shared"); from the tile on in which branches begin, a node's tiles are its own ("tail"). A run of shared tiles, a
// "split", is folded by one block; splits, too, are cut by position. A second kernel joins splits and tail tiles of a
// row in list order with the same arithmetic, so that a row's bits do not depend on where its branch began.
#pragma once

#include "ggml-spec-attention.h"
#include "spec-device.cuh"

namespace ggml_spec_cuda {

constexpr int tile_keys = GGML_SPEC_ATTENTION_TILE;

// --- splits --------------------------------------------------------------------------------------------------------------

// Short lists need many splits to fill the chip, long ones few to keep their number bounded.
struct split_zone {
    int begin;   // first list entry of the zone
    int first;   // number of its first split
    int length;  // entries a split
};

__host__ __device__ __forceinline__ split_zone split_zone_of_entry(int entry) {
    return entry < 2048 ? split_zone { 0, 0, 128 } : entry < 8192 ? split_zone { 2048, 16, 256 } :
           entry < 32768 ? split_zone { 8192, 40, 512 } : entry < 131072 ? split_zone { 32768, 88, 1024 } :
                                                          split_zone { 131072, 184, 4096 };
}

__host__ __device__ __forceinline__ int split_of_entry(int entry) {
    const split_zone zone = split_zone_of_entry(entry);
    return zone.first + (entry - zone.begin) / zone.length;
}

__device__ __forceinline__ int split_begin(int split) {
    const split_zone zone =
        split_zone_of_entry(split < 16 ? 0 : split < 40 ? 2048 : split < 88 ? 8192 : split < 184 ? 32768 : 131072);
    return zone.begin + (split - zone.first) * zone.length;
}

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
    int             n_splits, n_tails;  // parts of a row: splits, then tail tiles
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

__device__ __forceinline__ float gated(const attention_operands & o, int node, int head, int at, float value) {
    return o.gate.data == nullptr ? value : value / plus(1.0f, expf(-o.gate.row(head, node)[at]));
}

}  // namespace ggml_spec_cuda
