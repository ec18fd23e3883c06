// Constructor and operand rules of ggml_spec_attention.
#include "ggml-spec-attention.h"

#include "constructor.h"

static bool is_cell_type(enum ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_Q8_0 || type == GGML_TYPE_Q4_0;
}

static bool is_list(const struct ggml_tensor * t) {
    return t->type == GGML_TYPE_I32 && ggml_is_contiguous(t) && t->ne[2] == 1 && t->ne[3] == 1;
}

static const char * check_gate(const struct ggml_tensor * q, const struct ggml_tensor * gate) {
    if (gate == NULL) {
        return NULL;
    }
    if (gate->type != GGML_TYPE_F32 || gate->nb[0] != sizeof(float)) {
        return "attention: the gate must be f32 with contiguous rows";
    }
    return ggml_are_same_shape(gate, q) ? NULL : "attention: the gate must have the shape of q, [D, H, N]";
}

const char * ggml_spec_check_attention(
        const struct ggml_tensor * q,
        const struct ggml_tensor * k,
        const struct ggml_tensor * v,
        const struct ggml_tensor * nodes,
        const struct ggml_tensor * committed,
        const struct ggml_tensor * gate,
        int                        window,
        int                        visibility) {
    if (q->type != GGML_TYPE_F32 || q->nb[0] != sizeof(float) || q->ne[3] != 1) {
        return "attention: q must be f32 [D, H, N] with contiguous rows";
    }
    if (!is_cell_type(k->type) || !is_cell_type(v->type)) {
        return "attention: k and v must be f32, f16, q8_0 or q4_0";
    }
    if (!ggml_is_contiguous(k) || !ggml_is_contiguous(v) || k->ne[2] != 1 || k->ne[3] != 1) {
        return "attention: k and v must be contiguous matrices [D * H_kv, n_cells]";
    }
    if (!ggml_are_same_shape(k, v)) {
        return "attention: k and v must have the same shape";
    }
    if (q->ne[0] % ggml_blck_size(k->type) != 0 || q->ne[0] % ggml_blck_size(v->type) != 0) {
        return "attention: the head size must be a multiple of the block size of the cells' type";
    }
    if (k->ne[0] % q->ne[0] != 0 || q->ne[1] % (k->ne[0] / q->ne[0]) != 0) {
        return "attention: the width of k must be D * H_kv with H a multiple of H_kv";
    }
    if (!is_list(nodes) || nodes->ne[1] != 1 || nodes->ne[0] < GGML_SPEC_NODES_HEADER + 2 * q->ne[2]) {
        return "attention: nodes must be a contiguous i32 list of 4 + 2 * N words";
    }
    if (!is_list(committed)) {
        return "attention: the committed lists must be contiguous i32 [n_list, n_lists]";
    }
    if (window < 0 || visibility < GGML_SPEC_VISIBLE_ANCESTORS || visibility > GGML_SPEC_VISIBLE_PREFIX) {
        return "attention: the window must be 0 or more and the visibility one of ggml_spec_visibility";
    }
    return check_gate(q, gate);
}

struct ggml_tensor * ggml_spec_attention(
        struct ggml_context * ctx,
        struct ggml_tensor  * q,
        struct ggml_tensor  * k,
        struct ggml_tensor  * v,
        struct ggml_tensor  * nodes,
        struct ggml_tensor  * committed,
        float                 scale,
        int                   window,
        int                   visibility) {
    assert_fits(ggml_spec_check_attention(q, k, v, nodes, committed, NULL, window, visibility));
    struct ggml_tensor * result = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, q->ne[0] * q->ne[1], q->ne[2]);

    set_mode(result, GGML_OP_FLASH_ATTN_EXT, GGML_SPEC_MODE_ATTENTION, 0);
    memcpy(&result->op_params[0], &scale, sizeof(float));
    result->op_params[1] = window;
    result->op_params[2] = visibility;
    result->src[0] = q;
    result->src[1] = k;
    result->src[2] = v;
    result->src[3] = nodes;
    result->src[4] = committed;
    return result;
}

void ggml_spec_attention_set_gate(struct ggml_tensor * attention, struct ggml_tensor * gate) {
    assert_fits(check_gate(attention->src[0], gate));
    attention->src[5] = gate;
}
