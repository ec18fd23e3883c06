// Attention over q8_0 cells by matrix units.
#include "attention-variants.h"

#if !defined(__HIPCC__)
#include "attention-mma.cuh"

namespace ggml_spec_cuda {

template <int D>
void launch_attention_q8_0(const attention_operands & o, size_t shared_bytes, cudaStream_t stream) {
    launch_attention_mma<D, true>(o, shared_bytes, stream);
}

template void launch_attention_q8_0<64> (const attention_operands &, size_t, cudaStream_t);
template void launch_attention_q8_0<128>(const attention_operands &, size_t, cudaStream_t);
template void launch_attention_q8_0<256>(const attention_operands &, size_t, cudaStream_t);

}  // namespace ggml_spec_cuda
#endif
