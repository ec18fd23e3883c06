// DFlash2's convolution on the CPU: groups are shared out, each thread runs its channels through all slots.
#include "spec-cpu.h"

#include <algorithm>

namespace ggml_spec {
namespace {

// One slot's channels of one group: += earlier slot times weight, or = for the slot itself.
template <bool first>
void add_tap(float * y, const float * x, const float * base, float dynamic, int64_t n) {
    for (int64_t c = 0; c < n; c++) {
        const float product = x[c] * (base[c] + dynamic);
        y[c] = first ? product : y[c] + product;
    }
}

}  // namespace

void block_conv_compute(const ggml_compute_params * params, ggml_tensor * op) {
    const ggml_tensor * x       = op->src[0];
    const ggml_tensor * dynamic = op->src[1];
    const ggml_tensor * base    = op->src[2];
    const int64_t       side    = op->op_params[0];
    const int64_t       n_taps  = base->ne[1];
    const int64_t       n_groups   = dynamic->ne[0] / (2 * n_taps);
    const int64_t       group_size = x->ne[0] / n_groups;
    const range         groups     = share(n_groups, 1, params->ith, params->nth);

    for (int64_t slot = 0; slot < x->ne[1]; slot++) {
        const float * weights = column(dynamic, slot) + side * n_taps * n_groups;
        for (int64_t tap = 0; tap < std::min(n_taps, slot + 1); tap++) {
            const float * earlier = column(x, slot - tap);
            const float * learned = column(base, tap, side);
            for (int64_t g = groups.begin; g < groups.end; g++) {
                const int64_t c = g * group_size;
                auto * add = tap == 0 ? add_tap<true> : add_tap<false>;
                add(column(op, slot) + c, earlier + c, learned + c, weights[tap * n_groups + g], group_size);
            }
        }
    }
}

}  // namespace ggml_spec
