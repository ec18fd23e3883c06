// The kernel of attention, for any way (Math) to multiply queries, keys and values of a tile:
//   Math::n_threads, Math::n_rows, Math::head_dim, Math::memory
//   fold_tiles: all tiles of the block; leaves the rows' weights in block_memory
//   result_of: four values of a row after that
#pragma once

#include "attention-lists.cuh"

namespace ggml_spec_cuda {
namespace {

constexpr int cell_tiles = 4;  // whose cells are held: loads run ahead of sums

template <int n_rows>
struct block_memory {
    weighted      weight[n_rows];               // at the end
    row_range     range[n_rows];                // of this block's entries that a row sees
    int           split_length[n_rows];         // where rows differ in it
    alignas(16) int cell[cell_tiles][tile_keys];  // of the newest tiles
    const float * query[n_rows];                // null: no such row
};

// Splits of one call may differ in length where some of its rows are longer than others: the shortest and the longest. They
// differ in steps of a tile, and there are rarely two.
struct split_lengths {
    int first, last;

    __device__ explicit split_lengths(const attention_operands & o)
        : first(o.split_length(o.n_committed() + (o.is_tree() ? 1 : o.n_nodes()))),
          last(o.split_length(o.n_committed() + o.n_nodes())) {}
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
    int  split_length;  // for rows that have this one
    int  n_committed;
    int  kv_head, heads, first_row, n_rows, part, begin, end;
    bool is_tail, is_mixed;
    row_range tail_range;

    __device__ attention_block(const attention_operands & o, void * shared, split_lengths lengths, int split_length)
        : o(o), m(*(block_memory<Math::n_rows> *) ((typename Math::memory *) shared + 1)),
          math(*(typename Math::memory *) shared), split_length(split_length) {
        branch      = (int *) (&m + 1);
        list        = o.list();
        n_committed = o.n_committed();
        kv_head     = blockIdx.y;
        heads       = o.n_heads / o.n_heads_kv;
        is_tail     = (int) blockIdx.x >= o.n_splits * o.n_groups;
        is_mixed    = lengths.first != lengths.last;
    }

    __device__ int node_of(int row) const { return (first_row + row) / heads; }
    __device__ int head_of(int row) const { return kv_head * heads + (first_row + row) % heads; }

    // Rows that the matrix units look at, in steps of 16.
    __device__ int n_used() const { return (n_rows + 15) / 16 * 16; }

    // Takes this block's share; false: there is nothing to do.
    __device__ bool find_work() {
        if (is_tail) {
            return find_tail((int) blockIdx.x - o.n_splits * o.n_groups);
        }
        first_row = blockIdx.x % o.n_groups * o.group_rows;
        n_rows    = min(o.group_rows, o.n_nodes() * heads - first_row);
        if (n_rows <= 0) {
            return false;
        }
        const int last = node_of(n_rows - 1);
        end   = o.shared_end(o.is_tree() ? 0 : plain_range(o, last).total);
        begin = o.is_tree() ? 0 : round_down(plain_range(o, node_of(0)).first, tile_keys);
        if (o.partial) {
            const int split = begin / split_length + (int) blockIdx.x / o.n_groups;
            part  = o.split_place(split);
            begin = max(begin, split * split_length);
            end   = min(end, (split + 1) * split_length);
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

    // A tail ends where its node's list does; false: it does not reach this tile.
    __device__ bool find_end() {
        if (is_tail) {
            __shared__ row_range range;
            if (threadIdx.x == 0) {
                range = walk(node_of(0));
                o.range[node_of(0)] = make_int2(range.first, range.total);
            }
            __syncthreads();
            tail_range = range;
            end        = min(end, range.total);
        }
        return begin < end;
    }

    // Where the rows' queries lie and what they see, for after the next barrier.
    __device__ void find_rows() {
        for (int row = threadIdx.x; row < Math::n_rows; row += Math::n_threads) {
            const int node  = node_of(min(row, n_rows - 1));
            row_range range = { 0, n_committed + 1 };
            if (is_tail) {
                range = tail_range;
            } else if (!o.is_tree()) {
                range = plain_range(o, node);
            } else if (o.window > 0 || is_mixed) {
                range = walk(node);
            }
            m.query[row]        = row < n_rows ? o.q.row(head_of(row), node) : nullptr;
            m.split_length[row] = is_mixed && !is_tail ? o.split_length(range.total) : split_length;
            m.range[row]        = { range.first, o.is_tree() ? end : min(range.total, end) };
        }
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
        return is_tail ? branch[tail_range.total - 1 - entry] : o.node_cell(entry - n_committed);
    }

    __device__ int tile_size(int tile) const { return min(tile_keys, end - tile); }

    // This thread's cell of a tile, on its way while other things happen; 0 beyond the end.
    __device__ int fetch_cell(int tile) const {
        return (int) threadIdx.x < tile_size(tile) ? cell_of(tile + threadIdx.x) : 0;
    }

    __device__ int * cells_of_tile(int tile) const { return m.cell[tile / tile_keys % cell_tiles]; }

    __device__ void keep_cell(int tile, int cell) {
        if (threadIdx.x < tile_keys) {
            cells_of_tile(tile)[threadIdx.x] = cell;
        }
    }

    __device__ void write_results() const {
        constexpr int pieces = Math::head_dim / 4;
        for (int i = threadIdx.x; i < n_rows * pieces; i += Math::n_threads) {
            const int    row = i / pieces, at = i % pieces * 4, node = node_of(row), head = head_of(row);
            const float4 x   = math.result_of(row, at);
            if (!o.partial) {
                const float norm = 1.0f / m.weight[row].sum;
                float *     out  = o.out + ((int64_t) node * o.n_heads + head) * Math::head_dim;
                *(float4 *) (out + at) = gated(o, node, head, at, times(x, norm));
            } else if (m.split_length[row] == split_length) {
                const int64_t place = o.parts(node, head) + part;
                *(float4 *) (o.partial + place * Math::head_dim + at) = x;
                if (at == 0) {
                    o.weight[place] = m.weight[row];
                }
            }
        }
    }
};

template <typename Math>
__global__ void __launch_bounds__(Math::n_threads) attention_kernel(const attention_operands o) {
    extern __shared__ __align__(128) unsigned char shared[];
    const split_lengths lengths(o);
    for (int length = lengths.first; length <= lengths.last; length += tile_keys) {
        attention_block<Math> b(o, shared, lengths, length);
        if (b.find_work() && b.find_end()) {
            b.math.fold_tiles(b);
            b.write_results();
        }
        if (b.is_tail) {
            return;
        }
        __syncthreads();
    }
}

// At most what a block has besides.
constexpr size_t attention_static_bytes = 128;

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

template <typename Variant, typename... Smaller>
void launch_first_that_fits(const attention_operands & o, size_t shared_bytes, cudaStream_t stream) {
    if constexpr (sizeof...(Smaller) > 0) {
        if (attention_block_bytes<Variant>(o.n_columns) + attention_static_bytes > shared_bytes) {
            return launch_first_that_fits<Smaller...>(o, shared_bytes, stream);
        }
    }
    launch_attention<Variant>(o, stream);
}

}  // namespace
}  // namespace ggml_spec_cuda
