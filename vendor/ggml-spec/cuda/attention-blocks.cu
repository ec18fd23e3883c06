// Attention over cells quantised in blocks by matrix units.
#include "attention-variants.h"

#if !defined(__HIPCC__)
#include "attention-mma.cuh"

namespace ggml_spec_cuda {

template <int D>
void launch_attention_blocks(const attention_operands & o, size_t shared_bytes, cudaStream_t stream) {
    launch_attention_mma<D, true>(o, shared_bytes, stream);
}

template void launch_attention_blocks<64> (const attention_operands &, size_t, cudaStream_t);
template void launch_attention_blocks<128>(const attention_operands &, size_t, cudaStream_t);
template void launch_attention_blocks<256>(const attention_operands &, size_t, cudaStream_t);

}  // namespace ggml_spec_cuda
#endif
