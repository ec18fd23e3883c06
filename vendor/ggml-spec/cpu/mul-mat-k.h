#pragma once

// q4_K, q5_K and q6_K weights: blocks of 256 numbers whose groups of 32 (q6_K: 16) have integer scales under one float
// scale; the activations have one float scale per 256 too. A block adds float(sum of scale * dot) * (scale * scale), then
// the same for the minima of q4_K and q5_K. Numbers are unsigned bytes; q6_K's are 32 too large.

#include "mul-mat-acts.h"
#include "mul-mat-driver.h"
#include "mul-mat-k-formats.h"
#include "simd-mappings.h"

namespace ggml_spec {

template <typename Format>
struct k_kernel {
    static constexpr int     groups      = Format::groups;                  // per 32 numbers
    static constexpr int     n_groups    = panel_blocks * groups;
    static constexpr int     n_words     = block_words / groups;            // per group
    static constexpr int     act_numbers = QK_K;
    static constexpr int64_t chunk_bytes = sizeof(typename Format::block);

    struct act {
        int32_t words[panel_blocks][block_words];
#if GGML_SPEC_WORD_BYTES == 2
        int8_t  bytes[QK_K];
        const int8_t * block_bytes(int b) const { return bytes + b * block_size; }
#else
        const int8_t * block_bytes(int b) const { return (const int8_t *) words[b]; }
#endif
        int32_t start[n_groups];          // of a group's dot product
        int16_t group_sums[n_groups];     // of the numbers
        float   scale;
    };

    struct panel {
        alignas(64) int32_t words[panel_blocks][block_words * tile_rows];
        int32_t scales[n_groups][tile_rows];
        int32_t minima[panel_blocks][tile_rows];  // pairs of 16 bits: four are used
        float   scale[tile_rows];
        float   minimum[tile_rows];               // scale of the minima, negative
    };

    static void quantise(act & out, const float * x) {
        const float largest = largest_magnitude(x, QK_K);
        const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
        for (int b = 0; b < panel_blocks; b++) {
            int8_t  bytes[block_size];
            int32_t sums[2];
            round_block(bytes, sums, x + b * block_size, inverse);
            words_of_bytes(out.words[b], bytes);
#if GGML_SPEC_WORD_BYTES == 2
            memcpy(out.bytes + b * block_size, bytes, sizeof(bytes));
#endif
            for (int g = 0; g < groups; g++) {
                const int32_t sum = groups == 2 ? sums[g] : sums[0] + sums[1];
                out.group_sums[b * groups + g] = (int16_t) sum;
                out.start[b * groups + g]      = -Format::offset * sum;
            }
        }
        out.scale = largest / 127.0f;
    }

    static void fill_panel(panel & p, const uint8_t * const * chunks, int) {
        alignas(64) uint8_t numbers[tile_rows][QK_K];
        const uint8_t *     rows[tile_rows];
        for (int row = 0; row < tile_rows; row++) {
            const auto & block = *(const typename Format::block *) chunks[row];
            rows[row] = numbers[row];
#pragma GCC unroll 8
            for (int b = 0; b < panel_blocks; b++) {
                store_bytes(numbers[row] + b * block_size, Format::numbers(block, b));
            }
            p.scale[row]   = GGML_CPU_FP16_TO_FP32(Format::scale(block));
            p.minimum[row] = -GGML_CPU_FP16_TO_FP32(Format::minimum(block));
        }
        for (int b = 0; b < panel_blocks; b++) {
            words_of_block(p.words[b], { rows, b * block_size }, 0);
        }
        fill_scales(p, chunks);
    }

    static void fill_scales(panel & p, const uint8_t * const * chunks) {
        alignas(64) int32_t scales[tile_rows][n_groups];
        alignas(64) int32_t minima[tile_rows][panel_blocks] = {};  // pairs, padded for the transposition
        for (int row = 0; row < tile_rows; row++) {
            const group_scales s = Format::scales(*(const typename Format::block *) chunks[row]);
            for (int g = 0; g < n_groups; g++) {
                scales[row][g] = s.scales[g];
            }
            if (Format::has_minima) {
                memcpy(minima[row], s.minima, sizeof(s.minima));
            }
        }
        transpose_rows<n_groups>(p.scales, scales);
        if (Format::has_minima) {
            transpose_rows<panel_blocks>(p.minima, minima);
        }
    }

    template <int columns>
    static void multiply(float * y, const panel & p, int, const act * acts, int64_t stride, prefetcher & next) {
        ivec sums[columns][tile_vectors];
        for (int i = 0; i < columns * tile_vectors; i++) {
            sums[i / tile_vectors][i % tile_vectors] = isplat(0);
        }
        for (int g = 0; g < n_groups; g++) {
            next.step();
            ivec dots[columns][tile_vectors];
            for (int i = 0; i < columns * tile_vectors; i++) {
                dots[i / tile_vectors][i % tile_vectors] = isplat(Format::offset ? acts[i / tile_vectors * stride].start[g] : 0);
            }
            const int at = g % groups * n_words;
            dot_block<columns, n_words>(dots, p.words[g / groups] + at * tile_rows, acts->words[g / groups] + at,
                                        stride * (sizeof(act) / sizeof(int32_t)));
            for (int v = 0; v < tile_vectors; v++) {
                const ivec scale = iload(p.scales[g] + v * lanes);
                for (int c = 0; c < columns; c++) {
                    sums[c][v] = iadd(sums[c][v], imul(dots[c][v], scale));
                }
            }
        }
        for (int i = 0; i < columns * tile_vectors; i++) {
            const int c = i / tile_vectors, v = i % tile_vectors;
            const vec scale = mul(load(p.scale + v * lanes), splat(acts[c * stride].scale));
            store(y + i * lanes, madd(to_float(sums[c][v]), scale, load(y + i * lanes)));
        }
        if (Format::has_minima) {
            add_minima<columns>(y, p, acts, stride);
        }
    }

    template <int columns>
    static void add_minima(float * y, const panel & p, const act * acts, int64_t stride) {
        for (int i = 0; i < columns * tile_vectors; i++) {
            const act & a   = acts[i / tile_vectors * stride];
            const int   at  = i % tile_vectors * lanes;
            ivec        sum = isplat(0);
            for (int pair = 0; pair < panel_blocks / 2; pair++) {
                int32_t word;
                memcpy(&word, a.group_sums + 2 * pair, sizeof(word));
                sum = dot_pairs(sum, iload(p.minima[pair] + at), word);
            }
            const vec scale = mul(load(p.minimum + at), splat(a.scale));
            store(y + i * lanes, madd(to_float(sum), scale, load(y + i * lanes)));
        }
    }

#if defined(__AVX2__) && defined(__FMA__)
    // Sum of scale * dot of one row, in eight parts.
    static __m256i row_products(const typename Format::block & block, const group_scales & s, const act & a) {
        __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int b = 0; b < panel_blocks; b++) {
            const __m256i bytes = _mm256_loadu_si256((const __m256i *) a.block_bytes(b));
            const __m256i pairs = _mm256_maddubs_epi16(Format::numbers(block, b), bytes);
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, s.of_block(b)));
        }
        if (Format::offset) {
            const __m256i shift = _mm256_madd_epi16(_mm256_loadu_si256((const __m256i *) s.scales),
                                                    _mm256_loadu_si256((const __m256i *) a.group_sums));
            sum = _mm256_sub_epi32(sum, _mm256_mullo_epi32(shift, _mm256_set1_epi32(Format::offset)));
        }
        return sum;
    }

    static void multiply_rows(float * y, const uint8_t * const * chunks, int, const act * acts, prefetcher & next) {
        __m256i  products[row_group], minima[row_group];
        uint16_t scale[tile_rows] = {}, minimum[tile_rows] = {};
        for (int row = 0; row < row_group; row++) {
            next.step();
            const auto &       block = *(const typename Format::block *) chunks[row];
            const group_scales s     = Format::scales(block);
            products[row] = row_products(block, s, *acts);
            if (Format::has_minima) {
                minima[row] = _mm256_zextsi128_si256(_mm_madd_epi16(_mm_loadu_si128((const __m128i *) s.minima),
                                                                    _mm_loadu_si128((const __m128i *) acts->group_sums)));
            }
            scale[row]   = Format::scale(block);
            minimum[row] = Format::minimum(block);
        }
        const __m256 act_scale = _mm256_set1_ps(acts->scale);
        const __m256 d         = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) scale));
        __m256       sum       = _mm256_loadu_ps(y);
        sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums_of_rows(products)), _mm256_mul_ps(d, act_scale), sum);
        if (Format::has_minima) {
            const __m256 least = _mm256_xor_ps(_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) minimum)), _mm256_set1_ps(-0.0f));
            sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums_of_rows(minima)), _mm256_mul_ps(least, act_scale), sum);
        }
        _mm256_storeu_ps(y, sum);
    }
#else
    static void multiply_rows(float *, const uint8_t * const *, int, const act *, prefetcher &) {}
#endif
};

}  // namespace ggml_spec
