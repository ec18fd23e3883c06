#pragma once

// q8_0 weights: every block of 32 has a scale, and so have the activations. A block adds float(dot) * (scale * scale).

#include "mul-mat-acts.h"
#include "mul-mat-driver.h"

#define GGML_COMMON_DECL_C
#include "ggml-common.h"
#include "simd-mappings.h"

namespace ggml_spec {

// Half-precision numbers to floats, a multiple of `lanes`.
static inline void widen_halves(float * out, const uint16_t * halves, int n) {
    for (int i = 0; i < n; i += lanes) {
#if defined(__AVX512F__)
        store(out + i, { _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) (halves + i))) });
#elif defined(__AVX2__) && defined(__F16C__)
        store(out + i, { _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) (halves + i))) });
#else
        for (int lane = 0; lane < lanes; lane++) {
            out[i + lane] = GGML_CPU_FP16_TO_FP32(halves[i + lane]);
        }
#endif
    }
}

struct q8_0_kernel {
    struct act {
        int32_t words[block_words];
        int32_t start;  // of a dot product
        float   scale;
    };

    struct panel {
        alignas(64) int32_t words[panel_blocks][block_words * tile_rows];
        float scales[panel_blocks][tile_rows];
    };

    static constexpr int     act_numbers = QK8_0;
    static constexpr int64_t chunk_bytes = panel_blocks * sizeof(block_q8_0);
    static constexpr int     flip        = weights_are_unsigned ? 128 : 0;

    static void quantise(act & out, const float * x) {
        const float largest = largest_magnitude(x, block_size);
        int8_t      bytes[block_size];
        int32_t     sums[2];
        round_block(bytes, sums, x, largest > 0.0f ? 127.0f / largest : 0.0f);
        words_of_bytes(out.words, bytes);
        out.scale = largest / 127.0f;
        out.start = -flip * (sums[0] + sums[1]);
    }

    static void read_scales(float (*scales)[tile_rows], const uint8_t * const * chunks, int n_rows, int n) {
        uint16_t halves[panel_blocks][tile_rows];
        for (int row = 0; row < n_rows; row++) {
            for (int i = 0; i < n; i++) {
                halves[i][row] = ((const block_q8_0 *) chunks[row])[i].d;
            }
        }
        for (int i = 0; i < n; i++) {
            widen_halves(scales[i], halves[i], n_rows);
        }
    }

    static void fill_panel(panel & p, const uint8_t * const * chunks, int n) {
        read_scales(p.scales, chunks, tile_rows, n);
        for (int b = 0; b < n; b++) {
            words_of_block(p.words[b], { chunks, (int64_t) (b * sizeof(block_q8_0) + offsetof(block_q8_0, qs)) }, flip);
        }
    }

    template <int columns>
    static void multiply(float * y, const panel & p, int n, const act * acts, int64_t stride, prefetcher & next) {
        vec sums[columns][tile_vectors];
        for (int i = 0; i < columns * tile_vectors; i++) {
            sums[i / tile_vectors][i % tile_vectors] = load(y + i * lanes);
        }
        for (int b = 0; b < n; b++) {
            next.step();
            ivec dots[columns][tile_vectors];
            for (int i = 0; i < columns * tile_vectors; i++) {
                dots[i / tile_vectors][i % tile_vectors] = isplat(acts[i / tile_vectors * stride + b].start);
            }
            dot_block<columns, block_words>(dots, p.words[b], acts[b].words, stride * (sizeof(act) / sizeof(int32_t)));
            for (int v = 0; v < tile_vectors; v++) {
                const vec scale = load(p.scales[b] + v * lanes);
                for (int c = 0; c < columns; c++) {
                    sums[c][v] = madd(to_float(dots[c][v]), mul(scale, splat(acts[c * stride + b].scale)), sums[c][v]);
                }
            }
        }
        for (int i = 0; i < columns * tile_vectors; i++) {
            store(y + i * lanes, sums[i / tile_vectors][i % tile_vectors]);
        }
    }

#if defined(__AVX2__) && defined(__FMA__)
    static __m256i row_products(const int8_t * bytes, const int32_t * words) {
#if GGML_SPEC_WORD_BYTES == 1
        const __m256i w = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *) bytes), _mm256_set1_epi8((char) flip));
        return _mm256_dpbusd_epi32(_mm256_setzero_si256(), w, _mm256_loadu_si256((const __m256i *) words));
#else
        const __m256i w0 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *) bytes));
        const __m256i w1 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *) (bytes + 16)));
        return _mm256_add_epi32(_mm256_madd_epi16(w0, _mm256_loadu_si256((const __m256i *) words)),
                                _mm256_madd_epi16(w1, _mm256_loadu_si256((const __m256i *) (words + 8))));
#endif
    }

    static void multiply_rows(float * y, const uint8_t * const * chunks, int n, const act * acts, prefetcher &) {
        float scales[panel_blocks][tile_rows];
        read_scales(scales, chunks, row_group, n);
        __m256 sum = _mm256_loadu_ps(y);
        for (int b = 0; b < n; b++) {
            __m256i products[row_group];
            for (int row = 0; row < row_group; row++) {
                products[row] = row_products(((const block_q8_0 *) chunks[row])[b].qs, acts[b].words);
            }
            const __m256i dot   = _mm256_add_epi32(sums_of_rows(products), _mm256_set1_epi32(acts[b].start));
            const __m256  scale = _mm256_mul_ps(_mm256_loadu_ps(scales[b]), _mm256_set1_ps(acts[b].scale));
            sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, sum);
        }
        _mm256_storeu_ps(y, sum);
    }
#else
    static void multiply_rows(float *, const uint8_t * const *, int, const act *, prefetcher &) {}
#endif
};

}  // namespace ggml_spec
