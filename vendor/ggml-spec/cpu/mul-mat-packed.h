#pragma once

// q8_0 weights in the order the kernel multiplies them, made once when they are loaded.
//
// A tile of tile_rows rows takes the same bytes as before: block by block, the scales of its rows and then their words.
// Rows that do not fill a tile stay as they are, behind the tiles. Results have the same bits as those of plain weights.

#include "mul-mat-q8.h"

#include <vector>

namespace ggml_spec {

#if GGML_SPEC_WORD_BYTES == 1

constexpr bool can_pack = true;

struct packed_block {
    uint16_t scales[tile_rows];
    int32_t  words[block_words * tile_rows];
};

using pack_scratch = std::vector<packed_block>;

static_assert(sizeof(packed_block) == tile_rows * sizeof(block_q8_0), "a packed tile takes the bytes of its rows");

static inline void pack_tile(uint8_t * tile, int64_t n_blocks, size_t row_bytes, pack_scratch & scratch) {
    const uint8_t * rows[tile_rows];
    scratch.resize(n_blocks);
    for (int row = 0; row < tile_rows; row++) {
        rows[row] = tile + row * row_bytes;
    }
    for (int64_t b = 0; b < n_blocks; b++) {
        for (int row = 0; row < tile_rows; row++) {
            scratch[b].scales[row] = ((const block_q8_0 *) rows[row])[b].d;
        }
        const int64_t at = b * sizeof(block_q8_0) + offsetof(block_q8_0, qs);
        words_of_block(scratch[b].words, { rows, at }, q8_0_kernel::flip);
    }
    memcpy(tile, scratch.data(), n_blocks * sizeof(packed_block));
}

// y[column][row] += n blocks of a tile times `columns` columns, whose activations lie `stride` apart.
template <int columns>
void multiply_packed(float * y, const packed_block * blocks, int n, const q8_0_kernel::act * acts, int64_t stride) {
    using act = q8_0_kernel::act;
    vec sums[columns][tile_vectors];
    for (int i = 0; i < columns * tile_vectors; i++) {
        sums[i / tile_vectors][i % tile_vectors] = load(y + i * lanes);
    }
    for (int b = 0; b < n; b++) {
        ivec dots[columns][tile_vectors];
        for (int i = 0; i < columns * tile_vectors; i++) {
            dots[i / tile_vectors][i % tile_vectors] = isplat(acts[i / tile_vectors * stride + b].start);
        }
        dot_block<columns, block_words>(dots, blocks[b].words, acts[b].words, stride * (sizeof(act) / sizeof(int32_t)));
        float scales[tile_rows];
        widen_halves(scales, blocks[b].scales, tile_rows);
        for (int v = 0; v < tile_vectors; v++) {
            const vec scale = load(scales + v * lanes);
            for (int c = 0; c < columns; c++) {
                sums[c][v] = madd(to_float(dots[c][v]), mul(scale, splat(acts[c * stride + b].scale)), sums[c][v]);
            }
        }
    }
    for (int i = 0; i < columns * tile_vectors; i++) {
        store(y + i * lanes, sums[i / tile_vectors][i % tile_vectors]);
    }
}

static inline void run_packed_tile(const product & m, int64_t tile) {
    static constexpr decltype(&multiply_packed<1>) multiply[group_columns] = {
        multiply_packed<1>, multiply_packed<2>, multiply_packed<3>, multiply_packed<4>,
    };
    const int64_t first_row = tile * tile_rows;
    const auto *  blocks    = (const packed_block *) ((const uint8_t *) m.weights->data + first_row * m.weights->nb[1]);
    float         y[pass_columns * tile_rows];
    for (int64_t first = 0; first < m.n_columns; first += pass_columns) {
        const int64_t n    = std::min(pass_columns, m.n_columns - first);
        const auto *  acts = (const q8_0_kernel::act *) m.acts + first * m.n_blocks;
        std::fill(y, y + n * tile_rows, 0.0f);
        // A run of blocks stays in the first cache while all columns pass over it.
        for (int64_t block = 0; block < m.n_blocks; block += panel_blocks) {
            const int n_blocks = (int) std::min<int64_t>(panel_blocks, m.n_blocks - block);
            for (int64_t c = 0; c < n; c += group_columns) {
                const int64_t n_group = std::min<int64_t>(group_columns, n - c);
                multiply[n_group - 1](y + c * tile_rows, blocks + block, n_blocks, acts + c * m.n_blocks + block, m.n_blocks);
            }
        }
        for (int64_t c = 0; c < n; c++) {
            memcpy(column(m.out, first + c) + first_row, y + c * tile_rows, tile_rows * sizeof(float));
        }
    }
}

// One row, which lies in a full tile, as floats.
static inline void unpack_row(float * out, const uint8_t * weights, size_t row_bytes, int64_t row, int64_t n_blocks) {
    const auto * blocks = (const packed_block *) (weights + row / tile_rows * tile_rows * row_bytes);
    const int    lane   = (int) (row % tile_rows);
    for (int64_t b = 0; b < n_blocks; b++) {
        const float scale = GGML_CPU_FP16_TO_FP32(blocks[b].scales[lane]);
        for (int i = 0; i < block_size; i++) {
            const uint8_t * word = (const uint8_t *) &blocks[b].words[i / 4 * tile_rows + lane];
            out[b * block_size + i] = scale * (int8_t) (word[i % 4] ^ q8_0_kernel::flip);
        }
    }
}

static inline void run_packed(const ggml_compute_params * params, const product & m) {
    quantise_columns<q8_0_kernel>(m, params->ith, params->nth);
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    for_each_share(params, (m.n_rows + tile_rows - 1) / tile_rows, [&](int64_t tile) {
        if ((tile + 1) * tile_rows <= m.n_rows) {
            run_packed_tile(m, tile);
        } else {
            run_tile<q8_0_kernel>(m, tile);
        }
    });
}

#else

// Elsewhere a word holds two weights, so packed ones would take twice the bytes.
constexpr bool can_pack = false;

struct pack_scratch {};

static inline void pack_tile(uint8_t *, int64_t, size_t, pack_scratch &) {}
static inline void unpack_row(float *, const uint8_t *, size_t, int64_t, int64_t) {}
static inline void run_packed(const ggml_compute_params *, const product &) {}

#endif

}  // namespace ggml_spec
