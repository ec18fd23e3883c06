// Instructions of NVIDIA's matrix units and asynchronous copies (compute capability 8.0), as functions of one warp.
#pragma once

#include "spec-device.cuh"

namespace ggml_spec_cuda {
namespace {

// Launches ask the card first, so code for older ones only has to compile.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define SPEC_HAS_MATRIX_UNITS
#endif

__device__ __forceinline__ unsigned shared_address(const void * shared) {
    return (unsigned) __cvta_generic_to_shared(shared);
}

// Four 8 x 8 matrices of halves from shared memory; lane i names row i % 8 of matrix i / 8. A register holds two halves:
// of row lane / 4, columns lane % 4 * 2 and the next; transposed: of column lane / 4, rows lane % 4 * 2 and the next.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

// c += a b: a 16 x 16 (row by row), b 16 x 8 (column by column), c 16 x 8 in f32. c[0], c[1] belong to row lane / 4,
// columns lane % 4 * 2 and the next; c[2], c[3] to the row 8 below.
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef SPEC_HAS_MATRIX_UNITS
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// 16 bytes from device memory to shared memory, on its own, or 16 zero bytes; a group is what is committed together.
__device__ __forceinline__ void copy_async(unsigned shared, const void * global, bool or_zeros) {
#ifdef SPEC_HAS_MATRIX_UNITS
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared), "l"(global), "r"(or_zeros ? 0 : 16));
#endif
}

__device__ __forceinline__ void commit_copies() {
#ifdef SPEC_HAS_MATRIX_UNITS
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until all groups but the newest n have arrived, for this thread's copies.
template <int n>
__device__ __forceinline__ void wait_copies_but() {
#ifdef SPEC_HAS_MATRIX_UNITS
    asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory");
#endif
}

// Barrier of some warps of a block; barrier 0 is that of all.
__device__ __forceinline__ void warps_barrier(int number, int n_threads) {
    asm volatile("bar.sync %0, %1;" :: "r"(number), "r"(n_threads) : "memory");
}

// Two values rounded to halves, the first in the low one.
__device__ __forceinline__ uint32_t pack_rounded(float low, float high) {
    union { __half2 halves; uint32_t word; } packed;
    packed.halves = __floats2half2_rn(low, high);
    return packed.word;
}

}  // namespace
}  // namespace ggml_spec_cuda
