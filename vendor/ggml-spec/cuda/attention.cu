// Attention over listed KV cells: which kernel, how much scratch space, and the kernel that joins the parts of a row.

#include "attention-fma.cuh"
#include "attention-variants.h"

#include <algorithm>

namespace ggml_spec_cuda {
namespace {

// Where four values of a row's parts lie, and the parts' weights.
struct row_parts {
    const float *    values;
    const weighted * weights;
    int              stride;

    __device__ __forceinline__ float4 value(int part) const { return *(const float4 *) (values + (int64_t) part * stride); }

    __device__ __forceinline__ void join_to(weighted & so_far, float4 & sum, int part) const {
        const weighted     one = weights[part];
        const float4       v   = value(part);
        const join_factors f   = join(so_far.largest, so_far.sum, one.largest, one.sum);
        sum = joined(sum, v, f);
    }
};

// Sums of parts relative to one largest score.
struct row_sums {
    float  weight;
    float4 value;

    __device__ __forceinline__ void add(weighted part, float4 v, float largest) {
        const float factor = power_of_2(plus(part.largest, -largest));
        weight = madd(part.sum, factor, weight);
        value  = make_float4(madd(v.x, factor, value.x), madd(v.y, factor, value.y),
                             madd(v.z, factor, value.z), madd(v.w, factor, value.w));
    }

    __device__ __forceinline__ void add(const row_sums & other) {
        weight = plus(weight, other.weight);
        value  = make_float4(plus(value.x, other.value.x), plus(value.y, other.value.y),
                             plus(value.z, other.value.z), plus(value.w, other.value.w));
    }
};

constexpr int join_runs = 4;  // split i belongs to run i % 4; runs are summed side by side

// Splits begin, begin + join_runs, .. below end, several loads on their way before the first is used.
__device__ __forceinline__ void add_run(row_sums & sums, const row_parts & parts, const attention_operands & o, int begin, int end,
                                        float largest) {
    constexpr int n_ahead = 8;
    for (int first = begin; first < end; first += n_ahead * join_runs) {
        weighted part[n_ahead];
        float4   value[n_ahead];
#pragma unroll
        for (int i = 0; i < n_ahead; i++) {
            const int at = o.split_place(min(first + i * join_runs, end - 1));
            part[i]      = parts.weights[at];
            value[i]     = parts.value(at);
        }
#pragma unroll
        for (int i = 0; i < n_ahead; i++) {
            if (first + i * join_runs < end) {
                sums.add(part[i], value[i], largest);
            }
        }
    }
}

// A row's splits and tail tiles in list order; a thread four values of a run. Columns beyond the nodes are zero.
template <int D>
__global__ void __launch_bounds__(D) attention_join_kernel(const attention_operands o) {
    __shared__ float    of_warp[D / warp_lanes];
    __shared__ row_sums of_run[join_runs][D / 4];
    const int node = blockIdx.y, head = blockIdx.x;
    const int run = threadIdx.x / (D / 4), at = threadIdx.x % (D / 4) * 4;
    float *   out  = o.out + ((int64_t) node * o.n_heads + head) * D;
    if (node >= o.n_nodes()) {
        out[threadIdx.x] = 0.0f;
        return;
    }
    if (o.partial == nullptr) {
        return;
    }
    const row_range range   = o.is_tree() ? row_range { o.range[node].x, o.range[node].y } : plain_range(o, node);
    const int       end     = o.shared_end(range.total);
    const int       n_tails = max(0, (range.total - end + tile_keys - 1) / tile_keys);
    // Splits from the first that the row sees: those with shared tiles, and among them those without tail tiles.
    const int       length  = o.split_length(range.total);
    const int       first   = range.first / length;
    const int       shared  = end > range.first ? (end - 1) / length + 1 : first;
    const int       whole   = o.is_tree() ? min(shared, end / length) : shared;
    const row_parts parts   = { o.partial + o.parts(node, head) * D + at, o.weight + o.parts(node, head), D };
    float largest = -INFINITY;
    for (int i = threadIdx.x; i < shared - first + n_tails; i += D) {
        largest = fmaxf(largest, parts.weights[i < shared - first ? o.split_place(first + i) : o.n_splits + i - (shared - first)].largest);
    }
    largest = block_max(largest, of_warp);
    const int first_of_run = first + (run - first % join_runs + join_runs) % join_runs;
    row_sums  sums = {};
    add_run(sums, parts, o, first_of_run, whole, largest);
    // A split with tail tiles is put together first, as its block would have done.
    for (int split = max(first, whole); split <= (range.total - 1) / length; split++) {
        if (split % join_runs != run) {
            continue;
        }
        const int begin = split * length;
        weighted  one       = { -INFINITY, 0.0f };
        float4    one_value = {};
        if (split < shared) {
            parts.join_to(one, one_value, o.split_place(split));
        }
        for (int tile = max(begin, end); tile < min(range.total, begin + length); tile += tile_keys) {
            parts.join_to(one, one_value, o.n_splits + (tile - end) / tile_keys);
        }
        sums.add(one, one_value, largest);
    }
    of_run[run][at / 4] = sums;
    __syncthreads();
    if (run == 0) {
#pragma unroll
        for (int i = 1; i < join_runs; i++) {
            sums.add(of_run[i][at / 4]);
        }
        *(float4 *) (out + at) = gated(o, node, head, at, times(sums.value, 1.0f / sums.weight));
    }
}

constexpr float log2_e = 1.4426950408889634f;

bool is_tree(const ggml_tensor * op) {
    return op->op_params[2] == GGML_SPEC_VISIBLE_ANCESTORS;
}

// A prefill has rows enough to fill the chip without.
bool is_split(const ggml_tensor * op) {
    return op->op_params[2] != GGML_SPEC_VISIBLE_PREFIX;
}

int heads_per_kv(const ggml_tensor * op) {
    return (int) (op->src[0]->ne[1] * op->src[0]->ne[0] / op->src[1]->ne[0]);
}

int count_kv_heads(const ggml_tensor * op) {
    return (int) op->src[0]->ne[1] / heads_per_kv(op);
}

// A split for every multiprocessor: more of them wait for each other, and each costs a part to write and to join.
int most_splits(const ggml_tensor * op, const ggml_spec_cuda_card & card) {
    return std::max(1, card.n_multiprocessors / count_kv_heads(op));
}

// Room for the splits of any row. Windows begin within a split, and later for later nodes.
int count_splits(const ggml_tensor * op, const ggml_spec_cuda_card & card) {
    if (!is_split(op)) {
        return 1;
    }
    const int in_window = is_tree(op) ? 0 : (int) op->ne[1] / shortest_split + 3;
    const int in_list   = (int) (op->src[4]->ne[0] + op->ne[1] + shortest_split - 1) / shortest_split;
    return std::min(most_splits(op, card) + in_window, in_list);
}

// Tiles that a branch can reach beyond the last whole tile of committed cells.
int count_tails(const ggml_tensor * op) {
    return is_tree(op) ? (int) (tile_keys - 1 + op->ne[1] + tile_keys - 1) / tile_keys : 0;
}

size_t count_parts(const ggml_tensor * op, const ggml_spec_cuda_card & card) {
    return (size_t) op->ne[1] * op->src[0]->ne[1] * (count_splits(op, card) + count_tails(op));
}

size_t partial_bytes(const ggml_tensor * op, const ggml_spec_cuda_card & card) {
    return count_parts(op, card) * op->src[0]->ne[0] * sizeof(float);
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

bool use_matrix_units([[maybe_unused]] const ggml_tensor * op, [[maybe_unused]] const ggml_spec_cuda_card & card) {
#if defined(__HIPCC__)
    return false;
#else
    const cell_type k = *find_cell_type(op->src[1]), v = *find_cell_type(op->src[2]);
    const bool      has_variant = k != cell_f32 && v != cell_f32 && (k == cell_f16) == (v == cell_f16);
    return has_variant && card.compute_capability >= 800;
#endif
}

cells cells_of(const ggml_tensor * t) {
    return { (const char *) t->data, (int64_t) t->nb[1], *find_cell_type(t) };
}

attention_operands read_operands(ggml_tensor * op, const ggml_spec_cuda_card & card, void * scratch) {
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
    o.n_heads_kv = count_kv_heads(op);
    o.n_columns  = (int) q->ne[2];
    o.n_list     = (int) op->src[4]->ne[0];
    o.most_splits = most_splits(op, card);
    o.n_splits   = count_splits(op, card);
    o.n_tails    = count_tails(op);
    o.window     = op->op_params[1];
    o.visibility = op->op_params[2];
    memcpy(&o.scale, &op->op_params[0], sizeof(float));
    o.scale *= log2_e;
    if (is_split(op)) {
        o.partial = (float *) scratch;
        o.weight  = (weighted *) ((char *) scratch + partial_bytes(op, card));
        o.range   = (int2 *) (o.weight + count_parts(op, card));
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

// The smallest variant for matrix units needs no more than the whole one without.
template <int D>
bool fits(int64_t n_columns, size_t shared_bytes, bool by_matrix_units) {
    const size_t whole = attention_block_bytes<fma_whole<D>>((int) n_columns);
    const size_t least = attention_block_bytes<fma_least<D>>((int) n_columns);
    return (by_matrix_units ? whole : least) + attention_static_bytes <= shared_bytes;
}

}  // namespace

bool attention_supported(const ggml_tensor * op, const ggml_spec_cuda_card & card) {
    const int64_t D = op->src[0]->ne[0], n_columns = op->ne[1];
    if ((D != 64 && D != 128 && D != 256) || n_columns > 65535 || !find_cell_type(op->src[1]) || !find_cell_type(op->src[2])) {
        return false;
    }
    const bool by_mma = use_matrix_units(op, card);
    return D == 64  ? fits<64>(n_columns, card.shared_bytes, by_mma) :
           D == 128 ? fits<128>(n_columns, card.shared_bytes, by_mma) : fits<256>(n_columns, card.shared_bytes, by_mma);
}

size_t attention_scratch_bytes(const ggml_tensor * op, const ggml_spec_cuda_card & card) {
    return is_split(op) ? partial_bytes(op, card) + count_parts(op, card) * sizeof(weighted) + op->ne[1] * sizeof(int2) : 0;
}

void attention_launch(ggml_tensor * op, const ggml_spec_cuda_card & card, void * scratch, cudaStream_t stream) {
    const attention_operands o      = read_operands(op, card, scratch);
    const bool               by_mma = use_matrix_units(op, card);
    const size_t             shared = card.shared_bytes;
    switch (op->src[0]->ne[0]) {
        case 64:  launch<64>(o, by_mma, shared, stream);  break;
        case 128: launch<128>(o, by_mma, shared, stream); break;
        case 256: launch<256>(o, by_mma, shared, stream); break;
    }
}

}  // namespace ggml_spec_cuda
