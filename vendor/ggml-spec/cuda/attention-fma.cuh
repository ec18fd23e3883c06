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

    struct memory {
        float tile[held_keys][D + 4];  // keys, then values
        float q[n_rows][D + 4];
    };

    memory & m;
    int      slot = 0, n_cells = 0;  // of the newest tile
    float4   result[result_rows] = {};

    __device__ explicit fma_math(memory & m) : m(m) {}

    template <typename Block>
    __device__ void start_queries(const Block & b) {
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

    template <typename Block> __device__ void start_keys(const Block &, int, int) {}
    template <typename Block> __device__ void start_values(const Block &, int, int) {}

    template <typename Block>
    __device__ void wait_keys(const Block & b, int tile_slot, int n) {
        slot    = tile_slot;
        n_cells = n;
        load_tile(b.o.k, b.m.cell[slot], b.kv_head * D, n);
    }

    template <typename Block>
    __device__ void wait_values(const Block & b, int tile_slot, int n) {
        load_tile(b.o.v, b.m.cell[tile_slot], b.kv_head * D, n);
    }

    // A part of the newest tile in the place of the one before, when all threads have used that.
    template <typename Block>
    __device__ void load_part(const Block & b, const cells & table, int part) {
        if (part > 0) {
            __syncthreads();
            load_tile(table, b.m.cell[slot] + part * held_keys, b.kv_head * D, n_cells - part * held_keys);
            __syncthreads();
        }
    }

    template <typename Block>
    __device__ void make_scores(const Block & b) {
        for (int part = 0; part < n_held; part++) {
            load_part(b, b.o.k, part);
            make_part_scores(b, part);
        }
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
                b.m.scores[row0 + i][part * held_keys + key0 + j * key_groups] = times(sum[i][j], b.o.scale);
            }
        }
    }

    __device__ static void keep_weights(float (&row)[score_stride], int at, const float (&w)[8]) {
        keep_weights_f32(row, at, w);
    }

    template <typename Block>
    __device__ void add_values(const Block & b) {
        const int row0 = threadIdx.x / value_groups * result_rows;
        float4    sum[result_rows] = {};
        for (int part = 0; part < n_held; part++) {
            load_part(b, b.o.v, part);
            if (row0 < b.n_rows) {
                add_part_values(sum, b, row0, part);
            }
        }
        if (row0 >= b.n_rows) {
            return;
        }
#pragma unroll
        for (int i = 0; i < result_rows; i++) {
            const join_factors factors = b.m.factors[row0 + i];
            result[i] = make_float4(joined(result[i].x, sum[i].x, factors), joined(result[i].y, sum[i].y, factors),
                                    joined(result[i].z, sum[i].z, factors), joined(result[i].w, sum[i].w, factors));
        }
    }

    template <typename Block>
    __device__ __forceinline__ void add_part_values(float4 (&sum)[result_rows], const Block & b, int row0, int part) {
        const int at = threadIdx.x % value_groups * 4;
        for (int key = 0; key < held_keys; key += 4) {
            float4 v[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                v[j] = *(const float4 *) &m.tile[key + j][at];
            }
#pragma unroll
            for (int i = 0; i < result_rows; i++) {
                const float4 weights = *(const float4 *) &b.m.scores[row0 + i][part * held_keys + key];
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

    template <typename Write>
    __device__ void each_result(Write write) const {
        const int row0 = threadIdx.x / value_groups * result_rows;
        const int at   = threadIdx.x % value_groups * 4;
#pragma unroll
        for (int i = 0; i < result_rows; i++) {
            write(row0 + i, at, make_float2(result[i].x, result[i].y));
            write(row0 + i, at + 2, make_float2(result[i].z, result[i].w));
        }
    }
};

// Heads of 256 values want more than a card without matrix units has; what one has fits half a tile of them.
template <int D> using fma_whole = fma_math<D, tile_keys>;
template <int D> using fma_least = fma_math<D, D == 256 ? tile_keys / 2 : tile_keys>;

template <int D>
void launch_attention_fma(const attention_operands & o, size_t shared_bytes, cudaStream_t stream) {
    if (attention_block_bytes<fma_whole<D>>(o.n_columns) + attention_static_bytes <= shared_bytes) {
        launch_attention<fma_whole<D>>(o, stream);
    } else {
        launch_attention<fma_least<D>>(o, stream);
    }
}

}  // namespace
}  // namespace ggml_spec_cuda
