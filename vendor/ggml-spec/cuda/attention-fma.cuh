// Tiles multiplied in f32, value by value: cells of any type, any card.
#pragma once

#include "attention-kernel.cuh"

namespace ggml_spec_cuda {
namespace {

// Eight neighbouring values of a cell, as f32.
__device__ __forceinline__ void load_values(float (&out)[8], const cells & table, int64_t cell, int at) {
    const char * row = table.data + cell * table.nb1;
    if (table.type == cell_f32) {
        const float4 a = *(const float4 *) (row + at * sizeof(float));
        const float4 b = *(const float4 *) (row + at * sizeof(float) + sizeof(float4));
        out[0] = a.x; out[1] = a.y; out[2] = a.z; out[3] = a.w;
        out[4] = b.x; out[5] = b.y; out[6] = b.z; out[7] = b.w;
    } else if (table.type == cell_f16) {
        union { uint4 words; __half values[8]; } packed;
        packed.words = *(const uint4 *) (row + at * sizeof(__half));
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = __half2float(packed.values[i]);
        }
    } else {
        const cell_block block(table, row, at / 32);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[i] = times(block.scale(), (float) block.value(at % 32 + i));
        }
    }
}

// A tile is held whole or half by half (held_keys), where a block may not have more; a row's bits do not depend on it.
template <int D, int held_keys>
struct fma_math {
    static constexpr int head_dim     = D;
    static constexpr int n_rows       = 16;
    static constexpr int n_threads    = 128;
    static constexpr int score_rows   = 2;  // of a thread
    static constexpr int n_held       = tile_keys / held_keys;  // parts of a tile
    static constexpr int key_groups   = 16;
    static constexpr int score_keys   = held_keys / key_groups;
    static constexpr int value_groups = D / 4;
    static constexpr int result_rows  = n_rows * value_groups / n_threads;

    static constexpr int score_stride = tile_keys + 12;  // keeps rows apart in the banks of shared memory
    static constexpr int soften_lanes = 8;               // threads a row of scores

    struct memory {
        float        tile[held_keys][D + 4];  // keys, then values
        float        q[n_rows][D + 4];
        float        scores[n_rows][score_stride];  // then weights
        join_factors factors[n_rows];               // of the newest tile
    };

    memory & m;
    float4   result[result_rows] = {};

    __device__ explicit fma_math(memory & m) : m(m) {}

    template <typename Block>
    __device__ void load_queries(const Block & b) {
        for (int i = threadIdx.x; i < n_rows * D; i += n_threads) {
            const int row = i / D, at = i % D;
            m.q[row][at] = b.m.query[row] ? b.m.query[row][at] : 0.0f;
        }
    }

    // n cells of a table into the tile; entries beyond n are zero. Several loads are on their way before the first is used.
    __device__ void load_tile(const cells & table, const int * cell, int first, int n) {
        constexpr int n_ahead = 4;
        for (int begin = threadIdx.x; begin < held_keys * (D / 8); begin += n_ahead * n_threads) {
            float values[n_ahead][8] = {};
#pragma unroll
            for (int j = 0; j < n_ahead; j++) {
                const int i = begin + j * n_threads;
                if (i / (D / 8) < n) {
                    load_values(values[j], table, cell[i / (D / 8)], first + i % (D / 8) * 8);
                }
            }
#pragma unroll
            for (int j = 0; j < n_ahead; j++) {
                const int i  = begin + j * n_threads;
                float *   to = &m.tile[i / (D / 8)][i % (D / 8) * 8];
                *(float4 *) to       = make_float4(values[j][0], values[j][1], values[j][2], values[j][3]);
                *(float4 *) (to + 4) = make_float4(values[j][4], values[j][5], values[j][6], values[j][7]);
            }
        }
    }

    // A part of a tile in the place of the one before, when all threads have used that.
    template <typename Block>
    __device__ void load_part(const Block & b, const cells & table, int tile, int part) {
        if (part > 0) {
            __syncthreads();
        }
        load_tile(table, b.cells_of_tile(tile) + part * held_keys, b.kv_head * D, b.tile_size(tile) - part * held_keys);
        __syncthreads();
    }

    template <typename Block>
    __device__ __forceinline__ void make_part_scores(const Block & b, int part) {
        const int row0 = threadIdx.x / key_groups * score_rows;
        const int key0 = threadIdx.x % key_groups;
        if (row0 >= b.n_rows) {
            return;
        }
        float sum[score_rows][score_keys] = {};
#pragma unroll 4
        for (int d = 0; d < D; d += 4) {
            float4 q[score_rows], k[score_keys];
#pragma unroll
            for (int i = 0; i < score_rows; i++) {
                q[i] = *(const float4 *) &m.q[row0 + i][d];
            }
#pragma unroll
            for (int j = 0; j < score_keys; j++) {
                k[j] = *(const float4 *) &m.tile[key0 + j * key_groups][d];
            }
#pragma unroll
            for (int i = 0; i < score_rows; i++) {
#pragma unroll
                for (int j = 0; j < score_keys; j++) {
                    sum[i][j] = madd(q[i].x, k[j].x, sum[i][j]);
                    sum[i][j] = madd(q[i].y, k[j].y, sum[i][j]);
                    sum[i][j] = madd(q[i].z, k[j].z, sum[i][j]);
                    sum[i][j] = madd(q[i].w, k[j].w, sum[i][j]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < score_rows; i++) {
#pragma unroll
            for (int j = 0; j < score_keys; j++) {
                m.scores[row0 + i][part * held_keys + key0 + j * key_groups] = times(sum[i][j], b.o.scale);
            }
        }
    }

    // Scores become weights relative to the tile's largest, and the tile is joined to the rows' sums.
    template <typename Block>
    __device__ void soften(const Block & b, int tile) {
        const int lane = threadIdx.x % soften_lanes;
        const int row  = threadIdx.x / soften_lanes;
        float     score[8];
        *(float4 *) &score[0] = *(const float4 *) &m.scores[row][lane * 4];
        *(float4 *) &score[4] = *(const float4 *) &m.scores[row][32 + lane * 4];
        mask(score, b.m.range[row], tile + lane * 4);
        float largest = score[0];
#pragma unroll
        for (int i = 1; i < 8; i++) {
            largest = fmaxf(largest, score[i]);
        }
#pragma unroll
        for (int step = soften_lanes / 2; step > 0; step /= 2) {
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));
        }
        const float base = largest == -INFINITY ? 0.0f : largest;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            score[i] = power_of_2(plus(score[i], -base));
        }
        *(float4 *) &m.scores[row][lane * 4]      = *(const float4 *) &score[0];
        *(float4 *) &m.scores[row][32 + lane * 4] = *(const float4 *) &score[4];
        const float sum = lanes_sum<soften_lanes>(plus(plus(plus(score[0], score[1]), plus(score[2], score[3])),
                                                       plus(plus(score[4], score[5]), plus(score[6], score[7]))));
        if (lane == 0) {
            weighted & so_far = b.m.weight[row];
            m.factors[row] = join(so_far.largest, so_far.sum, largest, sum);
        }
    }

    // Entries that the row does not see weigh nothing; most tiles are seen whole.
    __device__ void mask(float (&score)[8], row_range range, int entry) const {
        if (entry >= range.first && entry + 32 + 4 <= range.total) {
            return;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int at = entry + i / 4 * 32 + i % 4;
            score[i] = at >= range.first && at < range.total ? score[i] : -INFINITY;
        }
    }

    template <typename Block>
    __device__ void fold_tiles(Block & b) {
        b.find_rows();
        __syncthreads();
        load_queries(b);
        if (threadIdx.x < n_rows) {
            b.m.weight[threadIdx.x] = { -INFINITY, 0.0f };
        }
        for (int tile = b.begin; tile < b.end; tile += tile_keys) {
            b.keep_cell(tile, b.fetch_cell(tile));
            __syncthreads();
            for (int part = 0; part < n_held; part++) {
                load_part(b, b.o.k, tile, part);
                make_part_scores(b, part);
            }
            __syncthreads();
            soften(b, tile);
            add_values(b, tile);
            __syncthreads();
        }
        const int row0 = threadIdx.x / value_groups * result_rows, at = threadIdx.x % value_groups * 4;
#pragma unroll
        for (int i = 0; i < result_rows; i++) {
            *(float4 *) &m.tile[row0 + i][at] = result[i];
        }
        __syncthreads();
    }

    template <typename Block>
    __device__ __forceinline__ void add_values(const Block & b, int tile) {
        const int row0 = threadIdx.x / value_groups * result_rows;
        float4    sum[result_rows] = {};
        for (int part = 0; part < n_held; part++) {
            load_part(b, b.o.v, tile, part);
            if (row0 < b.n_rows) {
                add_part_values(sum, row0, part);
            }
        }
#pragma unroll
        for (int i = 0; i < result_rows; i++) {
            result[i] = joined(result[i], sum[i], m.factors[row0 + i]);
        }
    }

    __device__ __forceinline__ void add_part_values(float4 (&sum)[result_rows], int row0, int part) const {
        const int at = threadIdx.x % value_groups * 4;
        for (int key = 0; key < held_keys; key += 4) {
            float4 v[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                v[j] = *(const float4 *) &m.tile[key + j][at];
            }
#pragma unroll
            for (int i = 0; i < result_rows; i++) {
                const float4 weights = *(const float4 *) &m.scores[row0 + i][part * held_keys + key];
                const float  w[4]    = { weights.x, weights.y, weights.z, weights.w };
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    sum[i].x = madd(w[j], v[j].x, sum[i].x);
                    sum[i].y = madd(w[j], v[j].y, sum[i].y);
                    sum[i].z = madd(w[j], v[j].z, sum[i].z);
                    sum[i].w = madd(w[j], v[j].w, sum[i].w);
                }
            }
        }
    }

    __device__ __forceinline__ float4 result_of(int row, int at) const { return *(const float4 *) &m.tile[row][at]; }
};

// Heads of 256 values want more than a card without matrix units has; what one has fits half a tile of them.
template <int D> using fma_whole = fma_math<D, tile_keys>;
template <int D> using fma_least = fma_math<D, D == 256 ? tile_keys / 2 : tile_keys>;

template <int D>
void launch_attention_fma(const attention_operands & o, size_t shared_bytes, cudaStream_t stream) {
    launch_first_that_fits<fma_whole<D>, fma_least<D>>(o, shared_bytes, stream);
}

}  // namespace
}  // namespace ggml_spec_cuda
