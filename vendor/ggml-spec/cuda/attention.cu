// Attention over listed KV cells: online softmax over tiles of 64 list entries, each row in its own order.
//
// A block owns one KV head, a few nodes (with the query heads of the group: its rows) and one split of the list. Splits
// are cut by list position alone, tiles within them too, and every sum has a fixed order, so a row's bits depend on
// nothing but its own list. A tile that lies within the committed list is read once for all rows; where the branches
// begin, each node's tile is read on its own. A second kernel joins the splits of a row.

#include "attention-block.cuh"

#include <algorithm>

namespace ggml_spec_cuda {
namespace {

constexpr int rows_max           = 32;   // of a block
constexpr int branch_columns_max = 256;  // columns whose branches fit in shared memory

__device__ __forceinline__ float gated(const attention_operands & o, int node, int head, int at, float value) {
    return o.gate.data == nullptr ? value : value / plus(1.0f, expf(-o.gate.row(head, node)[at]));
}

template <int D, int rows>
__global__ void __launch_bounds__(block_threads) attention_kernel(const attention_operands o) {
    using S = shares<D, rows>;
    extern __shared__ float4 shared[];
    attention_block<D, rows> b(o, *(block_memory<D, rows> *) shared);
    if (b.n_own_nodes <= 0) {
        return;
    }
    b.find_lists();
    __syncthreads();
    const int split   = blockIdx.x;
    const int longest = b.longest_list(0, b.n_own_nodes);
    const int begin   = o.partial ? split_begin(split) : 0;
    const int end     = o.partial ? min(split_begin(split + 1), longest) : longest;
    if (o.partial && split == 0 && b.kv_head == 0 && (int) threadIdx.x < b.n_own_nodes) {
        const row_list list = b.m.list[threadIdx.x];
        o.range[b.first_node + threadIdx.x] = make_int2(split_of_entry(list.first), split_of_entry(list.n_total - 1));
    }
    if (begin >= end) {
        return;
    }
    b.start_rows();
    float4 result[S::result_rows] = {};
    b.fold_entries(result, begin, end);
    if (o.partial == nullptr) {
        b.for_each_result(result, [&](int row, int at, float4 value) {
            const int   node = b.node_of_row(row), head = b.head_of_row(row);
            float *     out  = o.out + ((int64_t) node * o.n_heads + head) * D + at;
            const float norm = 1.0f / b.m.sum[row];
            out[0] = gated(o, node, head, at,     times(value.x, norm));
            out[1] = gated(o, node, head, at + 1, times(value.y, norm));
            out[2] = gated(o, node, head, at + 2, times(value.z, norm));
            out[3] = gated(o, node, head, at + 3, times(value.w, norm));
        });
        return;
    }
    b.for_each_result(result, [&](int row, int at, float4 value) {
        const int64_t slot = ((int64_t) b.node_of_row(row) * o.n_heads + b.head_of_row(row)) * o.n_splits + split;
        *(float4 *) (o.partial + slot * D + at) = value;
        if (at == 0) {
            o.weight[slot] = make_float2(b.m.largest[row], b.m.sum[row]);
        }
    });
}

// A row's splits in order; a thread a value. Columns beyond the nodes are zero.
template <int D>
__global__ void __launch_bounds__(D) attention_join_kernel(const attention_operands o) {
    const int node = blockIdx.y, head = blockIdx.x, at = threadIdx.x;
    float *   out  = o.out + ((int64_t) node * o.n_heads + head) * D + at;
    if (node >= o.nodes[1]) {
        *out = 0.0f;
        return;
    }
    if (o.partial == nullptr) {
        return;
    }
    const int2     range  = o.range[node];
    const int64_t  slot   = ((int64_t) node * o.n_heads + head) * o.n_splits;
    const float2 * weight = o.weight + slot;
    float largest = -INFINITY;
    for (int split = range.x; split <= range.y; split++) {
        largest = fmaxf(largest, weight[split].x);
    }
    float sum = 0.0f, value = 0.0f;
    for (int split = range.x; split <= range.y; split++) {
        const float share = expf(weight[split].x - largest);
        sum   = madd(weight[split].y, share, sum);
        value = madd(o.partial[(slot + split) * D + at], share, value);
    }
    *out = gated(o, node, head, at, times(value, 1.0f / sum));
}

// --- launch --------------------------------------------------------------------------------------------------------------

bool is_split(const ggml_tensor * op) {
    return op->op_params[2] != GGML_SPEC_VISIBLE_PREFIX;  // a prefill has rows enough to fill the chip
}

int count_splits(const ggml_tensor * op) {
    return is_split(op) ? split_of_entry((int) (op->src[4]->ne[0] + op->ne[1]) - 1) + 1 : 1;
}

int heads_per_kv(const ggml_tensor * op) {
    const ggml_tensor * q = op->src[0];
    return (int) (q->ne[1] * q->ne[0] / op->src[1]->ne[0]);
}

// Beside block_memory: the words of the nodes, and the branches of the block's own.
size_t branch_bytes(const ggml_tensor * op, int rows) {
    const size_t n_columns = op->ne[1];
    switch (op->op_params[2]) {
        case GGML_SPEC_VISIBLE_PREFIX: return 0;
        case GGML_SPEC_VISIBLE_BLOCK:  return 2 * n_columns * sizeof(int);
        default:                       return (2 + rows / heads_per_kv(op)) * n_columns * sizeof(int);
    }
}

template <int D, int rows>
size_t block_bytes(const ggml_tensor * op) {
    return sizeof(block_memory<D, rows>) + branch_bytes(op, rows);
}

template <int D>
size_t block_bytes(const ggml_tensor * op, int rows) {
    return rows == 8 ? block_bytes<D, 8>(op) : rows == 16 ? block_bytes<D, 16>(op) : block_bytes<D, 32>(op);
}

size_t block_bytes(const ggml_tensor * op, int rows) {
    switch (op->src[0]->ne[0]) {
        case 64:  return block_bytes<64>(op, rows);
        case 128: return block_bytes<128>(op, rows);
        default:  return block_bytes<256>(op, rows);
    }
}

// The fewest rows a block that hold all nodes, or as many as the device's shared memory allows; 0: none fits.
int choose_rows(const ggml_tensor * op, size_t shared_bytes) {
    int chosen = 0;
    for (int rows = 8; rows <= rows_max; rows *= 2) {
        if (heads_per_kv(op) > rows || block_bytes(op, rows) > shared_bytes) {
            continue;
        }
        chosen = rows;
        if (rows / heads_per_kv(op) >= op->ne[1]) {
            break;
        }
    }
    return chosen;
}

cells cells_of(const ggml_tensor * t) {
    const cell_type type = t->type == GGML_TYPE_F32 ? cell_f32 : t->type == GGML_TYPE_F16 ? cell_f16 : cell_q8_0;
    return { (const char *) t->data, (int64_t) t->nb[1], type };
}

template <int D, int rows>
void launch(const attention_operands & o, size_t n_bytes, cudaStream_t stream) {
    const int  nodes = rows / (o.n_heads / o.n_heads_kv);
    const dim3 grid(o.n_splits, (o.n_columns + nodes - 1) / nodes, o.n_heads_kv);
    allow_shared_bytes(attention_kernel<D, rows>, n_bytes);
    attention_kernel<D, rows><<<grid, block_threads, n_bytes, stream>>>(o);
}

template <int D>
void launch(const attention_operands & o, int rows, size_t n_bytes, cudaStream_t stream) {
    switch (rows) {
        case 8:  launch<D, 8>(o, n_bytes, stream);  break;
        case 16: launch<D, 16>(o, n_bytes, stream); break;
        case 32: launch<D, 32>(o, n_bytes, stream); break;
    }
    attention_join_kernel<D><<<dim3(o.n_heads, o.n_columns), D, 0, stream>>>(o);
}

size_t partial_bytes(const ggml_tensor * op) {
    return (size_t) op->ne[1] * op->ne[0] * count_splits(op) * sizeof(float);
}

size_t weight_bytes(const ggml_tensor * op) {
    return (size_t) op->ne[1] * op->src[0]->ne[1] * count_splits(op) * sizeof(float2);
}

size_t device_shared_bytes() {
    int device = 0, n_bytes = 0;
    (void) cudaGetDevice(&device);
    (void) cudaDeviceGetAttribute(&n_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return n_bytes;
}

}  // namespace

bool attention_supported(const ggml_tensor * op, size_t shared_bytes) {
    const ggml_tensor * q = op->src[0];
    if (q->ne[0] != 64 && q->ne[0] != 128 && q->ne[0] != 256) {
        return false;
    }
    const bool branches_fit = op->op_params[2] == GGML_SPEC_VISIBLE_PREFIX || op->ne[1] <= branch_columns_max;
    return branches_fit && heads_per_kv(op) <= rows_max && op->ne[1] <= 65535 && choose_rows(op, shared_bytes) > 0;
}

size_t attention_scratch_bytes(const ggml_tensor * op) {
    return is_split(op) ? partial_bytes(op) + weight_bytes(op) + op->ne[1] * sizeof(int2) : 0;
}

void attention_launch(ggml_tensor * op, void * scratch, cudaStream_t stream) {
    const ggml_tensor * q         = op->src[0];
    const ggml_tensor * committed = op->src[4];
    const ggml_tensor * gate      = op->src[5];
    attention_operands o = {};
    o.q          = strided_view(q);
    o.gate       = gate ? strided_view(gate) : strided {};
    o.k          = cells_of(op->src[1]);
    o.v          = cells_of(op->src[2]);
    o.nodes      = (const int32_t *) op->src[3]->data;
    o.committed  = (const int32_t *) committed->data;
    o.out        = (float *) op->data;
    if (is_split(op)) {
        o.partial = (float *) scratch;
        o.weight  = (float2 *) ((char *) scratch + partial_bytes(op));
        o.range   = (int2 *) ((char *) o.weight + weight_bytes(op));
    }
    o.n_heads    = (int) q->ne[1];
    o.n_heads_kv = o.n_heads / heads_per_kv(op);
    o.n_columns  = (int) q->ne[2];
    o.n_list     = (int) committed->ne[0];
    o.n_splits   = count_splits(op);
    o.window     = op->op_params[1];
    o.visibility = op->op_params[2];
    memcpy(&o.scale, &op->op_params[0], sizeof(float));

    const int    rows    = choose_rows(op, device_shared_bytes());
    const size_t n_bytes = block_bytes(op, rows);
    switch (q->ne[0]) {
        case 64:  launch<64>(o, rows, n_bytes, stream);  break;
        case 128: launch<128>(o, rows, n_bytes, stream); break;
        case 256: launch<256>(o, rows, n_bytes, stream); break;
    }
}

}  // namespace ggml_spec_cuda
