#pragma once

// How the k-quants pack 256 numbers, their groups' scales and minima.

#include "mul-mat-lanes.h"

#define GGML_COMMON_DECL_C
#include "ggml-common.h"

namespace ggml_spec {

#if defined(__AVX2__)

using bytes32 = __m256i;
static inline bytes32 load_bytes(const void * p)          { return _mm256_loadu_si256((const __m256i *) p); }
static inline void    store_bytes(uint8_t * p, bytes32 b) { _mm256_storeu_si256((__m256i *) p, b); }
static inline bytes32 low_bits(bytes32 a, int mask)       { return _mm256_and_si256(a, _mm256_set1_epi8((char) mask)); }
static inline bytes32 join_bits(bytes32 a, bytes32 b)     { return _mm256_or_si256(a, b); }
// The bits of each byte shifted; what comes from a neighbour must be masked.
static inline bytes32 shift_right(bytes32 a, int n)       { return _mm256_srli_epi16(a, n); }
static inline bytes32 shift_left(bytes32 a, int n)        { return _mm256_slli_epi16(a, n); }

#else

struct bytes32 { uint8_t v[32]; };
template <typename Fn> static inline bytes32 each_byte(bytes32 a, Fn fn) {
    for (uint8_t & x : a.v) {
        x = (uint8_t) fn(x);
    }
    return a;
}
static inline bytes32 load_bytes(const void * p)          { bytes32 b; memcpy(b.v, p, sizeof(b.v)); return b; }
static inline void    store_bytes(uint8_t * p, bytes32 b) { memcpy(p, b.v, sizeof(b.v)); }
static inline bytes32 low_bits(bytes32 a, int mask)       { return each_byte(a, [=](uint8_t x) { return x & mask; }); }
static inline bytes32 shift_right(bytes32 a, int n)       { return each_byte(a, [=](uint8_t x) { return x >> n; }); }
static inline bytes32 shift_left(bytes32 a, int n)        { return each_byte(a, [=](uint8_t x) { return x << n; }); }
static inline bytes32 join_bits(bytes32 a, bytes32 b) {
    for (int i = 0; i < 32; i++) {
        a.v[i] |= b.v[i];
    }
    return a;
}

#endif

// Integer scales of the groups of 256 numbers, in order: 8 with minima, or 16.
struct group_scales {
    alignas(32) int16_t scales[16];
    alignas(16) int16_t minima[8];
#if defined(__AVX2__)
    __m256i halves;  // low half: the scales of each block's first (or only) group; high half: of its last

    // A block's scales in every lane of its groups.
    __m256i of_block(int b) const {
        return _mm256_shuffle_epi8(halves, _mm256_set1_epi16((int16_t) (2 * b | (2 * b + 1) << 8)));
    }
#endif
};

// q4_K and q5_K: scales and minima of 6 bits in 12 bytes. The first four of each have their own bytes, whose top bits
// continue the last four, of which the third word holds the low bits.
static inline group_scales scales_of_12_bytes(const uint8_t * packed) {
    uint32_t low, high, rest;
    memcpy(&low, packed, sizeof(low));
    memcpy(&high, packed + 4, sizeof(high));
    memcpy(&rest, packed + 8, sizeof(rest));
    const uint32_t bytes[4] = {
        low & 0x3f3f3f3f, (rest & 0x0f0f0f0f) | (low >> 2 & 0x30303030),
        high & 0x3f3f3f3f, (rest >> 4 & 0x0f0f0f0f) | (high >> 2 & 0x30303030),
    };
    group_scales s;
#if defined(__AVX2__)
    const __m256i all = _mm256_cvtepu8_epi16(_mm_set_epi32((int) bytes[3], (int) bytes[2], (int) bytes[1], (int) bytes[0]));
    _mm_store_si128((__m128i *) s.scales, _mm256_castsi256_si128(all));
    _mm_store_si128((__m128i *) s.minima, _mm256_extracti128_si256(all, 1));
    s.halves = _mm256_permute4x64_epi64(all, 0x44);
#else
    for (int i = 0; i < 8; i++) {
        s.scales[i] = bytes[i / 4] >> i % 4 * 8 & 63;
        s.minima[i] = bytes[2 + i / 4] >> i % 4 * 8 & 63;
    }
#endif
    return s;
}

struct q4_k_format {
    using block = block_q4_K;
    static constexpr int  groups     = 1;
    static constexpr bool has_minima = true;
    static constexpr int  offset     = 0;

    static uint16_t     scale(const block & b)   { return b.d; }
    static uint16_t     minimum(const block & b) { return b.dmin; }
    static group_scales scales(const block & b)  { return scales_of_12_bytes(b.scales); }

    static bytes32 numbers(const block & b, int at) {
        return low_bits(shift_right(load_bytes(b.qs + at / 2 * 32), at % 2 * 4), 15);
    }
};

struct q5_k_format {
    using block = block_q5_K;
    static constexpr int  groups     = 1;
    static constexpr bool has_minima = true;
    static constexpr int  offset     = 0;

    static uint16_t     scale(const block & b)   { return b.d; }
    static uint16_t     minimum(const block & b) { return b.dmin; }
    static group_scales scales(const block & b)  { return scales_of_12_bytes(b.scales); }

    static bytes32 numbers(const block & b, int at) {
        const bytes32 low  = low_bits(shift_right(load_bytes(b.qs + at / 2 * 32), at % 2 * 4), 15);
        const bytes32 high = load_bytes(b.qh);  // one bit per block, to become bit 4
        return join_bits(low, low_bits(at < 4 ? shift_left(high, 4 - at) : shift_right(high, at - 4), 16));
    }
};

struct q6_k_format {
    using block = block_q6_K;
    static constexpr int  groups     = 2;
    static constexpr bool has_minima = false;
    static constexpr int  offset     = 32;

    static uint16_t scale(const block & b)   { return b.d; }
    static uint16_t minimum(const block &)   { return 0; }

    static group_scales scales(const block & b) {
        group_scales s;
#if defined(__AVX2__)
        const __m128i all   = _mm_loadu_si128((const __m128i *) b.scales);
        const __m128i split = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
        _mm256_store_si256((__m256i *) s.scales, _mm256_cvtepi8_epi16(all));
        s.halves = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(all, split));
#else
        for (int i = 0; i < 16; i++) {
            s.scales[i] = b.scales[i];
        }
#endif
        return s;
    }

    static bytes32 numbers(const block & b, int at) {
        const int     half = at / 4, part = at % 4;
        const bytes32 low  = low_bits(shift_right(load_bytes(b.ql + 64 * half + 32 * (part % 2)), part / 2 * 4), 15);
        const bytes32 high = load_bytes(b.qh + 32 * half);  // two bits per part, to become bits 4 and 5
        return join_bits(low, low_bits(part < 3 ? shift_left(high, 4 - 2 * part) : shift_right(high, 2), 0x30));
    }
};

}  // namespace ggml_spec
