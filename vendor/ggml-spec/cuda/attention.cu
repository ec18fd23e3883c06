// Attention over listed KV cells: which kernel, how much scratch space, and the kernel that joins the parts of a row.

#include "attention-fma.cuh"
#include "attention-variants.h"

#include <algorithm>

namespace ggml_spec_cuda {
namespace {

// Where one value of a row's parts lies, and their weights.
struct row_parts {
    const float *    values;
    const weighted * weights;
    int              stride;

    __device__ __forceinline__ void join_to(weighted & so_far, float & value, int part) const {
        const weighted one = weights[part];
        value = joined(value, values[(int64_t) part * stride], join(so_far.largest, so_far.sum, one.largest, one.sum));
    }
};

// Sums of parts relative to one largest score.
struct row_sums {
    float largest, weight, value;

    __device__ __forceinline__ void add(weighted part, float part_value) {
        const float factor = power_of_2(plus(part.largest, -largest));
        weight = madd(part.sum, factor, weight);
        value  = madd(part_value, factor, value);
    }

    // Parts [begin, end), several loads on their way before the first is used.
    __device__ __forceinline__ void add_run(const row_parts & parts, int begin, int end) {
        constexpr int n_ahead = 16;
        for (int first = begin; first < end; first += n_ahead) {
            weighted part[n_ahead];
            float    value[n_ahead];
#pragma unroll
            for (int i = 0; i < n_ahead; i++) {
                const int at = min(first + i, end - 1);
                part[i]      = parts.weights[at];
                value[i]     = parts.values[(int64_t) at * parts.stride];
            }
#pragma unroll
            for (int i = 0; i < n_ahead; i++) {
                if (first + i < end) {
                    add(part[i], value[i]);
                }
            }
        }
    }
};

// A row's splits and tail tiles in list order; a thread a value. Columns beyond the nodes are zero.
template <int D>
__global__ void __launch_bounds__(D) attention_join_kernel(const attention_operands o) {
    __shared__ float of_warp[D / warp_lanes];
    const int node = blockIdx.y, head = blockIdx.x, at = threadIdx.x;
    float *   out  = o.out + ((int64_t) node * o.n_heads + head) * D + at;
    if (node >= o.n_nodes()) {
        *out = 0.0f;
        return;
    }
    if (o.partial == nullptr) {
        return;
    }
    const row_range range   = o.is_tree() ? row_range { o.range[node].x, o.range[node].y } : plain_range(o, node);
    const int       end     = o.shared_end(range.total);
    const int       n_tails = max(0, (range.total - end + tile_keys - 1) / tile_keys);
    // Splits from the first that the row sees: those with shared tiles, and among them those without tail tiles.
    const int       first   = split_of_entry(range.first);
    const int       shared  = end > range.first ? split_of_entry(end - 1) + 1 : first;
    const int       whole   = o.is_tree() ? min(shared, split_of_entry(end)) : shared;
    const row_parts parts   = { o.partial + o.parts(node, head) * D + at, o.weight + o.parts(node, head), D };
    float largest = -INFINITY;
    for (int i = at; i < shared - first + n_tails; i += D) {
        largest = fmaxf(largest, parts.weights[i < shared - first ? first + i : o.n_splits + i - (shared - first)].largest);
    }
    row_sums all = { block_max(largest, of_warp), 0.0f, 0.0f };
    all.add_run(parts, first, whole);
    // A split with tail tiles is put together first, as its block would have done.
    for (int split = max(first, whole); split <= split_of_entry(range.total - 1); split++) {
        const int begin = split_begin(split), next_begin = split_begin(split + 1);
        weighted  one       = { -INFINITY, 0.0f };
        float     one_value = 0.0f;
        if (split < shared) {
            parts.join_to(one, one_value, split);
        }
        for (int tile = max(begin, end); tile < min(range.total, next_begin); tile += tile_keys) {
            parts.join_to(one, one_value, o.n_splits + (tile - end) / tile_keys);
        }
        all.add(one, one_value);
    }
    *out = gated(o, node, head, at, times(all.value, 1.0f / all.weight));
}

constexpr float log2_e = 1.4426950408889634f;

bool is_tree(const ggml_tensor * op) {
    return op->op_params[2] == GGML_SPEC_VISIBLE_ANCESTORS;
}

// A prefill has rows enough to fill the chip without.
bool is_split(const ggml_tensor * op) {
    return op->op_params[2] != GGML_SPEC_VISIBLE_PREFIX;
}

int count_splits(const ggml_tensor * op) {
    return is_split(op) ? split_of_entry((int) (op->src[4]->ne[0] + op->ne[1]) - 1) + 1 : 1;
}

// Tiles that a branch can reach beyond the last whole tile of committed cells.
int count_tails(const ggml_tensor * op) {
    return is_tree(op) ? (int) (tile_keys - 1 + op->ne[1] + tile_keys - 1) / tile_keys : 0;
}

size_t count_parts(const ggml_tensor * op) {
    return (size_t) op->ne[1] * op->src[0]->ne[1] * (count_splits(op) + count_tails(op));
}

size_t partial_bytes(const ggml_tensor * op) {
    return count_parts(op) * op->src[0]->ne[0] * sizeof(float);
}

int heads_per_kv(const ggml_tensor * op) {
    return (int) (op->src[0]->ne[1] * op->src[0]->ne[0] / op->src[1]->ne[0]);
}

const cell_type * find_cell_type(const ggml_tensor * t) {
    static constexpr ggml_type types[] = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 };
    static constexpr cell_type cells[] = { cell_f32, cell_f16, cell_q8_0, cell_q4_0 };
    for (int i = 0; i < 4; i++) {
        if (t->type == types[i]) {
            return &cells[i];
        }
    }
    return nullptr;
}

int device_attribute(cudaDeviceAttr attribute) {
    int device = 0, value = 0;
    (void) cudaGetDevice(&device);
    (void) cudaDeviceGetAttribute(&value, attribute, device);
    return value;
}

bool use_matrix_units([[maybe_unused]] const ggml_tensor * op) {
#if defined(__HIPCC__)
    return false;
#else
    const cell_type k = *find_cell_type(op->src[1]), v = *find_cell_type(op->src[2]);
    const bool      has_variant = k != cell_f32 && v != cell_f32 && (k == cell_f16) == (v == cell_f16);
    return has_variant && device_attribute(cudaDevAttrComputeCapabilityMajor) >= 8;
#endif
}

cells cells_of(const ggml_tensor * t) {
    return { (const char *) t->data, (int64_t) t->nb[1], *find_cell_type(t) };
}

attention_operands read_operands(ggml_tensor * op, void * scratch) {
    const ggml_tensor * q    = op->src[0];
    const ggml_tensor * gate = op->src[5];
    attention_operands o = {};
    o.q          = strided_view(q);
    o.gate       = gate ? strided_view(gate) : strided {};
    o.k          = cells_of(op->src[1]);
    o.v          = cells_of(op->src[2]);
    o.nodes      = (const int32_t *) op->src[3]->data;
    o.committed  = (const int32_t *) op->src[4]->data;
    o.out        = (float *) op->data;
    o.n_heads    = (int) q->ne[1];
    o.n_heads_kv = o.n_heads / heads_per_kv(op);
    o.n_columns  = (int) q->ne[2];
    o.n_list     = (int) op->src[4]->ne[0];
    o.n_splits   = count_splits(op);
    o.n_tails    = count_tails(op);
    o.window     = op->op_params[1];
    o.visibility = op->op_params[2];
    memcpy(&o.scale, &op->op_params[0], sizeof(float));
    o.scale *= log2_e;
    if (is_split(op)) {
        o.partial = (float *) scratch;
        o.weight  = (weighted *) ((char *) scratch + partial_bytes(op));
        o.range   = (int2 *) (o.weight + count_parts(op));
    }
    return o;
}

template <int D>
void launch(const attention_operands & o, bool by_matrix_units, size_t shared_bytes, cudaStream_t stream) {
    if (!by_matrix_units) {
        launch_attention_fma<D>(o, shared_bytes, stream);
    }
#if !defined(__HIPCC__)
    else if (o.k.type == cell_f16) {
        launch_attention_f16<D>(o, shared_bytes, stream);
    } else {
        launch_attention_blocks<D>(o, shared_bytes, stream);
    }
#endif
    attention_join_kernel<D><<<dim3(o.n_heads, o.n_columns), D, 0, stream>>>(o);
}

// Cards with matrix units have more than 64 KB of shared memory a block, and their variants come in one size.
template <int D>
bool fits(int64_t n_columns, size_t shared_bytes) {
    const size_t scales = 8 * 1024;  // the smallest variant for matrix units needs no more than these besides
    const size_t whole  = attention_block_bytes<fma_whole<D>>((int) n_columns);
    const size_t least  = attention_block_bytes<fma_least<D>>((int) n_columns);
    return whole + scales <= shared_bytes || (shared_bytes <= 64 * 1024 && least + attention_static_bytes <= shared_bytes);
}

}  // namespace

bool attention_supported(const ggml_tensor * op, size_t shared_bytes) {
    const int64_t D = op->src[0]->ne[0], n_columns = op->ne[1];
    if ((D != 64 && D != 128 && D != 256) || n_columns > 65535 || !find_cell_type(op->src[1]) || !find_cell_type(op->src[2])) {
        return false;
    }
    return D == 64  ? fits<64>(n_columns, shared_bytes) :
           D == 128 ? fits<128>(n_columns, shared_bytes) : fits<256>(n_columns, shared_bytes);
}

size_t attention_scratch_bytes(const ggml_tensor * op) {
    return is_split(op) ? partial_bytes(op) + count_parts(op) * sizeof(weighted) + op->ne[1] * sizeof(int2) : 0;
}

void attention_launch(ggml_tensor * op, void * scratch, cudaStream_t stream) {
    const attention_operands o      = read_operands(op, scratch);
    const bool               by_mma = use_matrix_units(op);
    const size_t             shared = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    switch (op->src[0]->ne[0]) {
        case 64:  launch<64>(o, by_mma, shared, stream);  break;
        case 128: launch<128>(o, by_mma, shared, stream); break;
        case 256: launch<256>(o, by_mma, shared, stream); break;
    }
}

}  // namespace ggml_spec_cuda
