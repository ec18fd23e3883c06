// What the kernels share: the runtime's names, the schedule as device data, and arithmetic with one meaning everywhere.
#pragma once

#if defined(__HIPCC__)
#include <hip/hip_runtime.h>
#include <hip/hip_fp16.h>
#define cudaStream_t                hipStream_t
#define cudaError_t                 hipError_t
#define cudaSuccess                 hipSuccess
#define cudaGetLastError            hipGetLastError
#define cudaGetErrorString          hipGetErrorString
#define cudaFuncSetAttribute(f, a, v) hipFuncSetAttribute((const void *) (f), a, v)
#define cudaFuncAttributeMaxDynamicSharedMemorySize hipFuncAttributeMaxDynamicSharedMemorySize
#define __shfl_xor_sync(mask, value, lane_mask) __shfl_xor(value, lane_mask, 32)
// A warp runs in step, so only the compiler has to keep accesses on their side.
#define __syncwarp() (__builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront"), __builtin_amdgcn_wave_barrier(), \
                      __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront"))
#else
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

#include "ggml-spec-impl.h"
#include "spec-cuda.h"

#include <cstdint>

namespace ggml_spec_cuda {

constexpr int warp_lanes = 32;

// Shared memory that a block may have without asking for more.
constexpr size_t shared_bytes_plain = 48 * 1024;

// --- arithmetic: spelled out, so that a compiler cannot fuse the same expression differently in two places ---------------

__device__ __forceinline__ float madd(float a, float b, float c) {
    return fmaf(a, b, c);
}

#if defined(__HIPCC__)
// HIP's functions of these names are plain operators, which its compiler fuses.
__device__ __forceinline__ float times(float a, float b) {
#pragma clang fp contract(off)
    return a * b;
}

__device__ __forceinline__ float plus(float a, float b) {
#pragma clang fp contract(off)
    return a + b;
}
#else
__device__ __forceinline__ float times(float a, float b) {
    return __fmul_rn(a, b);
}

__device__ __forceinline__ float plus(float a, float b) {
    return __fadd_rn(a, b);
}
#endif

// 2 to the power of x, by the card's own unit: the same bits wherever it is used, within 2 roundings of f32.
__device__ __forceinline__ float power_of_2(float x) {
#if defined(__HIPCC__)
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// Sum over `lanes` neighbouring threads, the same bits in each of them.
template <int lanes>
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
    for (int step = lanes / 2; step > 0; step /= 2) {
        x = plus(x, __shfl_xor_sync(0xffffffff, x, step));
    }
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = warp_lanes / 2; step > 0; step /= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step));
    }
    return x;
}

// Largest of all threads of a block of `n_warps` warps; `shared` is not used for anything else in the kernel.
template <int n_warps>
__device__ __forceinline__ float block_max(float x, float (&shared)[n_warps]) {
    x = warp_max(x);
    if (threadIdx.x % warp_lanes == 0) {
        shared[threadIdx.x / warp_lanes] = x;
    }
    __syncthreads();
    x = shared[0];
#pragma unroll
    for (int i = 1; i < n_warps; i++) {
        x = fmaxf(x, shared[i]);
    }
    return x;
}

// --- tensors and the schedule --------------------------------------------------------------------------------------------

// A f32 matrix or stack of matrices whose rows are contiguous; strides in bytes.
struct strided {
    const char * data;
    int64_t      nb1;
    int64_t      nb2;

    __device__ __forceinline__ const float * row(int64_t i1, int64_t i2 = 0) const {
        return (const float *) (data + i1 * nb1 + i2 * nb2);
    }

    // Whether every row may be read 16 bytes at a time.
    __device__ __forceinline__ bool is_aligned() const { return (((uintptr_t) data | nb1 | nb2) & 15) == 0; }
};

inline strided strided_view(const ggml_tensor * t) {
    return { (const char *) t->data, (int64_t) t->nb[1], (int64_t) t->nb[2] };
}

// The words of ggml-spec.h; the host has validated them.
struct schedule {
    const int32_t * words;
    int             n_columns;

    __device__ __forceinline__ int n_nodes()      const { return words[GGML_SPEC_SCHED_WORD_N_NODES]; }
    __device__ __forceinline__ int n_pending()    const { return words[GGML_SPEC_SCHED_WORD_N_PENDING]; }
    __device__ __forceinline__ int pending_bank() const { return words[GGML_SPEC_SCHED_WORD_PENDING_BANK]; }
    __device__ __forceinline__ int write_bank()   const { return words[GGML_SPEC_SCHED_WORD_WRITE_BANK]; }
    __device__ __forceinline__ int state_slot()   const { return words[GGML_SPEC_SCHED_WORD_STATE_SLOT]; }
    __device__ __forceinline__ bool fold()        const { return words[GGML_SPEC_SCHED_WORD_FOLD] != 0; }

    // Visit i: node, parent, restore level, save level.
    __device__ __forceinline__ const int32_t * visit(int i) const {
        return words + GGML_SPEC_SCHED_HEADER + GGML_SPEC_SCHED_NODE_WORDS * i;
    }

    __device__ __forceinline__ int pending_row(int i) const {
        return words[GGML_SPEC_SCHED_HEADER + GGML_SPEC_SCHED_NODE_WORDS * n_columns + i];
    }
};

// --- launches ------------------------------------------------------------------------------------------------------------

// A kernel's dynamic shared memory beyond what every block may have.
template <typename Kernel>
void allow_shared_bytes(Kernel kernel, size_t n_bytes) {
    if (n_bytes > shared_bytes_plain) {
        (void) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int) n_bytes);
    }
}

// One operation's face to the dispatcher.
bool   conv_tree_supported(const ggml_tensor * op, size_t shared_bytes);
void   conv_tree_launch(ggml_tensor * op, cudaStream_t stream);

bool   delta_net_tree_supported(const ggml_tensor * op, size_t shared_bytes);
void   delta_net_tree_launch(ggml_tensor * op, cudaStream_t stream);

bool   attention_supported(const ggml_tensor * op, const ggml_spec_cuda_card & card);
size_t attention_scratch_bytes(const ggml_tensor * op, const ggml_spec_cuda_card & card);
void   attention_launch(ggml_tensor * op, const ggml_spec_cuda_card & card, void * scratch, cudaStream_t stream);

bool   block_conv_supported(const ggml_tensor * op);
void   block_conv_launch(ggml_tensor * op, cudaStream_t stream);

bool   add_rms_norm_supported(const ggml_tensor * op);
void   add_rms_norm_launch(ggml_tensor * op, cudaStream_t stream);

bool   gated_rms_norm_supported(const ggml_tensor * op);
void   gated_rms_norm_launch(ggml_tensor * op, cudaStream_t stream);

bool   top_k_supported(const ggml_tensor * op);
size_t top_k_scratch_bytes(const ggml_tensor * op);
void   top_k_launch(ggml_tensor * op, void * scratch, cudaStream_t stream);

}  // namespace ggml_spec_cuda
