// Tiles multiplied by matrix units: f16 cells, and cells quantised in blocks.
//
// Queries, weights and dequantised cells are rounded to f16, sums are f32. Every element of a product is a sum in one
// order, whatever the number of rows. Four warps share 16 or 32 rows: each makes scores of some rows and keys in its
// registers, hands their weights on through shared memory, and makes results of all rows for a quarter of the values.
#pragma once

#include "attention-tiles.cuh"

namespace ggml_spec_cuda {
namespace {

constexpr int group_warps = 4;

template <int rows, int rows_per_group>
constexpr int mma_threads = rows / rows_per_group * group_warps * warp_lanes;

// `held` as in mma_tiles: two, or at least four.
template <int D, int rows, int rows_per_group, int held, bool quantised>
struct mma_math : mma_tiles<D, rows, mma_threads<rows, rows_per_group>, held, quantised> {
    using loads = mma_tiles<D, rows, mma_threads<rows, rows_per_group>, held, quantised>;
    using loads::row_bytes, loads::tile_bytes, loads::tiles, loads::start_load, loads::load_queries;

    static constexpr int head_dim     = D;
    static constexpr int n_rows       = rows;
    static constexpr int n_threads    = mma_threads<rows, rows_per_group>;
    static constexpr int row_tiles    = rows_per_group / 16;                // of a group
    static constexpr int key_parts    = group_warps / row_tiles;            // warps that share a row tile's scores
    static constexpr int score_tiles  = tile_keys / 8 / key_parts;          // of 8 keys, of a warp
    static constexpr int result_tiles = D / 8 / group_warps;                // of 8 values, of a warp
    static constexpr int key_steps    = tile_keys / 16;
    static constexpr int n_together   = row_tiles == 1 && result_tiles >= 4 ? 4 : 2;  // tiles of results summed side by side
    static constexpr int weight_bytes = tile_keys * sizeof(__half);         // of a row

    struct memory : loads::tile_memory {
        __half weight[rows][tile_keys];       // in pieces like those of a tile
        float  sum[rows][key_steps];          // of weights of 16 keys
        float  largest[2][rows][key_parts];   // score of a tile, and of the next
    };

    memory & m;
    int      lane, group, warp;       // of the group
    unsigned q_at, k_at, w_at, v_at;  // addresses in shared memory, of keys and values from a tile's begin
    weighted so_far[2 * row_tiles];   // of rows lane / 4, 8 below, ..
    float    score[score_tiles][4];   // of the next tile to be softened, rows lane / 4 and 8 below
    float    result[row_tiles][result_tiles][4] = {};

    __device__ explicit mma_math(memory & m) : loads(m), m(m) {
        lane  = threadIdx.x % warp_lanes;
        warp  = threadIdx.x / warp_lanes % group_warps;
        group = threadIdx.x / warp_lanes / group_warps;
        q_at  = shared_address(m.q) + (score_row() + lane % 16) * row_bytes + piece_bytes(lane / 16);
        k_at  = (score_key() + lane / 16 * 8 + lane % 8) * row_bytes + piece_bytes(lane / 8 % 2);
        w_at  = shared_address(m.weight) + (group * rows_per_group + lane % 16) * weight_bytes + piece_bytes(lane / 16);
        v_at  = lane % 16 * row_bytes + piece_bytes(warp * result_tiles + lane / 16);
#pragma unroll
        for (int i = 0; i < 2 * row_tiles; i++) {
            so_far[i] = { -INFINITY, 0.0f };
        }
    }

    // First of the rows and keys whose scores this warp makes.
    __device__ __forceinline__ int score_row() const { return group * rows_per_group + warp / key_parts * 16; }
    __device__ __forceinline__ int score_key() const { return warp % key_parts * score_tiles * 8; }

    // Where a piece lies in a row that this lane names to the matrix units: row lane % 8 of eight.
    __device__ __forceinline__ int piece_bytes(int piece) const { return (piece ^ (lane % 8)) * 16; }

    // The same address `pieces` further on, an even number below the power of two that the lane's piece is a multiple of.
    __device__ __forceinline__ static unsigned further(unsigned address, int pieces) {
        return (address ^ (pieces % 8 * 16)) + pieces / 8 * 128;
    }

    // 16 values of queries and of this warp's keys, as factors of a product.
    struct score_factors {
        uint32_t q[4];
        uint32_t k[score_tiles / 2][4];
    };

    __device__ __forceinline__ void load_factors(score_factors & f, unsigned keys, int step) const {
        load_matrices(f.q, further(q_at, step * 2));
#pragma unroll
        for (int j = 0; j < score_tiles / 2; j++) {
            load_matrices(f.k[j], further(keys, step * 2) + j * 16 * row_bytes);
        }
    }

    // This warp's scores of a tile, and the largest of them.
    __device__ __forceinline__ void make_scores(int slot, int tile, const row_range (&range)[2]) {
        const unsigned keys = tiles + slot * tile_bytes + k_at;
        score_factors  f[2];
        load_factors(f[0], keys, 0);
#pragma unroll
        for (int j = 0; j < score_tiles; j++) {
            score[j][0] = score[j][1] = score[j][2] = score[j][3] = 0.0f;
        }
#pragma unroll
        for (int step = 0; step < D / 16; step++) {
            if (step + 1 < D / 16) {
                load_factors(f[(step + 1) % 2], keys, step + 1);
            }
#pragma unroll
            for (int j = 0; j < score_tiles; j++) {
                const uint32_t * k = &f[step % 2].k[j / 2][j % 2 * 2];
                multiply_add(score[j], f[step % 2].q, k[0], k[1]);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            mask(r, range[r], tile);
            float largest = -INFINITY;
#pragma unroll
            for (int j = 0; j < score_tiles; j++) {
                largest = fmaxf(largest, fmaxf(score[j][r * 2], score[j][r * 2 + 1]));
            }
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
            if (lane % 4 == 0) {
                m.largest[tile / tile_keys % 2][score_row() + lane / 4 + r * 8][warp % key_parts] = largest;
            }
        }
    }

    // Entries that the row does not see weigh nothing; most tiles are seen whole.
    __device__ __forceinline__ void mask(int r, row_range range, int tile) {
        if (tile >= range.first && tile + tile_keys <= range.total) {
            return;
        }
#pragma unroll
        for (int i = 0; i < score_tiles * 2; i++) {
            const int entry = tile + score_key() + i / 2 * 8 + lane % 4 * 2 + i % 2;
            float &   one   = score[i / 2][r * 2 + i % 2];
            one = entry >= range.first && entry < range.total ? one : -INFINITY;
        }
    }

    __device__ __forceinline__ float largest_of_tile(int tile, int row) const {
        const float (&parts)[key_parts] = m.largest[tile / tile_keys % 2][row];
        float largest = parts[0];
#pragma unroll
        for (int i = 1; i < key_parts; i++) {
            largest = fmaxf(largest, parts[i]);
        }
        return largest;
    }

    // Weights from scores, relative to the tile's largest, for all warps of the group, and their sums.
    __device__ __forceinline__ void share_weights(int tile) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int   row     = score_row() + lane / 4 + r * 8;
            const float largest = largest_of_tile(tile, row);
            const float base    = largest == -INFINITY ? 0.0f : largest;
#pragma unroll
            for (int j = 0; j < score_tiles; j += 2) {
                float sum = 0.0f;
#pragma unroll
                for (int i = j; i < j + 2; i++) {
                    const float x = power_of_2(plus(score[i][r * 2], -base)), y = power_of_2(plus(score[i][r * 2 + 1], -base));
                    *(uint32_t *) &m.weight[row][(score_key() / 8 + i ^ row % 8) * 8 + lane % 4 * 2] = pack_rounded(x, y);
                    sum = plus(sum, plus(x, y));
                }
                sum = lanes_sum<4>(sum);
                if (lane % 4 == 0) {
                    m.sum[row][score_key() / 16 + j / 2] = sum;
                }
            }
        }
    }

    // A tile is joined to the rows' sums: what results so far and the tile's are multiplied with.
    __device__ __forceinline__ void join_sums(join_factors (&factors)[2 * row_tiles], int tile) {
#pragma unroll
        for (int i = 0; i < 2 * row_tiles; i++) {
            const int    row = group * rows_per_group + lane / 4 + i * 8;
            const float4 sum = *(const float4 *) m.sum[row];
            factors[i] = join(so_far[i].largest, so_far[i].sum, largest_of_tile(tile, row), plus(plus(sum.x, sum.y), plus(sum.z, sum.w)));
        }
    }

    // Values of 16 keys for `n_together` tiles.
    __device__ __forceinline__ static void load_values(uint32_t (&v)[n_together / 2][4], unsigned values, int step, int first_tile) {
#pragma unroll
        for (int i = 0; i < n_together / 2; i++) {
            load_matrices_transposed(v[i], further(values, first_tile + i * 2) + step * 16 * row_bytes);
        }
    }

    __device__ __forceinline__ void add_values(int slot, int tile) {
        const unsigned values = tiles + slot * tile_bytes + v_at;
        uint32_t       w[key_steps][row_tiles][4], v[2][n_together / 2][4];
        join_factors   factors[2 * row_tiles];
        load_values(v[0], values, 0, 0);
#pragma unroll
        for (int step = 0; step < key_steps; step++) {
#pragma unroll
            for (int r = 0; r < row_tiles; r++) {
                load_matrices(w[step][r], further(w_at, step * 2) + r * 16 * weight_bytes);
            }
        }
        join_sums(factors, tile);
#pragma unroll
        for (int j = 0; j < result_tiles; j += n_together) {
            float part[row_tiles][n_together][4] = {};
#pragma unroll
            for (int step = 0; step < key_steps; step++) {
                const int next = step + 1 < key_steps ? j : j + n_together;
                if (next < result_tiles) {
                    load_values(v[(step + 1) % 2], values, (step + 1) % key_steps, next);
                }
#pragma unroll
                for (int i = 0; i < n_together; i++) {
                    const uint32_t * factor = &v[step % 2][i / 2][i % 2 * 2];
#pragma unroll
                    for (int r = 0; r < row_tiles; r++) {
                        multiply_add(part[r][i], w[step][r], factor[0], factor[1]);
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < row_tiles; r++) {
#pragma unroll
                for (int i = 0; i < n_together; i++) {
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        float & sum = result[r][j + i][k];
                        sum = joined(sum, part[r][i][k], factors[r * 2 + k / 2]);
                    }
                }
            }
        }
    }

    template <typename Block>
    __device__ void fold_tiles(Block & b) {
        int cell[held / 2 + 1];
#pragma unroll
        for (int i = 0; i <= held / 2; i++) {
            cell[i] = b.fetch_cell(b.begin + i * tile_keys);
        }
        b.find_rows();
#pragma unroll
        for (int i = 0; i <= held / 2; i++) {
            b.keep_cell(b.begin + i * tile_keys, cell[i]);
        }
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < held - 1; i++) {
            start_load(b, b.begin + i / 2 * tile_keys, i % 2 == 0, i);
        }
        load_queries(b);
        const row_range range[2] = { b.m.range[score_row() + lane / 4], b.m.range[score_row() + lane / 4 + 8] };
        const bool is_used = group * rows_per_group < b.n_rows;
        if constexpr (held >= 4) {
            fold_ahead(b, range, is_used);
        } else {
            fold_in_turn(b, range, is_used);
        }
        __syncthreads();
        if (is_used) {
            keep_results(b);
        }
        __syncthreads();
    }

    __device__ __forceinline__ static int next_slot(int slot) { return slot == held - 1 ? 0 : slot + 1; }

    // For groups without rows, too: race checkers count a thread's barriers.
    __device__ __forceinline__ void group_barrier() const { warps_barrier(1 + group, group_warps * warp_lanes); }

    // One barrier a tile: its values and weights and the keys of the next are there; its keys and the values of the one
    // before give their places to the loads that are `held` further on. Scores are made a tile ahead, so that some warps
    // make scores while others make results.
    template <typename Block>
    __device__ __forceinline__ void fold_ahead(Block & b, const row_range (&range)[2], bool is_used) {
        wait_copies_but<held - 2>();
        __syncthreads();
        if (is_used) {
            make_scores(0, b.begin, range);
        }
        group_barrier();
        if (is_used) {
            share_weights(b.begin);
        }
        int slot = 0;  // of this tile's keys
#pragma unroll 1
        for (int tile = b.begin; tile < b.end; tile += tile_keys) {
            const int next  = tile + tile_keys;
            const int known = tile + (held / 2 + 1) * tile_keys;
            const int cell  = b.fetch_cell(known);
            wait_copies_but<held - 4>();
            __syncthreads();
            start_load(b, tile + (held - 1) / 2 * tile_keys, held % 2 == 1, slot == 0 ? held - 1 : slot - 1);
            start_load(b, tile + held / 2 * tile_keys, held % 2 == 0, slot);
            const int value_slot = next_slot(slot);
            slot = next_slot(value_slot);
            if (is_used) {
                if (next < b.end) {
                    make_scores(slot, next, range);
                }
                add_values(value_slot, tile);
            }
            if (next < b.end) {
                group_barrier();
                if (is_used) {
                    share_weights(next);
                }
            }
            b.keep_cell(known, cell);
        }
    }

    // Two barriers a tile: when its keys are there, and when its values are. Half the memory, loads are waited for.
    template <typename Block>
    __device__ __forceinline__ void fold_in_turn(Block & b, const row_range (&range)[2], bool is_used) {
        static_assert(held == 2, "keys in the first place, values in the second");
#pragma unroll 1
        for (int tile = b.begin; tile < b.end; tile += tile_keys) {
            const int known = tile + 2 * tile_keys;
            const int cell  = b.fetch_cell(known);
            wait_copies_but<0>();
            __syncthreads();
            start_load(b, tile, false, 1);
            if (is_used) {
                make_scores(0, tile, range);
            }
            group_barrier();
            if (is_used) {
                share_weights(tile);
            }
            b.keep_cell(known, cell);
            wait_copies_but<0>();
            __syncthreads();
            start_load(b, tile + tile_keys, true, 0);
            if (is_used) {
                add_values(1, tile);
            }
        }
    }

    template <typename Block>
    __device__ __forceinline__ void keep_results(Block & b) {
#pragma unroll
        for (int r = 0; r < row_tiles; r++) {
            const int row = group * rows_per_group + r * 16 + lane / 4;
#pragma unroll
            for (int j = 0; j < result_tiles; j++) {
                const int at = (warp * result_tiles + j) * 8 + lane % 4 * 2;
                *(float2 *) &m.result[row][at]     = make_float2(result[r][j][0], result[r][j][1]);
                *(float2 *) &m.result[row + 8][at] = make_float2(result[r][j][2], result[r][j][3]);
            }
            if (warp == 0 && lane % 4 == 0) {
                b.m.weight[row]     = so_far[r * 2];
                b.m.weight[row + 8] = so_far[r * 2 + 1];
            }
        }
    }

    __device__ __forceinline__ float4 result_of(int row, int at) const { return *(const float4 *) &m.result[row][at]; }
};

// As few rows a block as hold all rows, or as many as shared memory allows: more rows share a tile, fewer leave room for
// more blocks. A row's bits do not depend on it.
template <int D, bool quantised>
void launch_attention_mma(const attention_operands & o, size_t shared_bytes, cudaStream_t stream) {
    using rows_96     = mma_math<D, 96, 32, 4, quantised>;
    using rows_48     = mma_math<D, 48, 16, 5, quantised>;
    using rows_32     = mma_math<D, 32, 16, 6, quantised>;
    using rows_16     = mma_math<D, 16, 16, 6, quantised>;
    using few_rows_32 = mma_math<D, 32, 16, 2, quantised>;  // for cards with 100 KB
    using few_rows_16 = mma_math<D, 16, 16, 2, quantised>;
    const int n_rows = o.n_columns * (o.n_heads / o.n_heads_kv);
    if (n_rows > 48) {
        launch_first_that_fits<rows_96, rows_48, few_rows_32, few_rows_16>(o, shared_bytes, stream);
    } else if (n_rows > 32) {
        launch_first_that_fits<rows_48, few_rows_32, few_rows_16>(o, shared_bytes, stream);
    } else if (n_rows > 16) {
        launch_first_that_fits<rows_32, few_rows_32, few_rows_16>(o, shared_bytes, stream);
    } else {
        launch_first_that_fits<rows_16, few_rows_16>(o, shared_bytes, stream);
    }
}

}  // namespace
}  // namespace ggml_spec_cuda
