// Constructors and operand rules of ggml_spec_add_rms_norm and ggml_spec_gated_rms_norm.
#include "ggml-spec-norms.h"

#include "constructor.h"

static bool is_f32_vector(const struct ggml_tensor * t) {
    return is_f32_matrix(t) && t->ne[1] == 1;
}

static bool is_eps(float eps) {
    return eps >= 0.0f && isfinite(eps);
}

const char * ggml_spec_check_add_rms_norm(
        const struct ggml_tensor * a,
        const struct ggml_tensor * b,
        const struct ggml_tensor * weight,
        float                      eps) {
    if (!is_f32_matrix(a) || !is_f32_matrix(b)) {
        return "add_rms_norm: a and b must be f32 [n, N] with contiguous rows";
    }
    if (!ggml_are_same_shape(a, b)) {
        return "add_rms_norm: a and b must have the same shape, nothing is repeated";
    }
    if (!is_f32_vector(weight) || weight->ne[0] != a->ne[0]) {
        return "add_rms_norm: the weight must be f32 [n], as long as a row";
    }
    return is_eps(eps) ? NULL : "add_rms_norm: eps must be finite and not negative";
}

const char * ggml_spec_check_gated_rms_norm(
        const struct ggml_tensor * x,
        const struct ggml_tensor * weight,
        const struct ggml_tensor * gate,
        float                      eps) {
    if (!is_f32_matrix(x) || !is_f32_matrix(gate)) {
        return "gated_rms_norm: x and the gate must be f32 [S * H, N] with contiguous rows";
    }
    if (!ggml_are_same_shape(x, gate)) {
        return "gated_rms_norm: x and the gate must have the same shape";
    }
    if (!is_f32_vector(weight) || x->ne[0] % weight->ne[0] != 0) {
        return "gated_rms_norm: the weight must be f32 [S], and a row a whole number of such heads";
    }
    return is_eps(eps) ? NULL : "gated_rms_norm: eps must be finite and not negative";
}

// NORM and not RMS_NORM: a fusion matcher that goes by the operation's number would take that one for the plain norm.
static void set_norm(struct ggml_tensor * t, enum ggml_spec_mode mode, float eps) {
    set_mode(t, GGML_OP_NORM, mode, 0);
    memcpy(&t->op_params[GGML_SPEC_PARAM_EPS], &eps, sizeof(eps));
}

struct ggml_tensor * ggml_spec_add_rms_norm(
        struct ggml_context * ctx,
        struct ggml_tensor  * a,
        struct ggml_tensor  * b,
        struct ggml_tensor  * weight,
        float                 eps) {
    assert_fits(ggml_spec_check_add_rms_norm(a, b, weight, eps));
    struct ggml_tensor * result = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, a->ne[0], a->ne[1], 2);

    set_norm(result, GGML_SPEC_MODE_ADD_RMS_NORM, eps);
    result->src[0] = a;
    result->src[1] = b;
    result->src[2] = weight;
    return result;
}

struct ggml_tensor * ggml_spec_gated_rms_norm(
        struct ggml_context * ctx,
        struct ggml_tensor  * x,
        struct ggml_tensor  * weight,
        struct ggml_tensor  * gate,
        float                 eps) {
    assert_fits(ggml_spec_check_gated_rms_norm(x, weight, gate, eps));
    struct ggml_tensor * result = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, x->ne[0], x->ne[1]);

    set_norm(result, GGML_SPEC_MODE_GATED_RMS_NORM, eps);
    result->src[0] = x;
    result->src[1] = weight;
    result->src[2] = gate;
    return result;
}
