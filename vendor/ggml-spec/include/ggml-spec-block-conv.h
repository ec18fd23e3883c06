// The dynamic convolution of DFlash2 drafters: causal inside one block, weights learned per channel plus computed per
// channel group from the sub-layer's input.
#pragma once

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

// y[c, n] = sum over taps t <= n of x[c, n - t] * (base[c, t, side] + dynamic[(side * T + t) * G + c / (C / G), n])
//
// Shapes (ne, fastest first):
//   x        f32 [C, N], any nb1; column n is slot n of the block
//   dynamic  f32 [2 * T * G, N], any nb1: of T taps and G groups, groups fastest, sides slowest
//   base     f32 [C, T, 2], contiguous
//   side     0 before the sub-layer, 1 after it
// Result: f32 [C, N]. A column's result does not depend on the columns after it. Op SSM_CONV.
GGML_API struct ggml_tensor * ggml_spec_block_conv(
        struct ggml_context * ctx,
        struct ggml_tensor  * x,
        struct ggml_tensor  * dynamic,
        struct ggml_tensor  * base,
        int                   side);

// NULL, or the rule that the operands break.
GGML_API const char * ggml_spec_check_block_conv(
        const struct ggml_tensor * x,
        const struct ggml_tensor * dynamic,
        const struct ggml_tensor * base,
        int                        side);

#ifdef __cplusplus
}
#endif
