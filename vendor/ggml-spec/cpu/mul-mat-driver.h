#pragma once

// What the integer kernels share: the loop over tiles of weight rows.
//
// A kernel type has: act, one unit of a column's activations, of act_numbers numbers; a panel, which holds eight blocks of
// 32 weights of a tile's rows; chunk_bytes of those blocks in memory; and the functions called below.

#include "mul-mat-rows.h"
#include "spec-cpu.h"

#include <algorithm>

namespace ggml_spec {

constexpr int     panel_blocks  = 8;        // of 32 weights: one block of the k-quants
constexpr int     group_columns = 4;        // columns whose sums stay in registers
constexpr int64_t pass_columns  = 64;       // columns that one decoded panel serves
constexpr int64_t cached_bytes  = 1 << 20;  // a matrix of at most this size is taken to lie in the second cache

struct product {
    const ggml_tensor * weights;
    const ggml_tensor * x;
    ggml_tensor *       out;
    void *              acts;
    int64_t             n_blocks;  // of 32, per row
    int64_t             n_rows;
    int64_t             n_columns;
};

// Cache lines of the next tile, brought a few at a time between the multiplications. A tile's rows are read side by side,
// which the hardware does not foresee; but tiles follow each other in memory.
struct prefetcher {
    const uint8_t * at;
    const uint8_t * end;
    int64_t         n_lines;  // per step

    void step() {
        for (int64_t i = 0; i < n_lines && at < end; i++, at += 64) {
            __builtin_prefetch(at, 0, 2);
        }
    }
};

// For n_rows rows from first_row on, which take n_steps steps.
static inline prefetcher prefetch_after(const product & m, const uint8_t * first_row, int64_t n_rows, int64_t n_steps) {
    const int64_t   n_bytes = n_rows * m.weights->nb[1];
    const uint8_t * end     = (const uint8_t *) m.weights->data + m.n_rows * m.weights->nb[1];
    const uint8_t * next    = std::min(end, first_row + n_bytes);
    const bool      cached  = m.n_rows * (int64_t) m.weights->nb[1] <= cached_bytes;
    return { next, std::min(end, next + n_bytes), cached ? 0 : (n_bytes / 64 + n_steps - 1) / n_steps };
}

template <typename Kernel>
void quantise_columns(const product & m, int ith, int nth) {
    typename Kernel::act * acts = (typename Kernel::act *) m.acts;
    const int64_t n_units = m.n_blocks * block_size / Kernel::act_numbers;  // per column
    const range   part    = share(m.n_columns * n_units, 1, ith, nth);
    for (int64_t i = part.begin; i < part.end; i++) {
        Kernel::quantise(acts[i], column(m.x, i / n_units) + i % n_units * Kernel::act_numbers);
    }
}

// Visits the chunks of n_rows rows: fn(first block, number of blocks, chunk of each row).
template <typename Kernel, typename Fn>
void for_each_chunk(const product & m, const uint8_t * const * rows, int n_rows, Fn fn) {
    const uint8_t * chunks[tile_rows];
    for (int64_t block = 0; block < m.n_blocks; block += panel_blocks) {
        for (int row = 0; row < n_rows; row++) {
            chunks[row] = rows[row] + block / panel_blocks * Kernel::chunk_bytes;
        }
        fn(block, (int) std::min<int64_t>(panel_blocks, m.n_blocks - block), chunks);
    }
}

// The kernel for 1 to group_columns columns.
template <typename Kernel>
auto multiply_of(int64_t columns) {
    static constexpr decltype(&Kernel::template multiply<1>) table[group_columns] = {
        Kernel::template multiply<1>, Kernel::template multiply<2>, Kernel::template multiply<3>, Kernel::template multiply<4>,
    };
    return table[columns - 1];
}

// y[column][row] = the tile's rows times columns [first, first + n).
template <typename Kernel>
void multiply_tile(const product & m, const uint8_t * const * rows, int64_t first, int64_t n, float * y) {
    constexpr int  units_per_block_inverse = Kernel::act_numbers / block_size;
    const int64_t  stride = m.n_blocks / units_per_block_inverse;
    const auto *   acts   = (const typename Kernel::act *) m.acts + first * stride;
    const int64_t  groups = (n + group_columns - 1) / group_columns;
    prefetcher     next   = prefetch_after(m, rows[0], tile_rows, m.n_blocks * groups);
    typename Kernel::panel p;
    std::fill(y, y + n * tile_rows, 0.0f);
    for_each_chunk<Kernel>(m, rows, tile_rows, [&](int64_t block, int n_blocks, const uint8_t * const * chunks) {
        Kernel::fill_panel(p, chunks, n_blocks);
        for (int64_t c = 0; c < n; c += group_columns) {
            const auto multiply = multiply_of<Kernel>(std::min<int64_t>(group_columns, n - c));
            multiply(y + c * tile_rows, p, n_blocks, acts + c * stride + block / units_per_block_inverse, stride, next);
        }
    });
}

// y[row] = the tile's rows times the only column.
template <typename Kernel>
void multiply_tile_rows(const product & m, const uint8_t * const * rows, float * y) {
    const auto * acts = (const typename Kernel::act *) m.acts;
    std::fill(y, y + tile_rows, 0.0f);
    for (int row = 0; row < tile_rows; row += row_group) {
        prefetcher next = prefetch_after(m, rows[row], row_group, m.n_blocks);
        for_each_chunk<Kernel>(m, rows + row, row_group, [&](int64_t block, int n_blocks, const uint8_t * const * chunks) {
            Kernel::multiply_rows(y + row, chunks, n_blocks, acts + block * block_size / Kernel::act_numbers, next);
        });
    }
}

template <typename Kernel>
void run_tile(const product & m, int64_t tile) {
    const int64_t   first_row = tile * tile_rows;
    const int64_t   n_rows    = std::min<int64_t>(tile_rows, m.n_rows - first_row);
    const uint8_t * rows[tile_rows];
    for (int64_t row = 0; row < tile_rows; row++) {
        // A tile that is not full repeats the last row; those results are not stored.
        rows[row] = (const uint8_t *) m.weights->data + (first_row + std::min(row, n_rows - 1)) * m.weights->nb[1];
    }
    float y[pass_columns * tile_rows];
    for (int64_t first = 0; first < m.n_columns; first += pass_columns) {
        const int64_t n = std::min(pass_columns, m.n_columns - first);
        if (has_row_kernels && m.n_columns == 1) {
            multiply_tile_rows<Kernel>(m, rows, y);
        } else {
            multiply_tile<Kernel>(m, rows, first, n, y);
        }
        for (int64_t c = 0; c < n; c++) {
            memcpy(column(m.out, first + c) + first_row, y + c * tile_rows, n_rows * sizeof(float));
        }
    }
}

// Shares n things among the threads in parts, as they get free; the caller's barrier is between this call's two halves.
template <typename Fn>
void for_each_share(const ggml_compute_params * params, int64_t n_things, Fn fn) {
    const int64_t n = std::max<int64_t>(1, n_things / (4 * params->nth));  // per part
    for (int64_t part = params->ith; part * n < n_things; part = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        for (int64_t i = part * n; i < std::min(n_things, (part + 1) * n); i++) {
            fn(i);
        }
    }
}

template <typename Kernel>
void run_integer_kernel(const ggml_compute_params * params, const product & m) {
    quantise_columns<Kernel>(m, params->ith, params->nth);
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    for_each_share(params, (m.n_rows + tile_rows - 1) / tile_rows, [&](int64_t tile) { run_tile<Kernel>(m, tile); });
}

}  // namespace ggml_spec
