// Which kernel a node of ours gets: the CUDA backend asks here first.

#include "spec-cuda.h"

#include "ggml-spec-attention.h"
#include "spec-device.cuh"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace ggml_spec_cuda {
namespace {

// Sources that already lie somewhere lie on this device, or on the host from where a scheduler would copy them.
bool sources_are_here(const ggml_tensor * op, ggml_backend_buffer_type_t device_type) {
    for (const ggml_tensor * source : op->src) {
        if (source == nullptr || source->buffer == nullptr) {
            continue;
        }
        if (ggml_backend_buffer_get_type(source->buffer) != device_type && !ggml_backend_buffer_is_host(source->buffer)) {
            return false;
        }
    }
    return true;
}

size_t scratch_offset(const ggml_tensor * op) {
    return GGML_PAD(ggml_nbytes(op), 256);
}

// A test may see a smaller card than there is: shared bytes of a block and multiprocessors, "101376,16".
ggml_spec_cuda_card seen(ggml_spec_cuda_card card) {
    static const char * wanted = getenv("GGML_SPEC_CUDA_CARD");
    unsigned shared_bytes, n_multiprocessors;
    if (wanted && sscanf(wanted, "%u,%u", &shared_bytes, &n_multiprocessors) == 2 && n_multiprocessors > 0) {
        card.shared_bytes      = std::min(card.shared_bytes, (size_t) shared_bytes);
        card.n_multiprocessors = std::min(card.n_multiprocessors, (int) n_multiprocessors);
    }
    return card;
}

size_t scratch_bytes(const ggml_tensor * op, const ggml_spec_cuda_card & card) {
    switch (ggml_spec_mode_of(op)) {
        case GGML_SPEC_MODE_TOP_K:     return top_k_scratch_bytes(op);
        case GGML_SPEC_MODE_ATTENTION: return attention_scratch_bytes(op, card);
        default:                       return 0;
    }
}

}  // namespace
}  // namespace ggml_spec_cuda

using namespace ggml_spec_cuda;

bool ggml_spec_cuda_supports_op(const ggml_tensor * op, ggml_backend_buffer_type_t device_type, ggml_spec_cuda_card card) {
    card = seen(card);
    if (!sources_are_here(op, device_type)) {
        return false;
    }
    switch (ggml_spec_mode_of(op)) {
        case GGML_SPEC_MODE_CONV_TREE:      return conv_tree_supported(op, card.shared_bytes);
        case GGML_SPEC_MODE_DELTA_NET_TREE: return delta_net_tree_supported(op, card.shared_bytes);
        case GGML_SPEC_MODE_TOP_K:          return top_k_supported(op);
        case GGML_SPEC_MODE_ATTENTION:      return attention_supported(op, card);
        case GGML_SPEC_MODE_BLOCK_CONV:     return block_conv_supported(op);
        case GGML_SPEC_MODE_ADD_RMS_NORM:   return add_rms_norm_supported(op);
        case GGML_SPEC_MODE_GATED_RMS_NORM: return gated_rms_norm_supported(op);
        case GGML_SPEC_MODE_PACKED:
        case GGML_SPEC_MODE_NONE:           break;
    }
    return false;
}

size_t ggml_spec_cuda_alloc_size(const ggml_tensor * op, ggml_spec_cuda_card card) {
    const size_t scratch = scratch_bytes(op, seen(card));
    return scratch == 0 ? ggml_nbytes(op) : scratch_offset(op) + scratch;
}

void ggml_spec_cuda_compute(ggml_tensor * op, ggml_spec_cuda_card card, void * stream_pointer) {
    const cudaStream_t stream  = (cudaStream_t) stream_pointer;
    void *             scratch = (char *) op->data + scratch_offset(op);
    switch (ggml_spec_mode_of(op)) {
        case GGML_SPEC_MODE_CONV_TREE:      conv_tree_launch(op, stream);          break;
        case GGML_SPEC_MODE_DELTA_NET_TREE: delta_net_tree_launch(op, stream);     break;
        case GGML_SPEC_MODE_TOP_K:          top_k_launch(op, scratch, stream);     break;
        case GGML_SPEC_MODE_ATTENTION:      attention_launch(op, seen(card), scratch, stream); break;
        case GGML_SPEC_MODE_BLOCK_CONV:     block_conv_launch(op, stream);         break;
        case GGML_SPEC_MODE_ADD_RMS_NORM:   add_rms_norm_launch(op, stream);       break;
        case GGML_SPEC_MODE_GATED_RMS_NORM: gated_rms_norm_launch(op, stream);     break;
        case GGML_SPEC_MODE_PACKED:
        case GGML_SPEC_MODE_NONE:           break;
    }
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) {
        GGML_ABORT("%s (node '%s') could not be launched: %s", ggml_spec_mode_name(op), op->name, cudaGetErrorString(error));
    }
}
