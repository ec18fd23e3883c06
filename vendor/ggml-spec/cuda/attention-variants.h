// The variants of attention that are compiled apart; nothing of them is there for cards without matrix units.
#pragma once

#include "attention-lists.cuh"

namespace ggml_spec_cuda {

// For heads of D = 64, 128 and 256 values; `shared_bytes` is what a block may have.
template <int D> void launch_attention_f16   (const attention_operands & o, size_t shared_bytes, cudaStream_t stream);
template <int D> void launch_attention_blocks(const attention_operands & o, size_t shared_bytes, cudaStream_t stream);

}  // namespace ggml_spec_cuda
