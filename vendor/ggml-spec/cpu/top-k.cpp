// The k largest values of each row, in exact order, with the row's log-normaliser.
//
// A row is cut into blocks of fixed size; threads take contiguous runs of blocks. The order of values is total (value,
// then id), and the sum of exponentials is added up block by block, so the result does not depend on the thread count.

#include "spec-cpu.h"
#include "vec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace ggml_spec {
namespace {

constexpr int64_t block = 4096;  // values of a row handled at once: they stay in the first cache for the second pass
constexpr int64_t chunk = 64;    // values compared with the threshold at once

struct entry {
    float   value;
    int32_t id;
};

struct top_list {
    int   k;
    int   n;
    entry entries[GGML_SPEC_TOP_K_MAX];  // best first
};

struct block_sum {
    float  max;
    double sum;  // of exp(value - max)
};

bool before(const entry & a, const entry & b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

void insert(top_list & list, entry e) {
    if (list.n == list.k && !before(e, list.entries[list.n - 1])) {
        return;
    }
    int at = list.n < list.k ? list.n++ : list.n - 1;
    for (; at > 0 && before(e, list.entries[at - 1]); at--) {
        list.entries[at] = list.entries[at - 1];
    }
    list.entries[at] = e;
}

bool any_above(const float * x, int64_t n, float threshold) {
    int found = 0;
    for (int64_t i = 0; i < n; i++) {
        found |= x[i] > threshold;
    }
    return found != 0;
}

void scan_each(top_list & list, const float * x, int64_t n, int64_t first_id) {
    for (int64_t i = 0; i < n; i++) {
        if (!std::isnan(x[i])) {
            insert(list, { x[i], (int32_t) (first_id + i) });
        }
    }
}

// Ids ascend, so a value equal to the threshold comes too late to enter a full list.
void scan(top_list & list, const float * row, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i < end && list.n < list.k; i++) {
        scan_each(list, row + i, 1, i);
    }
    for (; i + chunk <= end; i += chunk) {
        if (any_above(row + i, chunk, list.entries[list.n - 1].value)) {
            scan_each(list, row + i, chunk, i);
        }
    }
    scan_each(list, row + i, end - i, i);
}

// Fewer than k values are numbers: the first NaNs fill the list.
void fill_with_nan(top_list & list, const float * row, int64_t n) {
    for (int64_t i = 0; i < n && list.n < list.k; i++) {
        if (std::isnan(row[i])) {
            list.entries[list.n++] = { row[i], (int32_t) i };
        }
    }
}

block_sum sum_block(const float * x, int64_t n, float * exps) {
    block_sum s;
    ggml_vec_max_f32((int) n, &s.max, x);
    s.sum = s.max == -INFINITY ? 0.0 : ggml_vec_soft_max_f32((int) n, exps, x, s.max);
    return s;
}

float log_normaliser(const block_sum * sums, int64_t n_blocks) {
    float max = -INFINITY;
    for (int64_t i = 0; i < n_blocks; i++) {
        max = std::max(max, sums[i].max);
    }
    double sum = 0.0;
    for (int64_t i = 0; i < n_blocks; i++) {
        sum += sums[i].sum * exp((double) sums[i].max - max);
    }
    return (float) (max + log(sum));
}

struct plan {
    int64_t n_values, n_rows, n_blocks;
    int     k;
    bool    logprobs;

    explicit plan(const ggml_tensor * op) {
        n_values = op->src[0]->ne[0];
        n_rows   = op->src[0]->ne[1];
        n_blocks = (n_values + block - 1) / block;
        k        = ggml_spec_flags(op) >> 8;
        logprobs = (ggml_spec_flags(op) & GGML_SPEC_FLAG_LOGPROBS) != 0;
    }
};

struct scratch {
    float *     exps;   // [block] of this thread
    top_list *  lists;  // [n_rows][n_threads]
    block_sum * sums;   // [n_rows][n_blocks]

    static size_t carve(const plan & p, int ith, int nth, char * base, scratch & s) {
        const size_t exps_bytes  = padded(block * sizeof(float));
        const size_t lists_bytes = padded(p.n_rows * nth * sizeof(top_list));
        s.exps  = (float *) (base + ith * exps_bytes);
        s.lists = (top_list *) (base + nth * exps_bytes);
        s.sums  = (block_sum *) (base + nth * exps_bytes + lists_bytes);
        return nth * exps_bytes + lists_bytes + padded(p.n_rows * p.n_blocks * sizeof(block_sum));
    }
};

void run_part(const plan & p, const scratch & s, const ggml_tensor * logits, int64_t row, range blocks, top_list & list) {
    const float * x = column(logits, row);
    list.k = p.k;
    list.n = 0;
    for (int64_t b = blocks.begin; b < blocks.end; b++) {
        const int64_t end = std::min(p.n_values, (b + 1) * block);
        scan(list, x, b * block, end);
        if (p.logprobs) {
            s.sums[row * p.n_blocks + b] = sum_block(x + b * block, end - b * block, s.exps);
        }
    }
}

void finish_row(const plan & p, const scratch & s, ggml_tensor * op, int64_t row, const top_list * parts, int n_parts) {
    top_list list = parts[0];
    for (int i = 1; i < n_parts; i++) {
        for (int j = 0; j < parts[i].n; j++) {
            insert(list, parts[i].entries[j]);
        }
    }
    fill_with_nan(list, column(op->src[0], row), p.n_values);

    const float normaliser = p.logprobs ? log_normaliser(s.sums + row * p.n_blocks, p.n_blocks) : 0.0f;
    int32_t *   ids        = (int32_t *) column(op, row);
    for (int i = 0; i < p.k; i++) {
        const float value = list.entries[i].value - normaliser;
        ids[i] = list.entries[i].id;
        memcpy(ids + p.k + i, &value, sizeof(value));
    }
}

}  // namespace

size_t top_k_work_size(int n_threads, const ggml_tensor * op) {
    scratch s;
    return scratch::carve(plan(op), 0, n_threads, nullptr, s);
}

void top_k_compute(const ggml_compute_params * params, ggml_tensor * op) {
    const plan p(op);
    scratch    s;
    scratch::carve(p, params->ith, params->nth, (char *) params->wdata, s);

    // All (row, block) pairs in one sequence: a thread's share is a run of it and may cut a row in two.
    const range units = share(p.n_rows * p.n_blocks, 1, params->ith, params->nth);
    for (int64_t row = 0; row < p.n_rows; row++) {
        const int64_t first = row * p.n_blocks;
        const range   mine  = { std::clamp(units.begin - first, (int64_t) 0, p.n_blocks),
                                std::clamp(units.end - first, (int64_t) 0, p.n_blocks) };
        run_part(p, s, op->src[0], row, mine, s.lists[row * params->nth + params->ith]);
    }
    ggml_barrier(params->threadpool);
    for (int64_t row = params->ith; row < p.n_rows; row += params->nth) {
        finish_row(p, s, op, row, s.lists + row * params->nth, params->nth);
    }
}

}  // namespace ggml_spec
