// Attention over listed KV cells: the attention operation of draft trees and drafters.
//
// A mask says for every cell whether a row may see it; this operation says in which ORDER a row reads the cells it may
// see: committed cells by position, then the row's ancestors from the root down. A row's result then depends neither on
// where a token's K/V happens to lie nor on the rows computed beside it, so a verified branch and plain decoding agree
// bit for bit, and nothing of the size of (rows x cells) is uploaded per round.
#pragma once

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GGML_SPEC_NODES_HEADER 4   // i32 words: [version = 1, n_nodes, n_committed, list index]
#define GGML_SPEC_NODES_VERSION 1
#define GGML_SPEC_ATTENTION_TILE 64  // cells per softmax step, counted from the first committed cell

enum ggml_spec_visibility {
    GGML_SPEC_VISIBLE_ANCESTORS = 0,  // a node sees its ancestors and itself
    GGML_SPEC_VISIBLE_BLOCK     = 1,  // every node of the call sees every other (block diffusion drafters)
    GGML_SPEC_VISIBLE_PREFIX    = 2,  // prefill: the nodes are a chain whose cells the list already holds; node i sees
                                      // the first n_committed + i + 1 entries
};

// Shapes (ne, fastest first):
//   q          f32 [D, H, N], any nb1, nb2
//   k, v       f32, f16, q8_0 or q4_0 [D * H_kv, n_cells]; query head h reads KV head h / (H / H_kv)
//   nodes      i32 [4 + 2 * N]: header, then (cell, parent) per node; parent of the root is -1; node i's depth in a
//              block is i
//   committed  i32 [n_list, n_lists]: cells of committed tokens in position order, one list per sequence
//   window     0, or the most positions back (itself included) that a row may see
// Result: f32 [D * H, N]; columns beyond n_nodes are zero. Kernels on matrix units round q * scale, weights and dequantised
// cells to f16.
GGML_API struct ggml_tensor * ggml_spec_attention(
        struct ggml_context * ctx,
        struct ggml_tensor  * q,
        struct ggml_tensor  * k,
        struct ggml_tensor  * v,
        struct ggml_tensor  * nodes,
        struct ggml_tensor  * committed,
        float                 scale,
        int                   window,
        int                   visibility);

// The result is multiplied by sigmoid(gate), gate f32 [D, H, N] with any nb1, nb2.
GGML_API void ggml_spec_attention_set_gate(struct ggml_tensor * attention, struct ggml_tensor * gate);

// NULL, or the rule that the operands break.
GGML_API const char * ggml_spec_check_attention(
        const struct ggml_tensor * q,
        const struct ggml_tensor * k,
        const struct ggml_tensor * v,
        const struct ggml_tensor * nodes,
        const struct ggml_tensor * committed,
        const struct ggml_tensor * gate,
        int                        window,
        int                        visibility);

#ifdef __cplusplus
}
#endif
