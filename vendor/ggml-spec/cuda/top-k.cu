// The k largest values of each row, in exact order, with the row's log-normaliser.
//
// A value and its id make one 64-bit key whose order is the order wanted: numbers above NaN, larger values first, lower
// ids first. Blocks find the k best keys of a piece of a row, k rounds of "the largest left"; one more block a row merges
// the pieces, whose lists are sorted. Pieces are cut by the row's length alone.

#include "spec-device.cuh"

#include <algorithm>

namespace ggml_spec_cuda {
namespace {

using key_t = unsigned long long;

constexpr int block_threads = 256;
constexpr int block_warps   = block_threads / warp_lanes;
constexpr int thread_values = 16;
constexpr int piece         = block_threads * thread_values;
constexpr int pieces_max    = block_threads;  // a thread of the merge holds one list

__device__ __forceinline__ key_t make_key(float value, int id) {
    if (isnan(value)) {
        return (unsigned) ~id;
    }
    const unsigned bits    = __float_as_uint(plus(value, 0.0f));  // -0 and 0 are equal
    const unsigned ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (key_t) ordered << 32 | (unsigned) ~id;
}

__device__ __forceinline__ int key_id(key_t key) {
    return (int) ~(unsigned) key;
}

__device__ __forceinline__ key_t larger(key_t a, key_t b) {
    return a > b ? a : b;
}

// The largest key of the block, in every thread. `shared` takes one key a warp; the caller alternates between two.
__device__ __forceinline__ key_t block_largest(key_t key, key_t * shared) {
#pragma unroll
    for (int step = warp_lanes / 2; step > 0; step /= 2) {
        key = larger(key, __shfl_xor_sync(0xffffffff, key, step));
    }
    if (threadIdx.x % warp_lanes == 0) {
        shared[threadIdx.x / warp_lanes] = key;
    }
    __syncthreads();
    key = shared[threadIdx.x % block_warps];
#pragma unroll
    for (int step = block_warps / 2; step > 0; step /= 2) {
        key = larger(key, __shfl_xor_sync(0xffffffff, key, step));
    }
    return key;
}

struct block_shared {
    key_t keys[2][block_warps];
    float floats[2][block_warps];
};

__device__ __forceinline__ float block_sum(float x, float * shared) {
    x = lanes_sum<warp_lanes>(x);
    if (threadIdx.x % warp_lanes == 0) {
        shared[threadIdx.x / warp_lanes] = x;
    }
    __syncthreads();
    x = shared[0];
#pragma unroll
    for (int i = 1; i < block_warps; i++) {
        x = plus(x, shared[i]);
    }
    return x;
}

struct top_k_operands {
    const char * logits;
    int64_t      nb1;
    int          n_values, n_pieces, k;
    bool         logprobs;
    key_t *      keys;  // [n_rows][n_pieces][k], each list sorted
    float2 *     sums;  // [n_rows][n_pieces]: largest value m, sum of exp(value - m)
    int32_t *    out;   // [2 * k, n_rows]
};

__global__ void __launch_bounds__(block_threads) top_k_pieces_kernel(const top_k_operands o) {
    __shared__ block_shared shared;
    const int     row   = blockIdx.y;
    const int     begin = blockIdx.x * piece;
    const float * x     = (const float *) (o.logits + row * o.nb1);

    float values[thread_values];
    key_t keys[thread_values];
    key_t best    = 0;
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < thread_values; i++) {
        const int  id     = begin + i * block_threads + threadIdx.x;
        const bool exists = id < o.n_values;
        values[i] = exists ? x[id] : -INFINITY;
        keys[i]   = exists ? make_key(values[i], id) : 0;
        best      = larger(best, keys[i]);
        largest   = fmaxf(largest, values[i]);
    }
    key_t * list = o.keys + ((int64_t) row * o.n_pieces + blockIdx.x) * o.k;
    for (int round = 0; round < o.k; round++) {
        const key_t winner = block_largest(best, shared.keys[round & 1]);
        if (threadIdx.x == 0) {
            list[round] = winner;
        }
        if (winner == best) {  // keys differ, so it is this thread's; 0 where the piece is used up
            best = 0;
#pragma unroll
            for (int i = 0; i < thread_values; i++) {
                keys[i] = keys[i] == winner ? 0 : keys[i];
                best    = larger(best, keys[i]);
            }
        }
    }
    if (!o.logprobs) {
        return;
    }
    largest = block_max(largest, shared.floats[0]);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < thread_values; i++) {
        sum = plus(sum, values[i] == -INFINITY ? 0.0f : expf(values[i] - largest));
    }
    sum = block_sum(sum, shared.floats[1]);
    if (threadIdx.x == 0) {
        o.sums[(int64_t) row * o.n_pieces + blockIdx.x] = make_float2(largest, sum);
    }
}

__device__ float log_normaliser(const top_k_operands & o, int row, block_shared & shared) {
    float2 part = make_float2(-INFINITY, 0.0f);
    if ((int) threadIdx.x < o.n_pieces) {
        part = o.sums[(int64_t) row * o.n_pieces + threadIdx.x];
    }
    const float largest = block_max(part.x, shared.floats[0]);
    const float sum     = block_sum(part.x == -INFINITY ? 0.0f : times(part.y, expf(part.x - largest)), shared.floats[1]);
    return plus(largest, logf(sum));
}

__global__ void __launch_bounds__(block_threads) top_k_merge_kernel(const top_k_operands o) {
    extern __shared__ key_t lists[];  // [n_pieces][k]
    __shared__ block_shared shared;
    const int     row = blockIdx.x;
    const float * x   = (const float *) (o.logits + row * o.nb1);
    for (int i = threadIdx.x; i < o.n_pieces * o.k; i += block_threads) {
        lists[i] = o.keys[(int64_t) row * o.n_pieces * o.k + i];
    }
    const float normaliser = o.logprobs ? log_normaliser(o, row, shared) : 0.0f;
    __syncthreads();

    const key_t * list = lists + threadIdx.x * o.k;
    int32_t *     out  = o.out + (int64_t) row * 2 * o.k;
    int           at   = 0;
    key_t         head = (int) threadIdx.x < o.n_pieces ? list[0] : 0;
    for (int round = 0; round < o.k; round++) {
        const key_t winner = block_largest(head, shared.keys[round & 1]);
        if (winner == head && head != 0) {
            const int id = key_id(winner);
            out[round]       = id;
            out[o.k + round] = __float_as_int(o.logprobs ? plus(x[id], -normaliser) : x[id]);
            head = ++at < o.k ? list[at] : 0;
        }
    }
}

int n_pieces(const ggml_tensor * op) {
    return (int) ((op->src[0]->ne[0] + piece - 1) / piece);
}

size_t keys_bytes(const ggml_tensor * op) {
    return GGML_PAD((size_t) op->ne[1] * n_pieces(op) * (op->ne[0] / 2) * sizeof(key_t), 256);
}

}  // namespace

bool top_k_supported(const ggml_tensor * op) {
    return n_pieces(op) <= pieces_max && op->ne[1] <= 65535;
}

size_t top_k_scratch_bytes(const ggml_tensor * op) {
    return keys_bytes(op) + (size_t) op->ne[1] * n_pieces(op) * sizeof(float2);
}

void top_k_launch(ggml_tensor * op, void * scratch, cudaStream_t stream) {
    const ggml_tensor * logits = op->src[0];
    const top_k_operands o = {
        (const char *) logits->data,
        (int64_t) logits->nb[1],
        (int) logits->ne[0],
        n_pieces(op),
        (int) op->ne[0] / 2,
        (ggml_spec_flags(op) & GGML_SPEC_FLAG_LOGPROBS) != 0,
        (key_t *) scratch,
        (float2 *) ((char *) scratch + keys_bytes(op)),
        (int32_t *) op->data,
    };
    top_k_pieces_kernel<<<dim3(o.n_pieces, (unsigned) op->ne[1]), block_threads, 0, stream>>>(o);
    top_k_merge_kernel<<<(unsigned) op->ne[1], block_threads, o.n_pieces * o.k * sizeof(key_t), stream>>>(o);
}

}  // namespace ggml_spec_cuda
