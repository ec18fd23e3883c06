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
    static constexpr int n_warps      = rows >= 64 ? rows / 8 : 4;
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
        constexpr int pieces = D / 4, n_ahead = 8;
        const bool    is_aligned = b.o.q.is_aligned();
        const int     n_pieces   = b.n_used() * pieces;
        for (int begin = threadIdx.x; begin < n_pieces; begin += n_ahead * n_threads) {
            float4 x[n_ahead];
#pragma unroll
            for (int j = 0; j < n_ahead; j++) {
                const int     i = begin + j * n_threads, at = i % pieces * 4;
                const float * q = i < n_pieces ? b.m.query[i / pieces] : nullptr;
                x[j] = q == nullptr ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) :
                       is_aligned   ? *(const float4 *) (q + at) : make_float4(q[at], q[at + 1], q[at + 2], q[at + 3]);
            }
#pragma unroll
            for (int j = 0; j < n_ahead; j++) {
                const int i = begin + j * n_threads, row = i / pieces, at = i % pieces * 4;
                if (i < n_pieces) {
                    split_four(&m.q[0][row][at], &m.q[1][row][at], x[j].x, x[j].y, x[j].z, x[j].w);
                }
            }
        }
    }

    // n cells of a table; entries beyond n are zero. A thread keeps to one piece of 16 bytes of a row.
    __device__ void load_tile(__half (&tile)[tile_keys][stride], float (&scale)[n_scales][tile_keys], const cells & table,
                              const int * cell, int first, int n) {
        if (n > 0) {
            if constexpr (quantised) {
                load_blocks(tile, scale, table, cell, first, n);
            } else {
                constexpr int pieces = D / 8, keys_at_once = n_threads / pieces;
                const int     at = threadIdx.x % pieces * 8, first_key = threadIdx.x / pieces;
                constexpr int n_copies = (tile_keys + keys_at_once - 1) / keys_at_once;
                const char *  values = table.data + (first + at) * sizeof(__half);
                const int     row_bytes = (int) table.nb1;
                const char *  from[n_copies];
#pragma unroll
                for (int i = 0; i < n_copies; i++) {
                    from[i] = values + (int64_t) cell[min(first_key + i * keys_at_once, tile_keys - 1)] * row_bytes;
                }
#pragma unroll
                for (int i = 0; i < n_copies; i++) {
                    const int key = first_key + i * keys_at_once;
                    if (tile_keys % keys_at_once == 0 || key < tile_keys) {
                        copy_async(&tile[key][at], from[i], key >= n);
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

    // 16 values of queries (and what the halves leave of them) and of this warp's keys, as factors of a product.
    struct score_factors {
        uint32_t q[2][4];
        uint32_t k[score_tiles / 2][4];
    };

    __device__ __forceinline__ void load_factors(score_factors & f, int key0, int step) const {
#pragma unroll
        for (int j = 0; j < score_tiles / 2; j++) {
            load_matrices(f.k[j], &m.k[key0 + j * 16 + lane / 16 * 8 + lane % 8][step * 16 + lane / 8 % 2 * 8]);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            load_matrices(f.q[i], &m.q[i][row0 + lane % 16][step * 16 + lane / 16 * 8]);
        }
    }

    // The sums of both halves are kept apart until the end: more of them are on their way at once.
    using score_sums = float[2][score_tiles][4];

    __device__ __forceinline__ static void score_step(score_sums & sum, const score_factors & f) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int j = 0; j < score_tiles; j++) {
                multiply_add(sum[i][j], f.q[i], f.k[j / 2][j % 2 * 2], f.k[j / 2][j % 2 * 2 + 1]);
            }
        }
    }

    template <typename Block>
    __device__ void make_scores(const Block & b) {
        if (row0 >= b.n_rows) {
            return;
        }
        const int     key0 = column_warp * score_tiles * 8;
        float         score[score_tiles][4] = {};
        score_sums    sum = {};
        score_factors factors[2];
        load_factors(factors[0], key0, 0);
#pragma unroll
        for (int step = 0; step < steps; step++) {
            if (step + 1 < steps) {
                load_factors(factors[(step + 1) % 2], key0, step + 1);
            }
            score_step(sum, factors[step % 2]);
            if (quantised ? step % 2 == 1 : step == steps - 1) {
#pragma unroll
                for (int j = 0; j < score_tiles; j++) {
                    float2 scale = make_float2(1.0f, 1.0f);
                    if constexpr (quantised) {
                        scale = *(const float2 *) &m.k_scale[step / 2][key0 + j * 8 + lane % 4 * 2];
                    }
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        score[j][i]  = madd(i % 2 ? scale.y : scale.x, plus(sum[0][j][i], sum[1][j][i]), score[j][i]);
                        sum[0][j][i] = sum[1][j][i] = 0.0f;
                    }
                }
            }
        }
#pragma unroll
        for (int j = 0; j < score_tiles; j++) {
            const int key = key0 + j * 8 + lane % 4 * 2;
            *(float2 *) &b.m.scores[row0 + lane / 4][key]     = make_float2(times(score[j][0], b.o.scale), times(score[j][1], b.o.scale));
            *(float2 *) &b.m.scores[row0 + lane / 4 + 8][key] = make_float2(times(score[j][2], b.o.scale), times(score[j][3], b.o.scale));
        }
    }

    // As halves and what they leave, where no scale of the values has to be applied first.
    __device__ static void keep_weights(float (&row)[score_stride], int at, const float (&w)[8]) {
        if constexpr (quantised) {
            keep_weights_f32(row, at, w);
        } else {
            __half * high = (__half *) row, * low = high + tile_keys;
            split_four(high + at, low + at, w[0], w[1], w[2], w[3]);
            split_four(high + 32 + at, low + 32 + at, w[4], w[5], w[6], w[7]);
        }
    }

    // Weights of this warp's rows for keys 16 step .., as the left factor of a product.
    template <typename Block>
    __device__ __forceinline__ void load_weights(uint32_t (&high)[4], uint32_t (&low)[4], const Block & b, int step, int scale_block) const {
        if constexpr (quantised) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int    key   = step * 16 + i / 2 * 8 + lane % 4 * 2;
                const float2 w     = *(const float2 *) &b.m.scores[row0 + lane / 4 + i % 2 * 8][key];
                const float2 scale = *(const float2 *) &m.v_scale[scale_block][key];
                split_halves(high[i], low[i], times(w.x, scale.x), times(w.y, scale.y));
            }
        } else {
            const __half * row = (const __half *) b.m.scores[row0 + lane % 16] + step * 16 + lane / 16 * 8;
            load_matrices(high, row);
            load_matrices(low, row + tile_keys);
        }
    }

    static constexpr int key_steps   = tile_keys / 16;
    static constexpr int scale_tiles = quantised && result_tiles > 4 ? 4 : result_tiles;  // that share their values' scale
    static constexpr int n_together  = scale_tiles >= 4 ? 4 : 2;                          // sums that do not wait for each other

    // Values of 16 keys for `n_together` tiles.
    __device__ __forceinline__ void load_values(uint32_t (&v)[n_together / 2][4], int step, int at) const {
#pragma unroll
        for (int i = 0; i < n_together / 2; i++) {
            load_matrices_transposed(v[i], &m.v[step * 16 + lane % 16][at + i * 16 + lane / 16 * 8]);
        }
    }

    template <typename Block>
    __device__ void add_values(const Block & b) {
        if (row0 >= b.n_rows) {
            return;
        }
        const join_factors above = b.m.factors[row0 + lane / 4], below = b.m.factors[row0 + lane / 4 + 8];
        const int          first = column_warp * result_tiles * 8;
        uint32_t high[key_steps][4], low[key_steps][4];
        uint32_t v[2][n_together / 2][4];
        load_values(v[0], 0, first);
#pragma unroll
        for (int j = 0; j < result_tiles; j += n_together) {
            if (j % scale_tiles == 0) {
#pragma unroll
                for (int step = 0; step < key_steps; step++) {
                    load_weights(high[step], low[step], b, step, (first + j * 8) / 32);
                }
            }
            float part[2][n_together][4] = {};
#pragma unroll
            for (int step = 0; step < key_steps; step++) {
                const int next = step + 1 < key_steps ? j : j + n_together;
                if (next < result_tiles) {
                    load_values(v[(step + 1) % 2], (step + 1) % key_steps, first + next * 8);
                }
#pragma unroll
                for (int i = 0; i < n_together; i++) {
                    const uint32_t * factor = &v[step % 2][i / 2][i % 2 * 2];
                    multiply_add(part[0][i], high[step], factor[0], factor[1]);
                    multiply_add(part[1][i], low[step], factor[0], factor[1]);
                }
            }
#pragma unroll
            for (int i = 0; i < n_together; i++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    result[j + i][k] = joined(result[j + i][k], plus(part[0][i][k], part[1][i][k]), k < 2 ? above : below);
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
    if (n_rows > 64 && fits(attention_block_bytes<mma_math<D, 96, quantised>>(o.n_columns))) {
        launch_attention<mma_math<D, 96, quantised>>(o, stream);
    } else if (n_rows > 32 && fits(attention_block_bytes<mma_math<D, 64, quantised>>(o.n_columns))) {
        launch_attention<mma_math<D, 64, quantised>>(o, stream);
    } else if (n_rows > 16 && fits(attention_block_bytes<mma_math<D, 32, quantised>>(o.n_columns))) {
        launch_attention<mma_math<D, 32, quantised>>(o, stream);
    } else {
        launch_attention<mma_math<D, 16, quantised>>(o, stream);
    }
}

}  // namespace
}  // namespace ggml_spec_cuda
