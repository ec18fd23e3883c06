#pragma once

// f16 weights with activations as they are. A result is the sum of one vector of partial sums over the row, then of its
// lanes: the same for every tile shape.

#include "mul-mat-driver.h"
#include "simd-mappings.h"

namespace ggml_spec {

constexpr int half_rows    = 8;                    // weight rows per unit of work
constexpr int half_columns = lanes == 16 ? 4 : 2;  // columns whose sums stay in registers with those of four rows

static inline vec load_halves(const ggml_fp16_t * p) {
#if defined(__AVX512F__)
    return { _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p)) };
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
    return { _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p)) };
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return { vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *) p))) };
#else
    float wide[lanes];
    for (int i = 0; i < lanes; i++) {
        wide[i] = GGML_CPU_FP16_TO_FP32(p[i]);
    }
    return load(wide);
#endif
}

// The rows times `columns` columns, `x_stride` and `out_stride` floats apart; n is a multiple of 16.
template <int rows, int columns>
void multiply_halves(float * out, int64_t out_stride, const ggml_fp16_t * const * w, const float * x, int64_t x_stride, int64_t n) {
    static_assert(rows % 4 == 0, "lanes are summed for four rows at a time");
    vec sums[rows][columns];
    for (int i = 0; i < rows * columns; i++) {
        sums[i / columns][i % columns] = splat(0.0f);
    }
    for (int64_t k = 0; k < n; k += lanes) {
        vec weights[rows];
        for (int r = 0; r < rows; r++) {
            weights[r] = load_halves(w[r] + k);
        }
        for (int c = 0; c < columns; c++) {
            const vec v = load(x + c * x_stride + k);
            for (int r = 0; r < rows; r++) {
                sums[r][c] = madd(weights[r], v, sums[r][c]);
            }
        }
    }
    for (int c = 0; c < columns; c++) {
        for (int r = 0; r < rows; r += 4) {
            sums4(out + c * out_stride + r, sums[r][c], sums[r + 1][c], sums[r + 2][c], sums[r + 3][c]);
        }
    }
}

// Four rows times the columns from `first` on, at most half_columns of them: how many were done.
static inline int64_t multiply_half_group(float * y, const ggml_fp16_t * const * w, const product & m, int64_t first) {
    const float * x        = column(m.x, first);
    const int64_t x_stride = m.x->nb[1] / sizeof(float);
    const int64_t n        = m.weights->ne[0];
    if (m.n_columns - first >= half_columns) {
        multiply_halves<4, half_columns>(y, half_rows, w, x, x_stride, n);
        return half_columns;
    }
    multiply_halves<4, 1>(y, half_rows, w, x, x_stride, n);
    return 1;
}

static inline void run_half_rows(const product & m, int64_t unit) {
    const int64_t       first_row = unit * half_rows;
    const int64_t       n_rows    = std::min<int64_t>(half_rows, m.n_rows - first_row);
    const ggml_fp16_t * w[half_rows];
    for (int64_t row = 0; row < half_rows; row++) {
        w[row] = (const ggml_fp16_t *) ((const char *) m.weights->data + (first_row + std::min(row, n_rows - 1)) * m.weights->nb[1]);
    }
    for (int64_t first = 0, done = 1; first < m.n_columns; first += done) {
        float y[half_columns * half_rows];
        if (m.n_columns == 1) {
            multiply_halves<half_rows, 1>(y, half_rows, w, column(m.x, 0), 0, m.weights->ne[0]);
        } else {
            multiply_half_group(y, w, m, first);
            done = multiply_half_group(y + 4, w + 4, m, first);
        }
        for (int64_t c = 0; c < done; c++) {
            memcpy(column(m.out, first + c) + first_row, y + c * half_rows, n_rows * sizeof(float));
        }
    }
}

static inline void run_half_kernel(const ggml_compute_params * params, const product & m) {
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    for_each_share(params, (m.n_rows + half_rows - 1) / half_rows, [&](int64_t unit) { run_half_rows(m, unit); });
}

}  // namespace ggml_spec
