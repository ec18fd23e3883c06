#pragma once

// One column: rows are multiplied where they lie, eight at a time, without ordering them into words first. The integers
// are the same and are added in the same order, so the result has the same bits.

#include "mul-mat-lanes.h"

namespace ggml_spec {

#if defined(__AVX2__) && defined(__FMA__)

constexpr bool has_row_kernels = true;
constexpr int  row_group       = 8;

static inline __m256i pair_sums(__m256i a, __m256i b) {
    return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
}

static inline __m256i quad_sums(__m256i ab, __m256i cd) {
    return _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
}

// The sum of each of eight vectors, in order.
static inline __m256i sums_of_rows(const __m256i * r) {
    const __m256i low  = quad_sums(pair_sums(r[0], r[1]), pair_sums(r[2], r[3]));
    const __m256i high = quad_sums(pair_sums(r[4], r[5]), pair_sums(r[6], r[7]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31));
}

#else

constexpr bool has_row_kernels = false;
constexpr int  row_group       = tile_rows;

#endif

}  // namespace ggml_spec
