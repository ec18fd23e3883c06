// The kernel of attention, for any way (Math) to multiply queries, keys and values of a tile:
//   Math::n_threads, Math::n_rows, Math::head_dim, Math::memory
//   start_queries, start_keys, wait_keys, make_scores, keep_weights, start_values, wait_values, add_values, each_result
#pragma once

#include "attention-lists.cuh"

namespace ggml_spec_cuda {
namespace {

constexpr int score_stride = tile_keys + 12;  // keeps rows apart in the banks of shared memory
constexpr int soften_lanes = 8;               // threads a row of scores

template <int n_rows>
struct block_memory {
    float     scores[n_rows][score_stride];  // then weights, as Math keeps them
    weighted  weight[n_rows];      // so far
    join_factors factors[n_rows];  // of the newest tile
    row_range range[n_rows];
    int       cell[2][tile_keys];  // of a tile and the next
    const float * query[n_rows];   // null: no such row
};

// One block's work: rows [first_row, first_row + n_rows) of one KV head, counted node by node and head by head, over
// tiles [begin, end).
template <typename Math>
struct attention_block {
    const attention_operands &   o;
    block_memory<Math::n_rows> & m;
    Math                         math;
    int *                        branch;  // in a tail: the node's cells from itself up to the root
    const int32_t *              list;
    int  n_committed;
    int  kv_head, heads, first_row, n_rows, part, begin, end;
    bool is_tail;

    __device__ attention_block(const attention_operands & o, float4 * shared)
        : o(o), m(*(block_memory<Math::n_rows> *) shared), math(*(typename Math::memory *) (&m + 1)) {
        branch      = (int *) ((typename Math::memory *) (&m + 1) + 1);
        list        = o.list();
        n_committed = o.n_committed();
        kv_head     = blockIdx.y;
        heads       = o.n_heads / o.n_heads_kv;
        is_tail     = (int) blockIdx.x >= o.n_splits * o.n_groups;
    }

    __device__ int node_of(int row) const { return (first_row + row) / heads; }
    __device__ int head_of(int row) const { return kv_head * heads + (first_row + row) % heads; }

    // Rows that the matrix units look at, in steps of 16.
    __device__ int n_used() const { return (n_rows + 15) / 16 * 16; }

    // Takes this block's share, late splits first because they are long; false: there is nothing to do.
    __device__ bool find_work() {
        if (is_tail) {
            return find_tail((int) blockIdx.x - o.n_splits * o.n_groups);
        }
        part      = o.n_splits - 1 - (int) blockIdx.x / o.n_groups;
        first_row = blockIdx.x % o.n_groups * o.group_rows;
        n_rows    = min(o.group_rows, o.n_nodes() * heads - first_row);
        if (n_rows <= 0) {
            return false;
        }
        const int last = node_of(n_rows - 1);
        end   = o.shared_end(o.is_tree() ? 0 : plain_range(o, last).total);
        begin = o.is_tree() ? 0 : round_down(plain_range(o, node_of(0)).first, tile_keys);
        if (o.partial) {
            begin = max(begin, split_begin(part));
            end   = min(end, split_begin(part + 1));
        }
        return begin < end;
    }

    __device__ bool find_tail(int index) {
        const int row_groups = (heads + Math::n_rows - 1) / Math::n_rows;  // of a node
        const int tile       = index % o.n_tails;
        const int node       = index / o.n_tails / row_groups;
        first_row = node * heads + index / o.n_tails % row_groups * Math::n_rows;
        n_rows    = min(Math::n_rows, (node + 1) * heads - first_row);
        part      = o.n_splits + tile;
        begin     = round_down(n_committed, tile_keys) + tile * tile_keys;
        end       = begin + tile_keys;
        return node < o.n_nodes();
    }

    // Where the rows' queries lie and what they see; false: a tail that this node's list does not reach.
    __device__ bool find_rows() {
        for (int row = threadIdx.x; row < Math::n_rows; row += Math::n_threads) {
            m.query[row]  = row < n_rows ? o.q.row(head_of(row), node_of(row)) : nullptr;
            m.weight[row] = { -INFINITY, 0.0f };
        }
        if (is_tail) {
            __shared__ row_range range;
            if (threadIdx.x == 0) {
                range = walk(node_of(0));
                o.range[node_of(0)] = make_int2(range.first, range.total);
            }
            __syncthreads();
            end = min(end, range.total);
            for (int row = threadIdx.x; row < Math::n_rows; row += Math::n_threads) {
                m.range[row] = range;
            }
            return begin < end;
        }
        for (int row = threadIdx.x; row < Math::n_rows; row += Math::n_threads) {
            const int node = node_of(min(row, n_rows - 1));
            m.range[row] = !o.is_tree() ? plain_range(o, node) : row_range { o.window > 0 ? walk(node).first : 0, end };
        }
        return true;
    }

    // A node's range, and in a tail its branch.
    __device__ row_range walk(int node) const {
        int depth = 0;
        for (int i = node; i >= 0; i = o.node_parent(i)) {
            if (is_tail) {
                branch[depth] = o.node_cell(i);
            }
            depth++;
        }
        return make_range(o, n_committed + depth - 1, n_committed + depth);
    }

    __device__ int cell_of(int entry) const {
        if (entry < n_committed || o.visibility == GGML_SPEC_VISIBLE_PREFIX) {
            return list[entry];
        }
        return is_tail ? branch[m.range[0].total - 1 - entry] : o.node_cell(entry - n_committed);
    }

    __device__ int tile_size(int tile) const { return min(tile_keys, end - tile); }

    // This thread's cell of a tile, on its way while other things happen; 0 beyond the end.
    __device__ int fetch_cell(int tile) const {
        return (int) threadIdx.x < tile_size(tile) ? cell_of(tile + threadIdx.x) : 0;
    }

    __device__ void keep_cell(int slot, int cell) {
        if (threadIdx.x < tile_keys) {
            m.cell[slot][threadIdx.x] = cell;
        }
    }

    // Scores become weights relative to the tile's largest, and the tile is joined to the row's sums.
    __device__ void soften(int tile) {
        const int lane = threadIdx.x % soften_lanes;
        for (int row = threadIdx.x / soften_lanes; row < n_used(); row += Math::n_threads / soften_lanes) {
            const float4 a = *(const float4 *) &m.scores[row][lane * 4];
            const float4 b = *(const float4 *) &m.scores[row][32 + lane * 4];
            float score[8] = { a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w };
            mask(score, m.range[row], tile + lane * 4);
            float largest = score[0];
#pragma unroll
            for (int i = 1; i < 8; i++) {
                largest = fmaxf(largest, score[i]);
            }
#pragma unroll
            for (int step = soften_lanes / 2; step > 0; step /= 2) {
                largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step));
            }
            const float base = largest == -INFINITY ? 0.0f : largest;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                score[i] = power_of_2(plus(score[i], -base));
            }
            __syncwarp();  // all lanes of a row have read what the weights take the place of
            Math::keep_weights(m.scores[row], lane * 4, score);
            const float sum = lanes_sum<soften_lanes>(plus(plus(plus(score[0], score[1]), plus(score[2], score[3])),
                                                           plus(plus(score[4], score[5]), plus(score[6], score[7]))));
            if (lane == 0) {
                weighted so_far = m.weight[row];
                m.factors[row] = join(so_far.largest, so_far.sum, largest, sum);
                m.weight[row]  = so_far;
            }
        }
    }

    // Entries that the row does not see weigh nothing; most tiles are seen whole.
    __device__ void mask(float (&score)[8], row_range range, int entry) const {
        const int total = min(range.total, end);
        if (entry >= range.first && entry + 32 + 4 <= total) {
            return;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int at = entry + i / 4 * 32 + i % 4;
            score[i] = at >= range.first && at < total ? score[i] : -INFINITY;
        }
    }

    __device__ void fold_tiles() {
        keep_cell(0, fetch_cell(begin));
        __syncthreads();
        math.start_queries(*this);
        math.start_keys(*this, 0, tile_size(begin));
        math.start_values(*this, 0, tile_size(begin));
        for (int tile = begin, slot = 0; tile < end; tile += tile_keys, slot ^= 1) {
            const int next      = tile + tile_keys;
            const int next_cell = next < end ? fetch_cell(next) : 0;
            math.wait_keys(*this, slot, tile_size(tile));
            __syncthreads();
            math.make_scores(*this);
            keep_cell(slot ^ 1, next_cell);
            __syncthreads();
            math.start_keys(*this, slot ^ 1, next < end ? tile_size(next) : 0);
            math.wait_values(*this, slot, tile_size(tile));
            soften(tile);
            __syncthreads();
            math.add_values(*this);
            __syncthreads();
            math.start_values(*this, slot ^ 1, next < end ? tile_size(next) : 0);
        }
    }

    __device__ void write_part() {
        math.each_result([&](int row, int at, float2 value) {
            if (row < n_rows) {
                const int64_t slot = o.parts(node_of(row), head_of(row)) + part;
                *(float2 *) (o.partial + slot * Math::head_dim + at) = value;
                if (at == 0) {
                    o.weight[slot] = m.weight[row];
                }
            }
        });
    }

    __device__ void write_result() {
        math.each_result([&](int row, int at, float2 value) {
            if (row < n_rows) {
                const int   node = node_of(row), head = head_of(row);
                const float norm = 1.0f / m.weight[row].sum;
                float2 *    out  = (float2 *) (o.out + ((int64_t) node * o.n_heads + head) * Math::head_dim + at);
                *out = make_float2(gated(o, node, head, at, times(value.x, norm)),
                                   gated(o, node, head, at + 1, times(value.y, norm)));
            }
        });
    }
};

// Weights of keys at .. at + 3 and 32 further on, in place of the scores.
__device__ __forceinline__ void keep_weights_f32(float (&row)[score_stride], int at, const float (&w)[8]) {
    *(float4 *) &row[at]      = make_float4(w[0], w[1], w[2], w[3]);
    *(float4 *) &row[32 + at] = make_float4(w[4], w[5], w[6], w[7]);
}

template <typename Math>
__global__ void __launch_bounds__(Math::n_threads) attention_kernel(const attention_operands o) {
    extern __shared__ float4 shared[];
    attention_block<Math> b(o, shared);
    if (!b.find_work() || !b.find_rows()) {
        return;
    }
    __syncthreads();
    b.fold_tiles();
    if (o.partial) {
        b.write_part();
    } else {
        b.write_result();
    }
}

// At most what a block has besides.
constexpr size_t attention_static_bytes = 64;

template <typename Math>
size_t attention_block_bytes(int n_columns) {
    return sizeof(block_memory<Math::n_rows>) + sizeof(typename Math::memory) + n_columns * sizeof(int);
}

template <typename Math>
void launch_attention(attention_operands o, cudaStream_t stream) {
    const int heads    = o.n_heads / o.n_heads_kv;
    const int per_node = (heads + Math::n_rows - 1) / Math::n_rows;
    o.n_groups   = (o.n_columns * heads + Math::n_rows - 1) / Math::n_rows;
    o.group_rows = ((o.n_columns * heads + o.n_groups - 1) / o.n_groups + 15) / 16 * 16;
    const size_t n_bytes = attention_block_bytes<Math>(o.n_columns);
    const dim3   grid(o.n_splits * o.n_groups + o.n_columns * per_node * o.n_tails, o.n_heads_kv);
    allow_shared_bytes(attention_kernel<Math>, n_bytes);
    attention_kernel<Math><<<grid, Math::n_threads, n_bytes, stream>>>(o);
}

}  // namespace
}  // namespace ggml_spec_cuda
