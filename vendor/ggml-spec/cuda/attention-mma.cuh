// Tiles multiplied by matrix units: f16 cells, and cells quantised in blocks.
//
// Queries and weights are split into two halves each, so that a product is as exact as in f32; cells are exact as halves
// (of blocks the integers; scales are applied to sums of one block of 32). Every element of a product is a sum in one
// order, whatever the number of rows.
#pragma once

#include "attention-kernel.cuh"
#include "spec-mma.cuh"

namespace ggml_spec_cuda {
namespace {

template <int D, int rows, bool quantised>
struct mma_math {
    static constexpr int head_dim     = D;
    static constexpr int n_rows       = rows;
    static constexpr int n_warps      = rows == 64 ? 8 : 4;
    static constexpr int n_threads    = n_warps * warp_lanes;
    static constexpr int column_warps = n_warps * 16 / rows;             // warps that share 16 rows
    static constexpr int score_tiles  = tile_keys / 8 / column_warps;   // of 8 keys, of a warp
    static constexpr int result_tiles = D / 8 / column_warps;           // of 8 values, of a warp
    static constexpr int steps        = D / 16;
    static constexpr int stride       = D + 8;                           // keeps rows apart in the banks
    static constexpr int n_scales     = quantised ? D / 32 : 1;

    struct memory {
        __half q[2][rows][stride];  // values, and what the halves leave
        __half k[tile_keys][stride];
        __half v[tile_keys][stride];
        float  k_scale[n_scales][tile_keys];
        float  v_scale[n_scales][tile_keys];
    };

    memory & m;
    int      lane, row0, column_warp;  // first of this warp's 16 rows, its part of keys and values
    float    result[result_tiles][4] = {};

    __device__ explicit mma_math(memory & m) : m(m) {
        lane        = threadIdx.x % warp_lanes;
        row0        = threadIdx.x / warp_lanes / column_warps * 16;
        column_warp = threadIdx.x / warp_lanes % column_warps;
    }

    template <typename Block>
    __device__ void start_queries(const Block & b) {
        const int n_used = (b.n_rows + 15) / 16 * 16;  // rows that a warp looks at
#pragma unroll 4
        for (int i = threadIdx.x; i < n_used * D / 2; i += n_threads) {
            const int     row = i / (D / 2), at = i % (D / 2) * 2;
            const float * q   = b.m.query[row];
            uint32_t high, low;
            split_halves(high, low, q ? q[at] : 0.0f, q ? q[at + 1] : 0.0f);
            *(uint32_t *) &m.q[0][row][at] = high;
            *(uint32_t *) &m.q[1][row][at] = low;
        }
    }

    // n cells of a table; entries beyond n are zero.
    __device__ void load_tile(__half (&tile)[tile_keys][stride], float (&scale)[n_scales][tile_keys], const cells & table,
                              const int * cell, int first, int n) {
        if (n > 0) {
            if constexpr (quantised) {
                load_blocks(tile, scale, table, cell, first, n);
            } else {
                for (int i = threadIdx.x; i < tile_keys * (D / 8); i += n_threads) {
                    const int key = i / (D / 8), at = i % (D / 8) * 8;
                    if (key < n) {
                        copy_async(&tile[key][at], table.data + cell[key] * table.nb1 + (first + at) * sizeof(__half));
                    } else {
                        *(float4 *) &tile[key][at] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    }
                }
            }
        }
        commit_copies();
    }

    // A thread takes half a block: 16 values of q8_0, or the low or the high nibbles of q4_0.
    __device__ void load_blocks(__half (&tile)[tile_keys][stride], float (&scale)[n_scales][tile_keys], const cells & table,
                                const int * cell, int first, int n) {
        for (int i = threadIdx.x; i < tile_keys * (D / 16); i += n_threads) {
            const int key = i / (D / 16), at = i % (D / 16);
            uint32_t  out[8] = {};
            float     block_scale = 0.0f;
            if (key < n) {
                const cell_block block(table, table.data + cell[key] * table.nb1, first / 32 + at / 2);
                block_scale = block.scale();
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const unsigned pair = block.pair(block.is_q8_0 ? at % 2 * 8 + j : j);
                    const int      low  = block.is_q8_0 ? (int8_t) (pair & 0xff) : (int) (pair >> at % 2 * 4 & 15) - 8;
                    const int      high = block.is_q8_0 ? (int8_t) (pair >> 8) : (int) (pair >> (8 + at % 2 * 4) & 15) - 8;
                    out[j] = pack(__float2half_rn((float) low), __float2half_rn((float) high));
                }
            }
            uint4 * to = (uint4 *) &tile[key][at * 16];
            to[0] = { out[0], out[1], out[2], out[3] };
            to[1] = { out[4], out[5], out[6], out[7] };
            if (at % 2 == 0) {
                scale[at / 2][key] = block_scale;
            }
        }
    }

    template <typename Block>
    __device__ void start_keys(const Block & b, int slot, int n) {
        load_tile(m.k, m.k_scale, b.o.k, b.m.cell[slot], b.kv_head * D, n);
    }

    template <typename Block>
    __device__ void start_values(const Block & b, int slot, int n) {
        load_tile(m.v, m.v_scale, b.o.v, b.m.cell[slot], b.kv_head * D, n);
    }

    template <typename Block> __device__ void wait_keys(const Block &, int, int)   { wait_copies_but_one(); }
    template <typename Block> __device__ void wait_values(const Block &, int, int) { wait_copies_but_one(); }

    // One step of 16 values into the scores of this warp's keys.
    __device__ __forceinline__ void score_step(float (&sum)[score_tiles][4], int key0, int step) {
        uint32_t q[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            load_matrices(q[i], &m.q[i][row0 + lane % 16][step * 16 + lane / 16 * 8]);
        }
        uint32_t k[score_tiles / 2][4];
#pragma unroll
        for (int j = 0; j < score_tiles / 2; j++) {
            load_matrices(k[j], &m.k[key0 + j * 16 + lane / 16 * 8 + lane % 8][step * 16 + lane / 8 % 2 * 8]);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int j = 0; j < score_tiles; j++) {
                multiply_add(sum[j], q[i], k[j / 2][j % 2 * 2], k[j / 2][j % 2 * 2 + 1]);
            }
        }
    }

    template <typename Block>
    __device__ void make_scores(const Block & b) {
        if (row0 >= b.n_rows) {
            return;
        }
        const int key0 = column_warp * score_tiles * 8;
        float     sum[score_tiles][4] = {};
        if constexpr (quantised) {
#pragma unroll 2
            for (int block = 0; block < D / 32; block++) {
                float part[score_tiles][4] = {};
                score_step(part, key0, 2 * block);
                score_step(part, key0, 2 * block + 1);
#pragma unroll
                for (int j = 0; j < score_tiles; j++) {
                    const float2 scale = *(const float2 *) &m.k_scale[block][key0 + j * 8 + lane % 4 * 2];
                    sum[j][0] = madd(scale.x, part[j][0], sum[j][0]);
                    sum[j][1] = madd(scale.y, part[j][1], sum[j][1]);
                    sum[j][2] = madd(scale.x, part[j][2], sum[j][2]);
                    sum[j][3] = madd(scale.y, part[j][3], sum[j][3]);
                }
            }
        } else {
#pragma unroll 4
            for (int step = 0; step < steps; step++) {
                score_step(sum, key0, step);
            }
        }
#pragma unroll
        for (int j = 0; j < score_tiles; j++) {
            const int key = key0 + j * 8 + lane % 4 * 2;
            *(float2 *) &b.m.scores[row0 + lane / 4][key]     = make_float2(times(sum[j][0], b.o.scale), times(sum[j][1], b.o.scale));
            *(float2 *) &b.m.scores[row0 + lane / 4 + 8][key] = make_float2(times(sum[j][2], b.o.scale), times(sum[j][3], b.o.scale));
        }
    }

    // Weights of this warp's rows for keys 16 step .., as the left factor of a product; scaled by the keys' scales.
    template <typename Block>
    __device__ __forceinline__ void load_weights(uint32_t (&high)[4], uint32_t (&low)[4], const Block & b, int step, int scale_block) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int key = step * 16 + i / 2 * 8 + lane % 4 * 2;
            float2    w   = *(const float2 *) &b.m.scores[row0 + lane / 4 + i % 2 * 8][key];
            if constexpr (quantised) {
                const float2 scale = *(const float2 *) &m.v_scale[scale_block][key];
                w = make_float2(times(w.x, scale.x), times(w.y, scale.y));
            }
            split_halves(high[i], low[i], w.x, w.y);
        }
    }

    template <typename Block>
    __device__ void add_values(const Block & b) {
        if (row0 >= b.n_rows) {
            return;
        }
        constexpr int key_steps  = tile_keys / 16;
        constexpr int block_tiles = quantised && result_tiles > 4 ? 4 : result_tiles;  // tiles that share a scale
        constexpr int n_together  = block_tiles >= 4 ? 4 : 2;                          // sums that do not wait for each other
        const join_factors above = b.m.factors[row0 + lane / 4], below = b.m.factors[row0 + lane / 4 + 8];
        const int          first = column_warp * result_tiles * 8;
#pragma unroll
        for (int block = 0; block < result_tiles; block += block_tiles) {
            uint32_t high[key_steps][4], low[key_steps][4];
#pragma unroll
            for (int step = 0; step < key_steps; step++) {
                load_weights(high[step], low[step], b, step, (first + block * 8) / 32);
            }
#pragma unroll
            for (int j = block; j < block + block_tiles; j += n_together) {
                float part[n_together][4] = {};
#pragma unroll
                for (int step = 0; step < key_steps; step++) {
                    uint32_t v[n_together / 2][4];
#pragma unroll
                    for (int i = 0; i < n_together / 2; i++) {
                        load_matrices_transposed(v[i], &m.v[step * 16 + lane % 16][first + (j + 2 * i) * 8 + lane / 16 * 8]);
                    }
#pragma unroll
                    for (int i = 0; i < n_together; i++) {
                        multiply_add(part[i], high[step], v[i / 2][i % 2 * 2], v[i / 2][i % 2 * 2 + 1]);
                    }
#pragma unroll
                    for (int i = 0; i < n_together; i++) {
                        multiply_add(part[i], low[step], v[i / 2][i % 2 * 2], v[i / 2][i % 2 * 2 + 1]);
                    }
                }
#pragma unroll
                for (int i = 0; i < n_together; i++) {
                    result[j + i][0] = joined(result[j + i][0], part[i][0], above);
                    result[j + i][1] = joined(result[j + i][1], part[i][1], above);
                    result[j + i][2] = joined(result[j + i][2], part[i][2], below);
                    result[j + i][3] = joined(result[j + i][3], part[i][3], below);
                }
            }
        }
    }

    template <typename Write>
    __device__ void each_result(Write write) const {
#pragma unroll
        for (int j = 0; j < result_tiles; j++) {
            const int at = column_warp * result_tiles * 8 + j * 8 + lane % 4 * 2;
            write(row0 + lane / 4, at, make_float2(result[j][0], result[j][1]));
            write(row0 + lane / 4 + 8, at, make_float2(result[j][2], result[j][3]));
        }
    }
};

// As few rows a block as hold all rows, or as many as shared memory allows: more rows share a tile, fewer leave room for
// more blocks. A row's bits do not depend on it.
template <int D, bool quantised>
void launch_attention_mma(const attention_operands & o, size_t shared_bytes, cudaStream_t stream) {
    const int  n_rows = o.n_columns * (o.n_heads / o.n_heads_kv);
    const auto fits   = [&](size_t n_bytes) { return n_bytes <= shared_bytes; };
    if (n_rows > 32 && fits(attention_block_bytes<mma_math<D, 64, quantised>>(o.n_columns))) {
        launch_attention<mma_math<D, 64, quantised>>(o, stream);
    } else if (n_rows > 16 && fits(attention_block_bytes<mma_math<D, 32, quantised>>(o.n_columns))) {
        launch_attention<mma_math<D, 32, quantised>>(o, stream);
    } else {
        launch_attention<mma_math<D, 16, quantised>>(o, stream);
    }
}

}  // namespace
}  // namespace ggml_spec_cuda
