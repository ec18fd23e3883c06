#pragma once

// What the CPU kernels share: their entry points, the schedule as data, and the walk over the work buffer.

#include "ggml-cpu-impl.h"
#include "ggml-spec-impl.h"

#include <cstddef>
#include <cstdint>

namespace ggml_spec {

struct sched_node {
    int32_t node;
    int32_t parent;
    int32_t restore_level;
    int32_t save_level;
};

struct schedule {
    int32_t            n_nodes;
    int32_t            n_pending;
    int32_t            pending_bank;
    int32_t            write_bank;
    int32_t            state_slot;
    int32_t            n_levels;
    bool               fold;
    const sched_node * nodes;    // visiting order
    const int32_t *    pending;  // rows of pending_bank
};

// Aborts with a message when the header does not fit the operation: the host validates, this is the last line.
schedule read_schedule(const ggml_tensor * sched, int64_t n_columns, int64_t n_rows, int64_t n_slots);

// Share `ith` of `nth` of n things in blocks of `step`.
struct range {
    int64_t begin;
    int64_t end;
};

static inline range share(int64_t n, int64_t step, int ith, int nth) {
    const int64_t blocks = (n + step - 1) / step;
    const int64_t begin  = blocks * ith / nth * step;
    const int64_t end    = blocks * (ith + 1) / nth * step;
    return { begin, end < n ? end : n };
}

static inline float * column(const ggml_tensor * t, int64_t i1, int64_t i2 = 0, int64_t i3 = 0) {
    return (float *) ((char *) t->data + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3]);
}

// Rounded up so that two threads' parts never share a cache line.
static inline size_t padded(size_t n_bytes) {
    return (n_bytes + 63) & ~(size_t) 63;
}

size_t conv_tree_work_size(int n_threads, const ggml_tensor * op);
void   conv_tree_compute(const ggml_compute_params * params, ggml_tensor * op);

size_t delta_net_tree_work_size(int n_threads, const ggml_tensor * op);
void   delta_net_tree_compute(const ggml_compute_params * params, ggml_tensor * op);

void   block_conv_compute(const ggml_compute_params * params, ggml_tensor * op);

void   add_rms_norm_compute(const ggml_compute_params * params, ggml_tensor * op);
void   gated_rms_norm_compute(const ggml_compute_params * params, ggml_tensor * op);

size_t top_k_work_size(int n_threads, const ggml_tensor * op);
void   top_k_compute(const ggml_compute_params * params, ggml_tensor * op);

}  // namespace ggml_spec
