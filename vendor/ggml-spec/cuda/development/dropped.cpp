// Stands in for upstream kernels that a development build leaves out (cmake/cuda.cmake): flash attention, which says that
// it supports nothing, and quantised products of types that our tests and benchmarks do not use, which abort.

#include "ggml.h"

#include <cstddef>

struct ggml_backend_cuda_context;
struct mmq_args;
struct CUstream_st;

void ggml_cuda_flash_attn_ext(ggml_backend_cuda_context &, ggml_tensor * dst) {
    GGML_ABORT("this development build has no flash attention (node '%s')", dst->name);
}

bool ggml_cuda_flash_attn_ext_supported(int, const ggml_tensor *) {
    return false;
}

size_t ggml_cuda_flash_attn_ext_get_alloc_size(int, const ggml_tensor * dst) {
    return ggml_nbytes(dst);
}

template <ggml_type type, ggml_prec prec>
void mul_mat_q_case(ggml_backend_cuda_context &, const mmq_args &, CUstream_st *) {
    GGML_ABORT("this development build has no quantised product of type %s", ggml_type_name(type));
}

#define DROPPED(type, prec) \
    template void mul_mat_q_case<type, prec>(ggml_backend_cuda_context &, const mmq_args &, CUstream_st *)

DROPPED(GGML_TYPE_Q1_0,    GGML_PREC_Q8);
DROPPED(GGML_TYPE_Q2_0,    GGML_PREC_Q8);
DROPPED(GGML_TYPE_Q2_K,    GGML_PREC_Q8);
DROPPED(GGML_TYPE_Q3_K,    GGML_PREC_Q8);
DROPPED(GGML_TYPE_Q4_1,    GGML_PREC_Q8);
DROPPED(GGML_TYPE_Q5_1,    GGML_PREC_Q8);
DROPPED(GGML_TYPE_IQ1_S,   GGML_PREC_Q8);
DROPPED(GGML_TYPE_IQ2_XXS, GGML_PREC_Q8);
DROPPED(GGML_TYPE_IQ2_XS,  GGML_PREC_Q8);
DROPPED(GGML_TYPE_IQ2_S,   GGML_PREC_Q8);
DROPPED(GGML_TYPE_IQ3_XXS, GGML_PREC_Q8);
DROPPED(GGML_TYPE_IQ3_S,   GGML_PREC_Q8);
DROPPED(GGML_TYPE_MXFP4,   GGML_PREC_Q8);
DROPPED(GGML_TYPE_NVFP4,   GGML_PREC_Q8);
DROPPED(GGML_TYPE_MXFP4,   GGML_PREC_Q4);
DROPPED(GGML_TYPE_NVFP4,   GGML_PREC_Q4);
