// Constructor and operand rules of ggml_spec_block_conv.
#include "ggml-spec-block-conv.h"

#include "constructor.h"

const char * ggml_spec_check_block_conv(
        const struct ggml_tensor * x,
        const struct ggml_tensor * dynamic,
        const struct ggml_tensor * base,
        int                        side) {
    if (!is_f32_matrix(x)) {
        return "block_conv: x must be f32 [C, N] with contiguous rows";
    }
    if (base->type != GGML_TYPE_F32 || !ggml_is_contiguous(base) || base->ne[0] != x->ne[0] || base->ne[2] != 2 || base->ne[3] != 1) {
        return "block_conv: base must be contiguous f32 [C, taps, 2]";
    }
    if (!is_f32_matrix(dynamic) || dynamic->ne[1] != x->ne[1]) {
        return "block_conv: dynamic must be f32 [2 * taps * groups, N] with contiguous rows";
    }
    if (dynamic->ne[0] % (2 * base->ne[1]) != 0 || x->ne[0] % (dynamic->ne[0] / (2 * base->ne[1])) != 0) {
        return "block_conv: dynamic must have a row per side, tap and group, with groups of equal size";
    }
    return side == 0 || side == 1 ? NULL : "block_conv: the side must be 0 (before) or 1 (after)";
}

struct ggml_tensor * ggml_spec_block_conv(
        struct ggml_context * ctx,
        struct ggml_tensor  * x,
        struct ggml_tensor  * dynamic,
        struct ggml_tensor  * base,
        int                   side) {
    assert_fits(ggml_spec_check_block_conv(x, dynamic, base, side));
    struct ggml_tensor * result = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, x->ne[0], x->ne[1]);

    set_mode(result, GGML_OP_SSM_CONV, GGML_SPEC_MODE_BLOCK_CONV, 0);
    result->op_params[0] = side;
    result->src[0] = x;
    result->src[1] = dynamic;
    result->src[2] = base;
    return result;
}
