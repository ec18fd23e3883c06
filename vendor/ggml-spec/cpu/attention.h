// CPU kernel of ggml_spec_attention (see ggml-spec-attention.h).
#pragma once

#include <cstddef>

struct ggml_compute_params;
struct ggml_tensor;

size_t ggml_spec_cpu_attention_work_size(int n_threads, const ggml_tensor * dst);
void   ggml_spec_cpu_attention(const ggml_compute_params * params, ggml_tensor * dst);
