// Gated delta rule over a draft tree.
//
// A task is one value head. Its state rows (columns of S) do not depend on each other, so they are taken in groups that
// stay in the first cache while the whole schedule is walked; four rows at a time share the loads of k and q.

#include "spec-cpu.h"
#include "spec-simd.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace ggml_spec {
namespace {

constexpr int64_t group_bytes = 16 * 1024;  // of state per walk
constexpr int64_t fold_block  = 64;         // nodes prepared at a time in a prefill
constexpr int64_t rows_step   = 4;

// What a node's update needs, the same for every row of the head.
struct node_gate {
    float log_g;
    float decay;
    float beta;
};

struct operands {
    const ggml_tensor *q, *k, *v, *g, *beta, *state, *bank_k, *bank_u, *gates;
    ggml_tensor * out;
    int64_t       S_k, H_k, S_v, H_v;
    bool          l2norm;
    float         eps;
    schedule      sched;
};

operands read_operands(ggml_tensor * op) {
    operands o;
    o.q      = op->src[GGML_SPEC_DELTA_SRC_Q];
    o.k      = op->src[GGML_SPEC_DELTA_SRC_K];
    o.v      = op->src[GGML_SPEC_DELTA_SRC_V];
    o.g      = op->src[GGML_SPEC_DELTA_SRC_G];
    o.beta   = op->src[GGML_SPEC_DELTA_SRC_BETA];
    o.state  = op->src[GGML_SPEC_DELTA_SRC_STATE];
    o.bank_k = op->src[GGML_SPEC_DELTA_SRC_BANK_K];
    o.bank_u = op->src[GGML_SPEC_DELTA_SRC_BANK_U];
    o.gates  = (ggml_spec_flags(op) & GGML_SPEC_FLAG_RAW_GATES) ? op->src[GGML_SPEC_DELTA_SRC_GATES] : nullptr;
    o.out    = op;
    o.S_k    = o.q->ne[0];
    o.H_k    = o.q->ne[1];
    o.S_v    = o.v->ne[0];
    o.H_v    = o.v->ne[1];
    o.l2norm = (ggml_spec_flags(op) & GGML_SPEC_FLAG_QK_L2NORM) != 0;
    o.eps    = ggml_spec_eps(op);
    o.sched  = read_schedule(op->src[GGML_SPEC_DELTA_SRC_SCHED], o.q->ne[2], o.bank_k->ne[2], o.state->ne[3]);
    return o;
}

// Rows of state walked together.
int64_t group_rows(int64_t S_k, int64_t S_v) {
    const int64_t rows = std::max(rows_step, group_bytes / (int64_t) (S_k * sizeof(float)) / rows_step * rows_step);
    return std::min(rows, S_v);
}

// One thread's part of the work buffer.
struct scratch {
    float *     q;      // [n_prepared][S_k], scaled by 1/sqrt(S_k)
    float *     k;      // [n_prepared][S_k]
    node_gate * gates;  // [n_prepared]
    float *     decay;  // of the pending rows
    uint8_t *   visited;
    float *     live;   // [group_rows][S_k]
    float *     stack;  // [n_levels][group_rows][S_k]
};

struct layout {
    int64_t n_prepared, n_rows, n_columns, group_floats, n_levels, S_k;

    explicit layout(const ggml_tensor * op) {
        const ggml_tensor * q      = op->src[GGML_SPEC_DELTA_SRC_Q];
        const ggml_tensor * bank_k = op->src[GGML_SPEC_DELTA_SRC_BANK_K];
        S_k          = q->ne[0];
        n_columns    = q->ne[2];
        n_rows       = bank_k->ne[2];
        n_prepared   = std::max(fold_block, std::min(n_columns, n_rows));
        group_floats = group_rows(S_k, op->src[GGML_SPEC_DELTA_SRC_V]->ne[0]) * S_k;
        n_levels     = ggml_spec_levels_max(std::min(n_columns, n_rows));
    }

    size_t carve(char * base, scratch & s) const {
        size_t used = 0;
        auto take = [&](size_t n_bytes) {
            char * part = base + used;
            used += padded(n_bytes);
            return part;
        };
        s.q       = (float *)     take(n_prepared * S_k * sizeof(float));
        s.k       = (float *)     take(n_prepared * S_k * sizeof(float));
        s.gates   = (node_gate *) take(n_prepared * sizeof(node_gate));
        s.decay   = (float *)     take(n_rows * sizeof(float));
        s.visited = (uint8_t *)   take(n_columns);
        s.live    = (float *)     take(group_floats * sizeof(float));
        s.stack   = (float *)     take(n_levels * group_floats * sizeof(float));
        return used;
    }
};

// --- one node, `n` rows ------------------------------------------------------------------------------------------------

// S = decay * S + k u^T: the first pass and the replay both come here, so they agree in every bit.
inline vec updated(vec row, vec decay, vec k, vec u) {
    return madd(k, u, mul(row, decay));
}

template <int64_t S> struct width {
    static int64_t of(int64_t) { return S; }
};
template <> struct width<0> {
    static int64_t of(int64_t S_k) { return S_k; }
};

template <int64_t S>
void replay_rows(float * rows, int64_t n_rows, int64_t S_k, float decay, const float * k, const float * u) {
    const int64_t s = width<S>::of(S_k);
    const vec     g = splat(decay);
    for (int64_t j = 0; j < n_rows; j++) {
        float *   row = rows + j * s;
        const vec uj  = splat(u[j]);
        for (int64_t i = 0; i < s; i += lanes) {
            store(row + i, updated(load(row + i), g, load(k + i), uj));
        }
    }
}

// u = beta * (v - decay * S^T k), then the update and o = S^T q for four rows of S^T.
template <int64_t S>
void step4(float * rows, int64_t S_k, const node_gate & gate, const float * k, const float * q, const float * v,
           float * u, float * o) {
    const int64_t s  = width<S>::of(S_k);
    float *       r0 = rows;
    float *       r1 = rows + s;
    float *       r2 = rows + 2 * s;
    float *       r3 = rows + 3 * s;
    vec a0 = splat(0.0f), a1 = a0, a2 = a0, a3 = a0;
    for (int64_t i = 0; i < s; i += lanes) {
        const vec kv = load(k + i);
        a0 = madd(load(r0 + i), kv, a0);
        a1 = madd(load(r1 + i), kv, a1);
        a2 = madd(load(r2 + i), kv, a2);
        a3 = madd(load(r3 + i), kv, a3);
    }
    float recalled[4];
    sums4(recalled, a0, a1, a2, a3);
    for (int j = 0; j < 4; j++) {
        u[j] = gate.beta * (v[j] - gate.decay * recalled[j]);
    }
    const vec g  = splat(gate.decay);
    const vec u0 = splat(u[0]), u1 = splat(u[1]), u2 = splat(u[2]), u3 = splat(u[3]);
    a0 = a1 = a2 = a3 = splat(0.0f);
    for (int64_t i = 0; i < s; i += lanes) {
        const vec kv = load(k + i);
        const vec qv = load(q + i);
        const vec x0 = updated(load(r0 + i), g, kv, u0);
        const vec x1 = updated(load(r1 + i), g, kv, u1);
        const vec x2 = updated(load(r2 + i), g, kv, u2);
        const vec x3 = updated(load(r3 + i), g, kv, u3);
        store(r0 + i, x0);
        store(r1 + i, x1);
        store(r2 + i, x2);
        store(r3 + i, x3);
        a0 = madd(x0, qv, a0);
        a1 = madd(x1, qv, a1);
        a2 = madd(x2, qv, a2);
        a3 = madd(x3, qv, a3);
    }
    sums4(o, a0, a1, a2, a3);
}

// --- one head ----------------------------------------------------------------------------------------------------------

void prepare_node(const operands & o, const scratch & s, int64_t head, int64_t node, int64_t at) {
    const int64_t key_head = head % o.H_k;
    const float * q        = column(o.q, key_head, node);
    const float * k        = column(o.k, key_head, node);
    float         q_scale  = 1.0f / sqrtf((float) o.S_k);
    float         k_scale  = 1.0f;
    if (o.l2norm) {
        q_scale /= sqrtf(dot(o.S_k, q, q) + o.eps);
        k_scale /= sqrtf(dot(o.S_k, k, k) + o.eps);
    }
    scaled_copy(o.S_k, s.q + at * o.S_k, q, q_scale);
    scaled_copy(o.S_k, s.k + at * o.S_k, k, k_scale);

    const float g    = column(o.g, node)[head];
    const float beta = column(o.beta, node)[head];
    node_gate & gate = s.gates[at];
    if (o.gates) {
        const float * gates = (const float *) o.gates->data;
        gate.log_g = ggml_spec_log_decay(g, gates[head], gates[o.H_v + head]);
        gate.beta  = ggml_spec_write_strength(beta);
    } else {
        gate.log_g = g;
        gate.beta  = beta;
    }
    gate.decay = ggml_spec_decay(gate.log_g);
}

// A group of rows [begin, begin + n) of one head.
struct group {
    int64_t head;
    int64_t begin;
    int64_t n;
};

template <int64_t S>
void fold_pending(const operands & o, const scratch & s, const group & rows, float * durable) {
    for (int32_t i = 0; i < o.sched.n_pending; i++) {
        const int32_t row = o.sched.pending[i];
        replay_rows<S>(durable, rows.n, o.S_k, s.decay[i], column(o.bank_k, rows.head % o.H_k, row, o.sched.pending_bank),
                       column(o.bank_u, rows.head, row, o.sched.pending_bank) + rows.begin);
    }
}

// One node on the rows of a group; u goes to `deltas` (of the whole head).
template <int64_t S>
void run_node(const operands & o, const scratch & s, const group & rows, float * live, int64_t node, int64_t at, float * deltas) {
    const float * v   = column(o.v, rows.head, node) + rows.begin;
    float *       out = column(o.out, node) + rows.head * o.S_v + rows.begin;
    for (int64_t j = 0; j < rows.n; j += rows_step) {
        step4<S>(live + j * o.S_k, o.S_k, s.gates[at], s.k + at * o.S_k, s.q + at * o.S_k, v + j,
                 deltas + rows.begin + j, out + j);
    }
}

template <int64_t S>
void walk_tree(const operands & o, const scratch & s, const group & rows, const float * durable) {
    const int64_t n_floats = rows.n * o.S_k;
    memcpy(s.live, durable, n_floats * sizeof(float));
    for (int32_t i = 0; i < o.sched.n_nodes; i++) {
        const sched_node & visit = o.sched.nodes[i];
        if (visit.restore_level >= 0) {
            memcpy(s.live, s.stack + visit.restore_level * n_floats, n_floats * sizeof(float));
        }
        run_node<S>(o, s, rows, s.live, visit.node, visit.node, column(o.bank_u, rows.head, visit.node, o.sched.write_bank));
        if (visit.save_level >= 0) {
            memcpy(s.stack + visit.save_level * n_floats, s.live, n_floats * sizeof(float));
        }
    }
}

template <typename Fn>
void for_each_group(const operands & o, int64_t head, Fn fn) {
    const int64_t step = group_rows(o.S_k, o.S_v);
    for (int64_t begin = 0; begin < o.S_v; begin += step) {
        const group rows = { head, begin, std::min(step, o.S_v - begin) };
        fn(rows, column(o.state, begin, head, o.sched.state_slot));
    }
}

// Key and log decay of every node; the deltas are written by the walk.
void write_bank(const operands & o, const scratch & s, int64_t head) {
    for (int32_t node = 0; node < o.sched.n_nodes; node++) {
        float * extra = column(o.bank_u, head, node, o.sched.write_bank) + o.S_v;
        extra[0] = s.gates[node].log_g;
        extra[1] = extra[2] = extra[3] = 0.0f;
        if (head < o.H_k) {
            memcpy(column(o.bank_k, head, node, o.sched.write_bank), s.k + node * o.S_k, o.S_k * sizeof(float));
        }
    }
}

template <int64_t S>
void run_head_tree(const operands & o, const scratch & s, int64_t head) {
    for (int32_t node = 0; node < o.sched.n_nodes; node++) {
        prepare_node(o, s, head, node, node);
    }
    for_each_group(o, head, [&](const group & rows, float * durable) {
        fold_pending<S>(o, s, rows, durable);
        walk_tree<S>(o, s, rows, durable);
    });
    write_bank(o, s, head);
}

template <int64_t S>
void run_head_fold(const operands & o, const scratch & s, int64_t head) {
    for_each_group(o, head, [&](const group & rows, float * durable) { fold_pending<S>(o, s, rows, durable); });
    for (int64_t first = 0; first < o.sched.n_nodes; first += fold_block) {
        const int64_t n = std::min(fold_block, o.sched.n_nodes - first);
        for (int64_t i = 0; i < n; i++) {
            prepare_node(o, s, head, first + i, i);
        }
        for_each_group(o, head, [&](const group & rows, float * durable) {
            for (int64_t i = 0; i < n; i++) {
                run_node<S>(o, s, rows, durable, first + i, i, s.live);
            }
        });
    }
}

template <int64_t S>
void run_head(const operands & o, const scratch & s, int64_t head) {
    for (int32_t i = 0; i < o.sched.n_pending; i++) {
        s.decay[i] = ggml_spec_decay(column(o.bank_u, head, o.sched.pending[i], o.sched.pending_bank)[o.S_v]);
    }
    if (o.sched.fold) {
        run_head_fold<S>(o, s, head);
    } else {
        run_head_tree<S>(o, s, head);
    }
}

void zero_padding(const operands & o, const scratch & s, int64_t head) {
    for (int64_t i = 0; i < o.out->ne[1]; i++) {
        if (!s.visited[i]) {
            memset(column(o.out, i) + head * o.S_v, 0, o.S_v * sizeof(float));
        }
    }
}

void mark_visited(const operands & o, const scratch & s) {
    memset(s.visited, 0, o.out->ne[1]);
    for (int32_t i = 0; i < o.sched.n_nodes; i++) {
        s.visited[o.sched.fold ? i : o.sched.nodes[i].node] = 1;
    }
}

}  // namespace

size_t delta_net_tree_work_size(int n_threads, const ggml_tensor * op) {
    scratch s;
    return n_threads * layout(op).carve(nullptr, s);
}

void delta_net_tree_compute(const ggml_compute_params * params, ggml_tensor * op) {
    const operands o = read_operands(op);
    const layout   l(op);
    scratch        s;
    const size_t   n_bytes = l.carve(nullptr, s);
    l.carve((char *) params->wdata + params->ith * n_bytes, s);
    mark_visited(o, s);

    const range heads = share(o.H_v, 1, params->ith, params->nth);
    for (int64_t head = heads.begin; head < heads.end; head++) {
        switch (o.S_k) {
            case 64:  run_head<64>(o, s, head);  break;
            case 128: run_head<128>(o, s, head); break;
            default:  run_head<0>(o, s, head);   break;
        }
        zero_padding(o, s, head);
    }
}

}  // namespace ggml_spec
