// Root-mean-square norms joined with what always stands beside them: the residual sum before, the output gate after.
#pragma once

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

// sum = a + b, normed = sum / sqrt(mean(sum^2) + eps) * weight; both are wanted, the sum is the residual stream.
//
// Shapes (ne, fastest first):
//   a, b    f32 [n, N], any nb1
//   weight  f32 [n]
// Result: f32 [n, N, 2], plane 0 the sum, plane 1 normed: each plane is contiguous, for views. Op NORM.
GGML_API struct ggml_tensor * ggml_spec_add_rms_norm(
        struct ggml_context * ctx,
        struct ggml_tensor  * a,
        struct ggml_tensor  * b,
        struct ggml_tensor  * weight,
        float                 eps);

// y = x / sqrt(mean(x^2) + eps) * weight * gate * sigmoid(gate), the mean over each head.
//
// Shapes:
//   x, gate  f32 [S * H, N], any nb1
//   weight   f32 [S]
// Result: f32 [S * H, N]. Op NORM.
GGML_API struct ggml_tensor * ggml_spec_gated_rms_norm(
        struct ggml_context * ctx,
        struct ggml_tensor  * x,
        struct ggml_tensor  * weight,
        struct ggml_tensor  * gate,
        float                 eps);

// A row's bits depend on that row alone: not on the other rows, not on threads. NULL, or the rule that the operands break.
GGML_API const char * ggml_spec_check_add_rms_norm(
        const struct ggml_tensor * a,
        const struct ggml_tensor * b,
        const struct ggml_tensor * weight,
        float                      eps);
GGML_API const char * ggml_spec_check_gated_rms_norm(
        const struct ggml_tensor * x,
        const struct ggml_tensor * weight,
        const struct ggml_tensor * gate,
        float                      eps);

#ifdef __cplusplus
}
#endif
