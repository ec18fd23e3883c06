#pragma once

// Rounding activations to 8-bit numbers, 32 at a time.

#include "mul-mat-lanes.h"

#include <algorithm>
#include <cmath>

namespace ggml_spec {

#if defined(__AVX2__)

static inline float largest_magnitude(const float * x, int n) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 m = _mm256_andnot_ps(sign, _mm256_loadu_ps(x));
    for (int i = 8; i < n; i += 8) {
        m = _mm256_max_ps(m, _mm256_andnot_ps(sign, _mm256_loadu_ps(x + i)));
    }
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
}

static inline int32_t sum_of_lanes(__m256i v) {
    __m128i h = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(h, _mm_shuffle_epi32(h, 0xb1)));
}

// bytes = round(x * inverse), to the nearest even; sums of the two halves.
static inline void round_block(int8_t * bytes, int32_t * sums, const float * x, float inverse) {
    const __m256 scale = _mm256_set1_ps(inverse);
    __m256i pairs[2];
    for (int half = 0; half < 2; half++) {
        const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16 * half), scale));
        const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16 * half + 8), scale));
        sums[half]  = sum_of_lanes(_mm256_add_epi32(a, b));
        pairs[half] = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
    }
    _mm256_storeu_si256((__m256i *) bytes, _mm256_permute4x64_epi64(_mm256_packs_epi16(pairs[0], pairs[1]), 0xd8));
}

#else

static inline float largest_magnitude(const float * x, int n) {
    float largest = 0.0f;
    for (int i = 0; i < n; i++) {
        largest = std::max(largest, fabsf(x[i]));
    }
    return largest;
}

static inline void round_block(int8_t * bytes, int32_t * sums, const float * x, float inverse) {
    sums[0] = sums[1] = 0;
    for (int i = 0; i < block_size; i++) {
        bytes[i] = (int8_t) nearbyintf(x[i] * inverse);
        sums[i / 16] += bytes[i];
    }
}

#endif

static inline void words_of_bytes(int32_t * words, const int8_t * bytes) {
#if GGML_SPEC_WORD_BYTES == 1
    memcpy(words, bytes, block_size);
#else
    int16_t wide[block_size];
    for (int i = 0; i < block_size; i++) {
        wide[i] = bytes[i];
    }
    memcpy(words, wide, sizeof(wide));
#endif
}

}  // namespace ggml_spec
