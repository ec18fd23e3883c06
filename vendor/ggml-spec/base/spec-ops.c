#include "constructor.h"

struct ggml_tensor * ggml_spec_conv_tree(
        struct ggml_context * ctx,
        struct ggml_tensor  * x,
        struct ggml_tensor  * w,
        struct ggml_tensor  * window,
        struct ggml_tensor  * bank_x,
        struct ggml_tensor  * sched) {
    assert_fits(ggml_spec_check_conv_tree(x, w, window, bank_x, sched));

    struct ggml_tensor * result = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, x->ne[0], x->ne[1]);
    set_mode(result, GGML_OP_SSM_CONV, GGML_SPEC_MODE_CONV_TREE, 0);
    result->src[GGML_SPEC_CONV_SRC_X]      = x;
    result->src[GGML_SPEC_CONV_SRC_W]      = w;
    result->src[GGML_SPEC_CONV_SRC_WINDOW] = window;
    result->src[GGML_SPEC_CONV_SRC_BANK_X] = bank_x;
    result->src[GGML_SPEC_CONV_SRC_SCHED]  = sched;
    return result;
}

struct ggml_tensor * ggml_spec_delta_net_tree(
        struct ggml_context * ctx,
        struct ggml_tensor  * q,
        struct ggml_tensor  * k,
        struct ggml_tensor  * v,
        struct ggml_tensor  * g,
        struct ggml_tensor  * beta,
        struct ggml_tensor  * state,
        struct ggml_tensor  * bank_k,
        struct ggml_tensor  * bank_u,
        struct ggml_tensor  * sched) {
    assert_fits(ggml_spec_check_delta_net_tree(q, k, v, g, beta, state, bank_k, bank_u, sched));

    struct ggml_tensor * result = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, v->ne[0] * v->ne[1], v->ne[2]);
    set_mode(result, GGML_OP_GATED_DELTA_NET, GGML_SPEC_MODE_DELTA_NET_TREE, 0);
    result->src[GGML_SPEC_DELTA_SRC_Q]      = q;
    result->src[GGML_SPEC_DELTA_SRC_K]      = k;
    result->src[GGML_SPEC_DELTA_SRC_V]      = v;
    result->src[GGML_SPEC_DELTA_SRC_G]      = g;
    result->src[GGML_SPEC_DELTA_SRC_BETA]   = beta;
    result->src[GGML_SPEC_DELTA_SRC_STATE]  = state;
    result->src[GGML_SPEC_DELTA_SRC_BANK_K] = bank_k;
    result->src[GGML_SPEC_DELTA_SRC_BANK_U] = bank_u;
    result->src[GGML_SPEC_DELTA_SRC_SCHED]  = sched;
    return result;
}

void ggml_spec_set_raw_gates(struct ggml_tensor * t, struct ggml_tensor * gates) {
    assert_fits(ggml_spec_check_raw_gates(t, gates));
    t->src[GGML_SPEC_DELTA_SRC_GATES] = gates;
    t->op_params[GGML_SPEC_PARAM_FLAGS] |= GGML_SPEC_FLAG_RAW_GATES;
}

void ggml_spec_set_qk_l2norm(struct ggml_tensor * t, float eps) {
    if (ggml_spec_mode_of(t) != GGML_SPEC_MODE_DELTA_NET_TREE || !(eps >= 0.0f)) {
        GGML_ABORT("set_qk_l2norm (GATED_DELTA_NET, mode TREE): needs a result of delta_net_tree and eps >= 0, found %s and %g",
                   ggml_spec_mode_name(t), (double) eps);
    }
    memcpy(&t->op_params[GGML_SPEC_PARAM_EPS], &eps, sizeof(eps));
    t->op_params[GGML_SPEC_PARAM_FLAGS] |= GGML_SPEC_FLAG_QK_L2NORM;
}

struct ggml_tensor * ggml_spec_top_k(struct ggml_context * ctx, struct ggml_tensor * logits, int k, bool logprobs) {
    assert_fits(ggml_spec_check_top_k(logits, k));

    struct ggml_tensor * result = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 2 * k, logits->ne[1]);
    set_mode(result, GGML_OP_TOP_K, GGML_SPEC_MODE_TOP_K, (k << 8) | (logprobs ? GGML_SPEC_FLAG_LOGPROBS : 0));
    result->src[0] = logits;
    return result;
}
