// Fused norms on the CPU: a row (or head) is one thread's, and its bits are those of ggml's add, rms_norm, mul and swiglu.
#include "spec-cpu.h"
#include "vec.h"

#include <cmath>

namespace ggml_spec {
namespace {

constexpr int64_t sum_lanes = 16;

// Squares are rounded to f32 before they are added up in double precision, as in ggml's norm.
double square_sum_in_lanes(const float * x, int64_t n) {
    double lanes[sum_lanes] = {};
    int64_t i = 0;
    for (; i + sum_lanes <= n; i += sum_lanes) {
        for (int64_t j = 0; j < sum_lanes; j++) {
            lanes[j] += x[i + j] * x[i + j];
        }
    }
    double sum = 0.0;
    for (int64_t j = 0; j < sum_lanes; j++) {
        sum += lanes[j];
    }
    for (; i < n; i++) {
        sum += x[i] * x[i];
    }
    return sum;
}

double square_sum_in_order(const float * x, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) {
        sum += x[i] * x[i];
    }
    return sum;
}

// The f32 mean of the squares added one after the other, which is what ggml computes, at the price of adding in lanes:
// two orders of n additions differ by less than n * 2^-52 of the sum, and only a sum that close to the middle of two f32
// means needs the slow order.
float mean_square(const float * x, int64_t n) {
    const double sum  = square_sum_in_lanes(x, n);
    const double slip = sum * (double) n * 0x1p-51;
    const float  low  = (float) ((sum - slip) / (double) n);
    const float  high = (float) ((sum + slip) / (double) n);
    return low == high ? low : (float) (square_sum_in_order(x, n) / (double) n);
}

void rms_norm(float * y, const float * x, const float * weight, int64_t n, float eps) {
    const float scale = 1.0f / sqrtf(mean_square(x, n) + eps);
    for (int64_t i = 0; i < n; i++) {
        y[i] = x[i] * scale * weight[i];
    }
}

}  // namespace

void add_rms_norm_compute(const ggml_compute_params * params, ggml_tensor * op) {
    const ggml_tensor * a      = op->src[0];
    const ggml_tensor * b      = op->src[1];
    const float *       weight = (const float *) op->src[2]->data;
    const int64_t       n      = op->ne[0];
    const range         rows   = share(op->ne[1], 1, params->ith, params->nth);

    for (int64_t row = rows.begin; row < rows.end; row++) {
        float * sum = column(op, row, 0);
        ggml_vec_add_f32((int) n, sum, column(a, row), column(b, row));
        rms_norm(column(op, row, 1), sum, weight, n, ggml_spec_eps(op));
    }
}

void gated_rms_norm_compute(const ggml_compute_params * params, ggml_tensor * op) {
    const ggml_tensor * x       = op->src[0];
    const ggml_tensor * gate    = op->src[2];
    const float *       weight  = (const float *) op->src[1]->data;
    const int64_t       n       = op->src[1]->ne[0];
    const int64_t       n_heads = op->ne[0] / n;
    const range         heads   = share(n_heads * op->ne[1], 1, params->ith, params->nth);

    for (int64_t i = heads.begin; i < heads.end; i++) {
        const int64_t row   = i / n_heads;
        const int64_t first = i % n_heads * n;
        float *       y     = column(op, row) + first;
        rms_norm(y, column(x, row) + first, weight, n, ggml_spec_eps(op));
        ggml_vec_swiglu_f32((int) n, y, column(gate, row) + first, y);
    }
}

}  // namespace ggml_spec
