#pragma once

// Tree-shaped recurrent operations for speculative decoding: modes of SSM_CONV, GATED_DELTA_NET and TOP_K.
//
// A call verifies a draft tree of up to N nodes against one sequence's recurrent state. What changes from call to
// call (nodes, order, pending rows, slot and bank numbers) is data in one I32 tensor, the schedule:
//
//   header   [version, n_nodes, n_pending, pending_bank, write_bank, state_slot, n_levels, fold]
//   nodes    N x (node, parent, restore_level | -1, save_level | -1) in visiting order; the first n_nodes are used
//   pending  n_pending row numbers of pending_bank, in path order
//
//   fold = 0: the pending rows are folded into the durable state (and window), which is stored; then the tree is
//             walked from it and every node's factors go to its row of write_bank. n_nodes = 0 is a flush.
//   fold = 1: the nodes are a chain 0..n_nodes-1 that is already committed: the durable state and window end up after
//             them and no bank is written. The node words are not read.
//
// Columns that no visited node names are zero in the result. All shapes below are ne = [fastest, ...].

#include "ggml.h"

#ifdef  __cplusplus
extern "C" {
#endif

#define GGML_SPEC_SCHED_VERSION    1
#define GGML_SPEC_SCHED_HEADER     8   // words before the nodes
#define GGML_SPEC_SCHED_NODE_WORDS 4   // words per node
#define GGML_SPEC_BANK_U_EXTRA     4   // floats after the S_v deltas of a bank_u row: log_g, then zeros
#define GGML_SPEC_TOP_K_MAX        16

enum ggml_spec_sched_word {
    GGML_SPEC_SCHED_WORD_VERSION      = 0,
    GGML_SPEC_SCHED_WORD_N_NODES      = 1,
    GGML_SPEC_SCHED_WORD_N_PENDING    = 2,
    GGML_SPEC_SCHED_WORD_PENDING_BANK = 3,
    GGML_SPEC_SCHED_WORD_WRITE_BANK   = 4,
    GGML_SPEC_SCHED_WORD_STATE_SLOT   = 5,
    GGML_SPEC_SCHED_WORD_N_LEVELS     = 6,
    GGML_SPEC_SCHED_WORD_FOLD         = 7,
};

enum ggml_spec_mode {
    GGML_SPEC_MODE_NONE           = 0,
    GGML_SPEC_MODE_CONV_TREE      = 1,
    GGML_SPEC_MODE_DELTA_NET_TREE = 2,
    GGML_SPEC_MODE_TOP_K          = 3,
    GGML_SPEC_MODE_ATTENTION      = 4,  // ggml-spec-attention.h
    GGML_SPEC_MODE_PACKED         = 5,  // a weight matrix, see ggml_spec_pack
    GGML_SPEC_MODE_BLOCK_CONV     = 6,  // ggml-spec-block-conv.h
    GGML_SPEC_MODE_ADD_RMS_NORM   = 7,  // ggml-spec-norms.h
    GGML_SPEC_MODE_GATED_RMS_NORM = 8,  // ggml-spec-norms.h
};

// Registers the CPU kernels. Idempotent; call it before the first graph is planned.
GGML_API void ggml_spec_init(void);

// Which of the modes below a node is.
GGML_API bool                ggml_spec_is_mode  (const struct ggml_tensor * t);
GGML_API enum ggml_spec_mode ggml_spec_mode_of  (const struct ggml_tensor * t);
GGML_API const char *        ggml_spec_mode_name(const struct ggml_tensor * t);

// Reorders a q8_0 weight matrix in host memory, in place and for good, for the CPU product; its size stays the same. Only
// MUL_MAT and GET_ROWS may read it afterwards, whole or through views that begin and end at multiples of ggml_spec_pack_rows() rows (or
// at its end). False, and nothing changed, where the type, the layout or this flavour has no such order.
GGML_API bool ggml_spec_pack     (struct ggml_tensor * weights);
GGML_API int  ggml_spec_pack_rows(void);  // 0 where nothing can be packed
GGML_API bool ggml_spec_is_packed(const struct ggml_tensor * weights);

// The same rules that the constructors assert. NULL when the operands fit, else one sentence naming operation, value
// and rule; the text stays valid until the calling thread's next check.
GGML_API const char * ggml_spec_check_conv_tree(
        const struct ggml_tensor * x,
        const struct ggml_tensor * w,
        const struct ggml_tensor * window,
        const struct ggml_tensor * bank_x,
        const struct ggml_tensor * sched);
GGML_API const char * ggml_spec_check_delta_net_tree(
        const struct ggml_tensor * q,
        const struct ggml_tensor * k,
        const struct ggml_tensor * v,
        const struct ggml_tensor * g,
        const struct ggml_tensor * beta,
        const struct ggml_tensor * state,
        const struct ggml_tensor * bank_k,
        const struct ggml_tensor * bank_u,
        const struct ggml_tensor * sched);
GGML_API const char * ggml_spec_check_raw_gates(const struct ggml_tensor * t, const struct ggml_tensor * gates);
GGML_API const char * ggml_spec_check_top_k(const struct ggml_tensor * logits, int k);

// Causal depthwise convolution along each node's own path, SiLU applied (op SSM_CONV).
//
//   x       f32 [C, N]            columns may be strided (any nb1)
//   w       f32 [K, C]            tap K-1 is the node itself
//   window  f32 [K-1, C, n_slots] the K-1 committed inputs before the root, oldest first; updated in place
//   bank_x  f32 [C, n_rows, n_banks]  raw inputs of the nodes; updated in place
//   sched   i32 [>= 8 + 4*N + n_rows]
//   result  f32 [C, N]
//
// C is a multiple of 16, 2 <= K <= 8.
GGML_API struct ggml_tensor * ggml_spec_conv_tree(
        struct ggml_context * ctx,
        struct ggml_tensor  * x,
        struct ggml_tensor  * w,
        struct ggml_tensor  * window,
        struct ggml_tensor  * bank_x,
        struct ggml_tensor  * sched);

// Gated delta rule with a scalar gate along each node's own path (op GATED_DELTA_NET).
//
//   q, k    f32 [S_k, H_k, N]     rows contiguous, any nb1, nb2; l2-normalised by the caller unless set_qk_l2norm
//   v       f32 [S_v, H_v, N]
//   g       f32 [H_v, N]          log of the decay (any nb1), or raw alpha with set_raw_gates
//   beta    f32 [H_v, N]          write strength in (0, 1), or its raw logit with set_raw_gates
//   state   f32 [S_k, S_v, H_v, n_slots]     row j is column j of S; updated in place
//   bank_k  f32 [S_k, H_k, n_rows, n_banks]  updated in place
//   bank_u  f32 [S_v + 4, H_v, n_rows, n_banks]  deltas, then log decay; updated in place
//   sched   i32 [>= 8 + 4*N + n_rows]
//   result  f32 [S_v*H_v, N]      S^T q / sqrt(S_k)
//
// Value head h reads key head h % H_k. S_k and S_v are multiples of 16.
GGML_API struct ggml_tensor * ggml_spec_delta_net_tree(
        struct ggml_context * ctx,
        struct ggml_tensor  * q,
        struct ggml_tensor  * k,
        struct ggml_tensor  * v,
        struct ggml_tensor  * g,
        struct ggml_tensor  * beta,
        struct ggml_tensor  * state,
        struct ggml_tensor  * bank_k,
        struct ggml_tensor  * bank_u,
        struct ggml_tensor  * sched);

// The kernel computes log_g = softplus(g + dt_bias) * A and beta = sigmoid(beta) itself.
//   gates  f32 [2*H_v] = [dt_bias | A], A negative
GGML_API void ggml_spec_set_raw_gates(struct ggml_tensor * t, struct ggml_tensor * gates);

// The kernel divides q and k of each head by sqrt(sum of squares + eps) itself; bank_k receives the normalised key.
GGML_API void ggml_spec_set_qk_l2norm(struct ggml_tensor * t, float eps);

// The k largest values of each row (op TOP_K).
//
//   logits  f32 [V, N]  rows contiguous
//   result  i32 [2*k, N]: k ids by value descending (equal values: lower id first; NaN after everything else), then
//           the bits of k floats: log-softmax over V at these ids (logprobs), or the values themselves
GGML_API struct ggml_tensor * ggml_spec_top_k(
        struct ggml_context * ctx,
        struct ggml_tensor  * logits,
        int                   k,
        bool                  logprobs);

#ifdef  __cplusplus
}
#endif
