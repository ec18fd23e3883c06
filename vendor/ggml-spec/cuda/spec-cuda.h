// What the CUDA (HIP) backend calls at its own function entries for the modes of ggml-spec.h; see vendor/edits.toml.
#pragma once

#include "ggml-backend.h"
#include "ggml-spec.h"

#include <cstddef>

// What kernels are chosen by, and splits are cut by: results are bit for bit the same on cards that agree in it.
struct ggml_spec_cuda_card {
    int    n_multiprocessors;
    size_t shared_bytes;        // that a block may have
    int    compute_capability;  // 100 times the major number and 10 times the minor one
};

// Whether a kernel exists for exactly this node; `device_type` is the device's buffer type.
bool ggml_spec_cuda_supports_op(const ggml_tensor * op, ggml_backend_buffer_type_t device_type, ggml_spec_cuda_card card);

// Bytes of the result and of the scratch space that its kernels keep behind it: nothing is allocated during a launch,
// so a captured graph never holds the address of a buffer that a pool has given to somebody else.
size_t ggml_spec_cuda_alloc_size(const ggml_tensor * op, ggml_spec_cuda_card card);

// Queues the kernels on a cudaStream_t. What changes from call to call is read on the device.
void ggml_spec_cuda_compute(ggml_tensor * op, ggml_spec_cuda_card card, void * stream);
