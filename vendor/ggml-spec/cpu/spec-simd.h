#pragma once

// The few float vector operations the kernels need, with one meaning on every ISA: `lanes` floats, a fused (or, without
// FMA, a two-step) multiply-add, and the sums of four vectors at once. Intrinsics rather than plain loops because a
// compiler may fuse the same expression differently in two places, and replay must reproduce the first pass's bits.

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace ggml_spec {

#if defined(__AVX2__) || defined(__SSE2__)
// Lanes of four vectors summed: {sum a, sum b, sum c, sum d}.
static inline __m128 sum_lanes4(__m128 a, __m128 b, __m128 c, __m128 d) {
    const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
    const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
    return _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab));
}
#endif

#if defined(__AVX512F__)

struct vec { __m512 v; };
static constexpr int lanes = 16;
static inline vec  load(const float * p)         { return { _mm512_loadu_ps(p) }; }
static inline void store(float * p, vec a)       { _mm512_storeu_ps(p, a.v); }
static inline vec  splat(float x)                { return { _mm512_set1_ps(x) }; }
static inline vec  mul(vec a, vec b)             { return { _mm512_mul_ps(a.v, b.v) }; }
static inline vec  madd(vec a, vec b, vec c)     { return { _mm512_fmadd_ps(a.v, b.v, c.v) }; }
static inline __m128 fold(vec a) {
    const __m256 half = _mm256_add_ps(__builtin_shufflevector(a.v, a.v, 0, 1, 2, 3, 4, 5, 6, 7),
                                      __builtin_shufflevector(a.v, a.v, 8, 9, 10, 11, 12, 13, 14, 15));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
static inline void sums4(float * out, vec a, vec b, vec c, vec d) {
    _mm_storeu_ps(out, sum_lanes4(fold(a), fold(b), fold(c), fold(d)));
}

#elif defined(__AVX2__) && defined(__FMA__)

struct vec { __m256 v; };
static constexpr int lanes = 8;
static inline vec  load(const float * p)         { return { _mm256_loadu_ps(p) }; }
static inline void store(float * p, vec a)       { _mm256_storeu_ps(p, a.v); }
static inline vec  splat(float x)                { return { _mm256_set1_ps(x) }; }
static inline vec  mul(vec a, vec b)             { return { _mm256_mul_ps(a.v, b.v) }; }
static inline vec  madd(vec a, vec b, vec c)     { return { _mm256_fmadd_ps(a.v, b.v, c.v) }; }
static inline __m128 fold(vec a) {
    return _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
}
static inline void sums4(float * out, vec a, vec b, vec c, vec d) {
    _mm_storeu_ps(out, sum_lanes4(fold(a), fold(b), fold(c), fold(d)));
}

#elif defined(__SSE2__)

struct vec { __m128 v; };
static constexpr int lanes = 4;
static inline vec  load(const float * p)         { return { _mm_loadu_ps(p) }; }
static inline void store(float * p, vec a)       { _mm_storeu_ps(p, a.v); }
static inline vec  splat(float x)                { return { _mm_set1_ps(x) }; }
static inline vec  mul(vec a, vec b)             { return { _mm_mul_ps(a.v, b.v) }; }
static inline vec  madd(vec a, vec b, vec c)     { return { _mm_add_ps(_mm_mul_ps(a.v, b.v), c.v) }; }
static inline void sums4(float * out, vec a, vec b, vec c, vec d) {
    _mm_storeu_ps(out, sum_lanes4(a.v, b.v, c.v, d.v));
}

#elif defined(__ARM_NEON) && defined(__aarch64__)

struct vec { float32x4_t v; };
static constexpr int lanes = 4;
static inline vec  load(const float * p)         { return { vld1q_f32(p) }; }
static inline void store(float * p, vec a)       { vst1q_f32(p, a.v); }
static inline vec  splat(float x)                { return { vdupq_n_f32(x) }; }
static inline vec  mul(vec a, vec b)             { return { vmulq_f32(a.v, b.v) }; }
static inline vec  madd(vec a, vec b, vec c)     { return { vfmaq_f32(c.v, a.v, b.v) }; }
static inline void sums4(float * out, vec a, vec b, vec c, vec d) {
    vst1q_f32(out, vpaddq_f32(vpaddq_f32(a.v, b.v), vpaddq_f32(c.v, d.v)));
}

#else

struct vec { float v[4]; };
static constexpr int lanes = 4;
static inline vec  load(const float * p)         { return { { p[0], p[1], p[2], p[3] } }; }
static inline void store(float * p, vec a)       { for (int i = 0; i < 4; i++) { p[i] = a.v[i]; } }
static inline vec  splat(float x)                { return { { x, x, x, x } }; }
static inline vec  mul(vec a, vec b)             { for (int i = 0; i < 4; i++) { a.v[i] *= b.v[i]; } return a; }
static inline vec  madd(vec a, vec b, vec c)     { for (int i = 0; i < 4; i++) { c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]); } return c; }
static inline float sum(vec a)                   { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
static inline void sums4(float * out, vec a, vec b, vec c, vec d) {
    out[0] = sum(a); out[1] = sum(b); out[2] = sum(c); out[3] = sum(d);
}

#endif

// n is a multiple of 16; the order of additions depends on the ISA alone.
static inline float dot(int64_t n, const float * a, const float * b) {
    vec acc = splat(0.0f);
    for (int64_t i = 0; i < n; i += lanes) {
        acc = madd(load(a + i), load(b + i), acc);
    }
    float out[4];
    sums4(out, acc, acc, acc, acc);
    return out[0];
}

static inline void scaled_copy(int64_t n, float * out, const float * x, float scale) {
    const vec s = splat(scale);
    for (int64_t i = 0; i < n; i += lanes) {
        store(out + i, mul(load(x + i), s));
    }
}

}  // namespace ggml_spec
