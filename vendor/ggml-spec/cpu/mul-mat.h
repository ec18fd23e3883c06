#pragma once

// Matrix multiplication for few columns: the shapes of decoding and of draft tree verification.
//
// Upstream computes one dot product per (row, column), so a block of weights is read and decoded once per column. Here a
// tile of weight rows, one row per lane, is decoded once and multiplied with every column. A result is the sum over the
// blocks of a row in their order, whatever the number of columns, rows and threads: it is the same bits in plain
// decoding, in verification and in prefill.

#include "spec-cpu.h"

namespace ggml_spec {

// Whether the kernels below take a MUL_MAT node.
bool   mul_mat_takes(const ggml_tensor * op);
size_t mul_mat_work_size(int n_threads, const ggml_tensor * op);
void   mul_mat_compute(const ggml_compute_params * params, ggml_tensor * op);

// GET_ROWS of packed weights (see ggml_spec_pack).
void packed_rows_compute(const ggml_compute_params * params, ggml_tensor * op);

}  // namespace ggml_spec
