// Fused norms: one block a row of the residual stream, one warp a gated head. Values stay in registers between the sum of
// squares and the result. Which thread adds what in which order follows from a row's length alone, so its bits depend
// neither on the other rows nor on how the operands lie in memory.
#include "spec-device.cuh"

namespace ggml_spec_cuda {
namespace {

constexpr int vectors_max = 4;  // of four neighbouring values, held by one thread
constexpr int threads_max = 1024;
constexpr int head_warps  = 4;

// A row in global memory as vectors; zeros stand for what lies beyond its end. Loads of 16 bytes where `aligned`.
template <bool aligned>
struct vectors_of {
    static __device__ __forceinline__ float4 load(const float * row, int n, int i) {
        const float * x = row + 4 * i;
        if (aligned) {
            return 4 * i < n ? *(const float4 *) x : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        return make_float4(4 * i < n ? x[0] : 0.0f, 4 * i + 1 < n ? x[1] : 0.0f, 4 * i + 2 < n ? x[2] : 0.0f,
                           4 * i + 3 < n ? x[3] : 0.0f);
    }

    static __device__ __forceinline__ void store(float * row, int n, int i, float4 v) {
        float * y = row + 4 * i;
        if (aligned) {
            if (4 * i < n) {
                *(float4 *) y = v;
            }
            return;
        }
        const float values[4] = { v.x, v.y, v.z, v.w };
        for (int j = 0; j < 4 && 4 * i + j < n; j++) {
            y[j] = values[j];
        }
    }
};

__device__ __forceinline__ float4 plus4(float4 a, float4 b) {
    return make_float4(plus(a.x, b.x), plus(a.y, b.y), plus(a.z, b.z), plus(a.w, b.w));
}

__device__ __forceinline__ float4 times4(float4 a, float4 b) {
    return make_float4(times(a.x, b.x), times(a.y, b.y), times(a.z, b.z), times(a.w, b.w));
}

__device__ __forceinline__ float4 scaled4(float4 a, float b) {
    return times4(a, make_float4(b, b, b, b));
}

__device__ __forceinline__ float add_squares(float sum, float4 v) {
    return madd(v.w, v.w, madd(v.z, v.z, madd(v.y, v.y, madd(v.x, v.x, sum))));
}

__device__ __forceinline__ float inverse_rms(float square_sum, int n, float eps) {
    return 1.0f / sqrtf(plus(square_sum / (float) n, eps));
}

__device__ __forceinline__ float silu(float x) {
    return x / plus(1.0f, expf(-x));
}

__device__ __forceinline__ float4 silu4(float4 v) {
    return make_float4(silu(v.x), silu(v.y), silu(v.z), silu(v.w));
}

// Sum over the block, the same bits in every thread. For one call a kernel.
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float warp_sums[warp_lanes];
    const int lane    = threadIdx.x % warp_lanes;
    const int n_warps = blockDim.x / warp_lanes;
    x = lanes_sum<warp_lanes>(x);
    if (lane == 0) {
        warp_sums[threadIdx.x / warp_lanes] = x;
    }
    __syncthreads();
    return lanes_sum<warp_lanes>(lane < n_warps ? warp_sums[lane] : 0.0f);
}

struct norm_operands {
    strided       x;      // the first term of the sum, or the heads
    strided       other;  // the second term, or the gate
    const float * weight;
    float *       out;
    int           n;      // values that one mean is of
    int           n_heads;
    int64_t       n_rows;
    float         eps;
};

template <int vectors, bool aligned>
__global__ void __launch_bounds__(threads_max) add_rms_norm_kernel(const norm_operands o) {
    using row_vectors = vectors_of<aligned>;
    const int64_t row = blockIdx.x;
    float4        sum[vectors], weight[vectors];
    float         square_sum = 0.0f;
#pragma unroll
    for (int v = 0; v < vectors; v++) {
        const int i = v * blockDim.x + threadIdx.x;
        sum[v]    = plus4(row_vectors::load(o.x.row(row), o.n, i), row_vectors::load(o.other.row(row), o.n, i));
        weight[v] = row_vectors::load(o.weight, o.n, i);
    }
#pragma unroll
    for (int v = 0; v < vectors; v++) {
        row_vectors::store(o.out + row * o.n, o.n, v * blockDim.x + threadIdx.x, sum[v]);
        square_sum = add_squares(square_sum, sum[v]);
    }
    const float scale = inverse_rms(block_sum(square_sum), o.n, o.eps);
#pragma unroll
    for (int v = 0; v < vectors; v++) {
        const float4 normed = times4(scaled4(sum[v], scale), weight[v]);
        row_vectors::store(o.out + (o.n_rows + row) * o.n, o.n, v * blockDim.x + threadIdx.x, normed);
    }
}

template <int vectors, bool aligned>
__global__ void __launch_bounds__(head_warps * warp_lanes) gated_rms_norm_kernel(const norm_operands o) {
    using head_vectors = vectors_of<aligned>;
    const int64_t unit = (int64_t) blockIdx.x * head_warps + threadIdx.y;
    const int64_t row  = unit / o.n_heads;
    if (row >= o.n_rows) {
        return;
    }
    const int64_t first = unit % o.n_heads * o.n;
    float4        x[vectors], factor[vectors];
    float         square_sum = 0.0f;
#pragma unroll
    for (int v = 0; v < vectors; v++) {
        const int i = v * warp_lanes + threadIdx.x;
        x[v]       = head_vectors::load(o.x.row(row) + first, o.n, i);
        factor[v]  = times4(head_vectors::load(o.weight, o.n, i), silu4(head_vectors::load(o.other.row(row) + first, o.n, i)));
        square_sum = add_squares(square_sum, x[v]);
    }
    const float scale = inverse_rms(lanes_sum<warp_lanes>(square_sum), o.n, o.eps);
    float *     y     = o.out + unit * o.n;
#pragma unroll
    for (int v = 0; v < vectors; v++) {
        head_vectors::store(y, o.n, v * warp_lanes + threadIdx.x, times4(scaled4(x[v], scale), factor[v]));
    }
}

bool is_aligned(const ggml_tensor * t) {
    return (uintptr_t) t->data % sizeof(float4) == 0 && t->nb[1] % sizeof(float4) == 0;
}

norm_operands read_operands(const ggml_tensor * op, const ggml_tensor * other, const ggml_tensor * weight) {
    return {
        strided_view(op->src[0]),
        strided_view(other),
        (const float *) weight->data,
        (float *) op->data,
        (int) weight->ne[0],
        (int) (op->ne[0] / weight->ne[0]),
        op->ne[1],
        ggml_spec_eps(op),
    };
}

bool all_aligned(const ggml_tensor * op, int n) {
    return n % 4 == 0 && is_aligned(op) && is_aligned(op->src[0]) && is_aligned(op->src[1]) && is_aligned(op->src[2]);
}

template <int vectors>
void launch_add_rms_norm(const norm_operands & o, int n_threads, bool aligned, cudaStream_t stream) {
    if (aligned) {
        add_rms_norm_kernel<vectors, true><<<(unsigned) o.n_rows, n_threads, 0, stream>>>(o);
    } else {
        add_rms_norm_kernel<vectors, false><<<(unsigned) o.n_rows, n_threads, 0, stream>>>(o);
    }
}

template <int vectors>
void launch_gated_rms_norm(const norm_operands & o, bool aligned, cudaStream_t stream) {
    const dim3     block(warp_lanes, head_warps);
    const unsigned n_blocks = (unsigned) ((o.n_rows * o.n_heads + head_warps - 1) / head_warps);
    if (aligned) {
        gated_rms_norm_kernel<vectors, true><<<n_blocks, block, 0, stream>>>(o);
    } else {
        gated_rms_norm_kernel<vectors, false><<<n_blocks, block, 0, stream>>>(o);
    }
}

// How many vectors each of at most n_threads must hold for a row of n values, a power of two.
int64_t vectors_needed(int64_t n, int64_t n_threads) {
    int64_t vectors = 1;
    while (4 * vectors * n_threads < n) {
        vectors *= 2;
    }
    return vectors;
}

}  // namespace

bool add_rms_norm_supported(const ggml_tensor * op) {
    return vectors_needed(op->ne[0], threads_max) <= vectors_max && op->ne[1] <= INT32_MAX;
}

void add_rms_norm_launch(ggml_tensor * op, cudaStream_t stream) {
    const norm_operands o         = read_operands(op, op->src[1], op->src[2]);
    const bool          aligned   = all_aligned(op, o.n);
    const int           vectors   = (int) vectors_needed(o.n, threads_max);
    const int           n_threads = GGML_PAD((o.n + 4 * vectors - 1) / (4 * vectors), warp_lanes);
    switch (vectors) {
        case 1: launch_add_rms_norm<1>(o, n_threads, aligned, stream); break;
        case 2: launch_add_rms_norm<2>(o, n_threads, aligned, stream); break;
        case 4: launch_add_rms_norm<4>(o, n_threads, aligned, stream); break;
    }
}

bool gated_rms_norm_supported(const ggml_tensor * op) {
    return vectors_needed(op->src[1]->ne[0], warp_lanes) <= vectors_max && ggml_nelements(op) <= INT32_MAX;
}

void gated_rms_norm_launch(ggml_tensor * op, cudaStream_t stream) {
    const norm_operands o       = read_operands(op, op->src[2], op->src[1]);
    const bool          aligned = all_aligned(op, o.n);
    switch (vectors_needed(o.n, warp_lanes)) {
        case 1: launch_gated_rms_norm<1>(o, aligned, stream); break;
        case 2: launch_gated_rms_norm<2>(o, aligned, stream); break;
        case 4: launch_gated_rms_norm<4>(o, aligned, stream); break;
    }
}

}  // namespace ggml_spec_cuda
