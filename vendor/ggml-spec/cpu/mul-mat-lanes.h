#pragma once

// Integer dot products with one weight row per lane.
//
// A word holds the next few weights of one row (or activations of one column): four bytes where the ISA multiplies bytes,
// two 16-bit numbers elsewhere. dot_words() adds, in every lane, the dot product of that lane's weight word and one
// activation word. The sums are exact, so the ISA does not show in them.

#include "spec-simd.h"

#include <cstdint>
#include <cstring>

namespace ggml_spec {

#if (defined(__AVX512VNNI__) && defined(__AVX512BW__)) || (defined(__ARM_FEATURE_DOTPROD) && defined(__aarch64__))
#define GGML_SPEC_WORD_BYTES 1
#else
#define GGML_SPEC_WORD_BYTES 2
#endif

constexpr int block_size   = 32;                                     // numbers per block of weights or activations
constexpr int block_words  = block_size * GGML_SPEC_WORD_BYTES / 4;  // words per block
constexpr int tile_vectors = lanes == 16 ? 2 : 1;                    // row vectors that share the loads of an activation
constexpr int tile_rows    = tile_vectors * lanes;

// Whether the ISA wants weights as unsigned bytes; signed ones are then shifted by 128, and a sum starts at
// -128 * sum(activations).
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
constexpr bool weights_are_unsigned = true;
#else
constexpr bool weights_are_unsigned = false;
#endif

#if defined(__AVX512BW__)

struct ivec { __m512i v; };
static inline ivec iload(const int32_t * p)   { return { _mm512_loadu_si512(p) }; }
static inline ivec isplat(int32_t x)          { return { _mm512_set1_epi32(x) }; }
static inline ivec iadd(ivec a, ivec b)       { return { _mm512_add_epi32(a.v, b.v) }; }
static inline ivec imul(ivec a, ivec b)       { return { _mm512_mullo_epi32(a.v, b.v) }; }
static inline vec  to_float(ivec a)           { return { _mm512_cvtepi32_ps(a.v) }; }
#if defined(__AVX512VNNI__)
static inline ivec dot_words(ivec sum, ivec w, int32_t a) { return { _mm512_dpbusd_epi32(sum.v, w.v, _mm512_set1_epi32(a)) }; }
static inline ivec dot_pairs(ivec sum, ivec w, int32_t a) { return { _mm512_dpwssd_epi32(sum.v, w.v, _mm512_set1_epi32(a)) }; }
#else
static inline ivec dot_pairs(ivec sum, ivec w, int32_t a) { return iadd(sum, { _mm512_madd_epi16(w.v, _mm512_set1_epi32(a)) }); }
#endif

#elif defined(__AVX2__) && defined(__FMA__)

struct ivec { __m256i v; };
static inline ivec iload(const int32_t * p)   { return { _mm256_loadu_si256((const __m256i *) p) }; }
static inline ivec isplat(int32_t x)          { return { _mm256_set1_epi32(x) }; }
static inline ivec iadd(ivec a, ivec b)       { return { _mm256_add_epi32(a.v, b.v) }; }
static inline ivec imul(ivec a, ivec b)       { return { _mm256_mullo_epi32(a.v, b.v) }; }
static inline vec  to_float(ivec a)           { return { _mm256_cvtepi32_ps(a.v) }; }
static inline ivec dot_pairs(ivec sum, ivec w, int32_t a) { return iadd(sum, { _mm256_madd_epi16(w.v, _mm256_set1_epi32(a)) }); }

#elif defined(__SSE4_1__)

struct ivec { __m128i v; };
static inline ivec iload(const int32_t * p)   { return { _mm_loadu_si128((const __m128i *) p) }; }
static inline ivec isplat(int32_t x)          { return { _mm_set1_epi32(x) }; }
static inline ivec iadd(ivec a, ivec b)       { return { _mm_add_epi32(a.v, b.v) }; }
static inline ivec imul(ivec a, ivec b)       { return { _mm_mullo_epi32(a.v, b.v) }; }
static inline vec  to_float(ivec a)           { return { _mm_cvtepi32_ps(a.v) }; }
static inline ivec dot_pairs(ivec sum, ivec w, int32_t a) { return iadd(sum, { _mm_madd_epi16(w.v, _mm_set1_epi32(a)) }); }

#elif defined(__ARM_NEON) && defined(__aarch64__)

struct ivec { int32x4_t v; };
static inline ivec iload(const int32_t * p)   { return { vld1q_s32(p) }; }
static inline ivec isplat(int32_t x)          { return { vdupq_n_s32(x) }; }
static inline ivec iadd(ivec a, ivec b)       { return { vaddq_s32(a.v, b.v) }; }
static inline ivec imul(ivec a, ivec b)       { return { vmulq_s32(a.v, b.v) }; }
static inline vec  to_float(ivec a)           { return { vcvtq_f32_s32(a.v) }; }
static inline ivec dot_pairs(ivec sum, ivec weights, int32_t word) {
    const int16x8_t w = vreinterpretq_s16_s32(weights.v);
    const int16x8_t a = vreinterpretq_s16_s32(vdupq_n_s32(word));
    return { vaddq_s32(sum.v, vpaddq_s32(vmull_s16(vget_low_s16(w), vget_low_s16(a)), vmull_high_s16(w, a))) };
}
#if defined(__ARM_FEATURE_DOTPROD)
static inline ivec dot_words(ivec sum, ivec w, int32_t a) {
    return { vdotq_s32(sum.v, vreinterpretq_s8_s32(w.v), vreinterpretq_s8_s32(vdupq_n_s32(a))) };
}
#endif

#else

struct ivec { int32_t v[lanes]; };
static inline ivec iload(const int32_t * p)   { ivec r; memcpy(r.v, p, sizeof(r.v)); return r; }
static inline ivec isplat(int32_t x)          { ivec r; for (int32_t & v : r.v) { v = x; } return r; }
static inline ivec iadd(ivec a, ivec b)       { for (int i = 0; i < lanes; i++) { a.v[i] += b.v[i]; } return a; }
static inline ivec imul(ivec a, ivec b)       { for (int i = 0; i < lanes; i++) { a.v[i] *= b.v[i]; } return a; }
static inline vec  to_float(ivec a) {
    float f[lanes];
    for (int i = 0; i < lanes; i++) {
        f[i] = (float) a.v[i];
    }
    return load(f);
}
static inline ivec dot_pairs(ivec sum, ivec weights, int32_t word) {
    int16_t a[2], w[2 * lanes];
    memcpy(a, &word, sizeof(a));
    memcpy(w, weights.v, sizeof(w));
    for (int i = 0; i < lanes; i++) {
        sum.v[i] += w[2 * i] * a[0] + w[2 * i + 1] * a[1];
    }
    return sum;
}

#endif

#if GGML_SPEC_WORD_BYTES == 2
static inline ivec dot_words(ivec sum, ivec w, int32_t a) { return dot_pairs(sum, w, a); }
#endif

// Part of a block times `columns` columns: dots[column][vector] += n_words words; acts of a column `stride` words apart.
template <int columns, int n_words>
inline void dot_block(ivec (*dots)[tile_vectors], const int32_t * weights, const int32_t * acts, int64_t stride) {
    for (int w = 0; w < n_words; w++) {
        ivec words[tile_vectors];
        for (int v = 0; v < tile_vectors; v++) {
            words[v] = iload(weights + w * tile_rows + v * lanes);
        }
        for (int c = 0; c < columns; c++) {
            for (int v = 0; v < tile_vectors; v++) {
                dots[c][v] = dot_words(dots[c][v], words[v], acts[c * stride + w]);
            }
        }
    }
}

// --- weights of one block, from 32 bytes per row to words: [block_words][tile_rows] ------------------------------------

// Bytes of the same block in consecutive rows: row i's start at base[i] + at.
struct row_bytes {
    const uint8_t * const * base;
    int64_t                 at;

    const uint8_t * operator[](int row) const { return base[row] + at; }
};

// Fills the words of `lanes` rows. Signed bytes become unsigned ones where flip is 128 (and the ISA wants it), and are
// otherwise extended with their sign.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

static inline __m512i quarter_rows(row_bytes rows, int first, int at) {
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *) (rows[first] + at)));
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *) (rows[first +  4] + at)), 1);
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *) (rows[first +  8] + at)), 2);
    return _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *) (rows[first + 12] + at)), 3);
}

static inline void words_of_lanes(int32_t * words, row_bytes rows, uint8_t flip) {
    const __m512i f = _mm512_set1_epi8((char) flip);
    for (int half = 0; half < 2; half++) {
        const __m512i r0 = quarter_rows(rows, 0, 16 * half);
        const __m512i r1 = quarter_rows(rows, 1, 16 * half);
        const __m512i r2 = quarter_rows(rows, 2, 16 * half);
        const __m512i r3 = quarter_rows(rows, 3, 16 * half);
        const __m512i lo01 = _mm512_unpacklo_epi32(r0, r1), hi01 = _mm512_unpackhi_epi32(r0, r1);
        const __m512i lo23 = _mm512_unpacklo_epi32(r2, r3), hi23 = _mm512_unpackhi_epi32(r2, r3);
        int32_t * out = words + half * 4 * tile_rows;
        _mm512_storeu_si512(out,                 _mm512_xor_si512(f, _mm512_unpacklo_epi64(lo01, lo23)));
        _mm512_storeu_si512(out + tile_rows,     _mm512_xor_si512(f, _mm512_unpackhi_epi64(lo01, lo23)));
        _mm512_storeu_si512(out + 2 * tile_rows, _mm512_xor_si512(f, _mm512_unpacklo_epi64(hi01, hi23)));
        _mm512_storeu_si512(out + 3 * tile_rows, _mm512_xor_si512(f, _mm512_unpackhi_epi64(hi01, hi23)));
    }
}

#elif defined(__SSE4_1__)

// Four rows of eight bytes at a time: widened to 16 bits they are four lanes of four words.
static inline void words_of_lanes(int32_t * words, row_bytes rows, uint8_t) {
    for (int lane = 0; lane < lanes; lane += 4) {
        for (int at = 0; at < block_size; at += 8) {
            __m128i r[4];
            for (int i = 0; i < 4; i++) {
                r[i] = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *) (rows[lane + i] + at)));
            }
            const __m128i lo01 = _mm_unpacklo_epi32(r[0], r[1]), hi01 = _mm_unpackhi_epi32(r[0], r[1]);
            const __m128i lo23 = _mm_unpacklo_epi32(r[2], r[3]), hi23 = _mm_unpackhi_epi32(r[2], r[3]);
            int32_t * out = words + at / 2 * tile_rows + lane;
            _mm_storeu_si128((__m128i *) out,                   _mm_unpacklo_epi64(lo01, lo23));
            _mm_storeu_si128((__m128i *) (out + tile_rows),     _mm_unpackhi_epi64(lo01, lo23));
            _mm_storeu_si128((__m128i *) (out + 2 * tile_rows), _mm_unpacklo_epi64(hi01, hi23));
            _mm_storeu_si128((__m128i *) (out + 3 * tile_rows), _mm_unpackhi_epi64(hi01, hi23));
        }
    }
}

#else

static inline void words_of_lanes(int32_t * words, row_bytes rows, uint8_t) {
    for (int lane = 0; lane < lanes; lane++) {
        const int8_t * row = (const int8_t *) rows[lane];
        for (int word = 0; word < block_words; word++) {
#if GGML_SPEC_WORD_BYTES == 1
            memcpy(words + word * tile_rows + lane, row + 4 * word, 4);
#else
            const int16_t pair[2] = { row[2 * word], row[2 * word + 1] };
            memcpy(words + word * tile_rows + lane, pair, sizeof(pair));
#endif
        }
    }
}

#endif

static inline void words_of_block(int32_t * words, row_bytes rows, uint8_t flip) {
    for (int row = 0; row < tile_rows; row += lanes) {
        words_of_lanes(words + row, { rows.base + row, rows.at }, flip);
    }
}

// --- from one line per row to one line per item -----------------------------------------------------------------------

#if defined(__AVX2__)

// Eight items of eight rows.
static inline void store_transposed(int32_t (*out)[tile_rows], const __m256i * r) {
    __m256i t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i]     = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        u[i]     = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_si256((__m256i *) out[i],     _mm256_permute2x128_si256(u[i], u[i + 4], 0x20));
        _mm256_storeu_si256((__m256i *) out[i + 4], _mm256_permute2x128_si256(u[i], u[i + 4], 0x31));
    }
}

template <int n_items>
void transpose_rows(int32_t (*out)[tile_rows], const int32_t (*in)[n_items]) {
    for (int row = 0; row < tile_rows; row += 8) {
        for (int item = 0; item < n_items; item += 8) {
            __m256i r[8];
            for (int i = 0; i < 8; i++) {
                r[i] = _mm256_loadu_si256((const __m256i *) (in[row + i] + item));
            }
            store_transposed((int32_t (*)[tile_rows]) &out[item][row], r);
        }
    }
}

#else

template <int n_items>
void transpose_rows(int32_t (*out)[tile_rows], const int32_t (*in)[n_items]) {
    for (int row = 0; row < tile_rows; row++) {
        for (int item = 0; item < n_items; item++) {
            out[item][row] = in[row][item];
        }
    }
}

#endif

}  // namespace ggml_spec
