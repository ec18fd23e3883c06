// Queries, keys and values on their way to the matrix units: as halves in shared memory.
#pragma once

#include "attention-kernel.cuh"
#include "spec-mma.cuh"

namespace ggml_spec_cuda {
namespace {

// `held` tiles of keys or values are in shared memory or on their way. Rows of halves are pieces of 16 bytes; piece i of
// row r lies at i ^ r % 8, which puts pieces of eight rows below each other into different banks.
template <int D, int rows, int n_threads, int held, bool quantised>
struct mma_tiles {
    static constexpr int row_bytes     = D * sizeof(__half);
    static constexpr int tile_bytes    = tile_keys * row_bytes;
    static constexpr int result_stride = D + 8;  // keeps rows apart in the banks

    struct alignas(128) tile_memory {
        union {
            __half tile[held][tile_keys][D];
            float  result[rows][result_stride];  // at the end
        };
        __half q[rows][D];
    };
    static_assert(sizeof(tile_memory::result) <= sizeof(tile_memory::tile), "results take the place of tiles");

    tile_memory & m;
    unsigned      tiles;  // address in shared memory

    __device__ explicit mma_tiles(tile_memory & m) : m(m), tiles(shared_address(m.tile)) {}

    // Queries as exponents of 2.
    template <typename Block>
    __device__ void load_queries(const Block & b) {
        constexpr int pieces = D / 4, n_ahead = 8;
        const int     n_pieces = b.n_used() * pieces;
        if (!b.o.q.is_aligned()) {
#pragma unroll 1
            for (int i = threadIdx.x; i < n_pieces; i += n_threads) {
                const float * q = b.m.query[i / pieces] + i % pieces * 4;
                keep_query(b, i, b.m.query[i / pieces] ? make_float4(q[0], q[1], q[2], q[3]) : float4 {});
            }
            return;
        }
        for (int begin = threadIdx.x; begin < n_pieces; begin += n_ahead * n_threads) {
            float4 x[n_ahead] = {};
#pragma unroll
            for (int j = 0; j < n_ahead; j++) {
                const int i = begin + j * n_threads;
                if (i < n_pieces && b.m.query[i / pieces]) {
                    x[j] = *(const float4 *) (b.m.query[i / pieces] + i % pieces * 4);
                }
            }
#pragma unroll
            for (int j = 0; j < n_ahead; j++) {
                if (begin + j * n_threads < n_pieces) {
                    keep_query(b, begin + j * n_threads, x[j]);
                }
            }
        }
    }

    template <typename Block>
    __device__ __forceinline__ void keep_query(const Block & b, int index, float4 x) {
        const int row = index / (D / 4), at = index % (D / 4);
        *(uint2 *) &m.q[row][(at / 2 ^ row % 8) * 8 + at % 2 * 4] =
            make_uint2(pack_rounded(times(x.x, b.o.scale), times(x.y, b.o.scale)),
                       pack_rounded(times(x.z, b.o.scale), times(x.w, b.o.scale)));
    }

    // n cells of a table, on their way until their group has been waited for; entries beyond n are zero. A thread copies
    // one piece of four neighbouring entries, and of others after them.
    __device__ __forceinline__ void load_cells(int slot, const cells & table, const int * cell, int first, int n) {
        constexpr int pieces   = D / 8;
        constexpr int n_copies = n_threads >= 256 ? 256 : 128;  // at once
        constexpr int at_once  = n_copies / pieces < 16 ? n_copies / pieces : 16;
        static_assert(at_once >= 2 && tile_keys % (at_once * 4) == 0, "a thread's pieces lie alike in all its rounds");
        const int at = threadIdx.x % pieces, key0 = threadIdx.x / pieces * 4;
        if (threadIdx.x >= at_once * pieces) {
            return;
        }
        const char *   values = table.data + (first + at * 8) * sizeof(__half);
        const unsigned nb1    = (unsigned) table.nb1;
        const unsigned to     = tiles + slot * tile_bytes + key0 * row_bytes + (at ^ (key0 % 8)) * 16;
#pragma unroll
        for (int round = 0; round < tile_keys / (at_once * 4); round++) {
            const int  key     = key0 + round * at_once * 4;
            const int4 four    = *(const int4 *) &cell[key];
            const int  from[4] = { four.x, four.y, four.z, four.w };
#pragma unroll
            for (int i = 0; i < 4; i++) {
                copy_async((to ^ (i * 16)) + (round * at_once * 4 + i) * row_bytes, values + (uint64_t) (unsigned) from[i] * nb1,
                           key + i >= n);
            }
        }
    }

    // A thread takes half a block: 16 values of q8_0, or the low or the high nibbles of q4_0.
    __device__ void load_blocks(int slot, const cells & table, const int * cell, int first, int n) {
        for (int i = threadIdx.x; i < tile_keys * (D / 16); i += n_threads) {
            const int key = i / (D / 16), at = i % (D / 16);
            uint32_t  out[8] = {};
            if (key < n) {
                const cell_block block(table, table.data + cell[key] * table.nb1, first / 32 + at / 2);
                const float scale = block.scale();
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const unsigned pair = block.pair(block.is_q8_0 ? at % 2 * 8 + j : j);
                    const int      low  = block.is_q8_0 ? (int8_t) (pair & 0xff) : (int) (pair >> at % 2 * 4 & 15) - 8;
                    const int      high = block.is_q8_0 ? (int8_t) (pair >> 8) : (int) (pair >> (8 + at % 2 * 4) & 15) - 8;
                    out[j] = pack_rounded(times(scale, (float) low), times(scale, (float) high));
                }
            }
            *(uint4 *) &m.tile[slot][key][((at * 2)     ^ key % 8) * 8] = { out[0], out[1], out[2], out[3] };
            *(uint4 *) &m.tile[slot][key][((at * 2 + 1) ^ key % 8) * 8] = { out[4], out[5], out[6], out[7] };
        }
    }

    // Loads alternate between keys and values of the block's tiles, in the order of their use; a group of copies each.
    template <typename Block>
    __device__ __forceinline__ void start_load(const Block & b, int tile, bool is_keys, int slot) {
        if (tile < b.end) {
            const cells & table = is_keys ? b.o.k : b.o.v;
            if constexpr (quantised) {
                load_blocks(slot, table, b.cells_of_tile(tile), b.kv_head * D, b.tile_size(tile));
            } else {
                load_cells(slot, table, b.cells_of_tile(tile), b.kv_head * D, b.tile_size(tile));
            }
        }
        commit_copies();
    }
};

}  // namespace
}  // namespace ggml_spec_cuda
