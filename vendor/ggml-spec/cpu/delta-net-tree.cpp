// Gated delta rule over a draft tree.
//
// A task is one value head, or a part of its state rows (columns of S) where heads do not divide among the threads. Rows
// do not depend on each other, so they are taken in groups that stay in the first cache while the whole schedule is
// walked; four rows at a time share the loads of k and q.

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

// Where a node's rows come from and go to; a leaf's state has no reader and is not stored.
struct rows_io {
    const float * src;
    float *       dst;  // may be src, or null for a leaf
};

// u = beta * (v - decay * S^T k), then the update and o = S^T q for four rows of S^T.
template <int64_t S, bool leaf>
void step4(const float * src, float * dst, int64_t S_k, const node_gate & gate, const float * k, const float * q,
           const float * v, float * u, float * o) {
    const int64_t s = width<S>::of(S_k);
    vec acc[4] = { splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f) };
    for (int64_t i = 0; i < s; i += lanes) {
        const vec kv = load(k + i);
        for (int j = 0; j < 4; j++) {
            acc[j] = madd(load(src + j * s + i), kv, acc[j]);
        }
    }
    float recalled[4];
    sums4(recalled, acc[0], acc[1], acc[2], acc[3]);
    vec uv[4];
    for (int j = 0; j < 4; j++) {
        u[j]   = gate.beta * (v[j] - gate.decay * recalled[j]);
        uv[j]  = splat(u[j]);
        acc[j] = splat(0.0f);
    }
    const vec g = splat(gate.decay);
    for (int64_t i = 0; i < s; i += lanes) {
        const vec kv = load(k + i);
        const vec qv = load(q + i);
        for (int j = 0; j < 4; j++) {
            const vec row = updated(load(src + j * s + i), g, kv, uv[j]);
            if (!leaf) {
                store(dst + j * s + i, row);
            }
            acc[j] = madd(row, qv, acc[j]);
        }
    }
    sums4(o, acc[0], acc[1], acc[2], acc[3]);
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

// State rows [begin, end) of one head.
struct rows {
    int64_t head;
    int64_t begin;
    int64_t end;

    int64_t n() const { return end - begin; }
};

float * durable_state(const operands & o, const rows & r) {
    return column(o.state, r.begin, r.head, o.sched.state_slot);
}

template <int64_t S>
void fold_pending(const operands & o, const scratch & s, const rows & r) {
    for (int32_t i = 0; i < o.sched.n_pending; i++) {
        const int32_t row = o.sched.pending[i];
        replay_rows<S>(durable_state(o, r), r.n(), o.S_k, s.decay[i],
                       column(o.bank_k, r.head % o.H_k, row, o.sched.pending_bank),
                       column(o.bank_u, r.head, row, o.sched.pending_bank) + r.begin);
    }
}

// One node, prepared at index `at`, on the rows of a group; its deltas go to deltas[0..n).
template <int64_t S, bool leaf>
void run_rows(const operands & o, const scratch & s, const rows & r, const rows_io & io, int64_t node, int64_t at, float * deltas) {
    const float * k   = s.k + at * o.S_k;
    const float * q   = s.q + at * o.S_k;
    const float * v   = column(o.v, r.head, node) + r.begin;
    float *       out = column(o.out, node) + r.head * o.S_v + r.begin;
    for (int64_t j = 0; j < r.n(); j += rows_step) {
        step4<S, leaf>(io.src + j * o.S_k, leaf ? nullptr : io.dst + j * o.S_k, o.S_k, s.gates[at], k, q, v + j, deltas + j, out + j);
    }
}

// No state is copied: a node reads where its parent's state lies and writes where its own is wanted.
template <int64_t S>
void walk_tree(const operands & o, const scratch & s, const rows & r) {
    const int64_t n_floats = r.n() * o.S_k;
    const float * current  = durable_state(o, r);
    for (int32_t i = 0; i < o.sched.n_nodes; i++) {
        const sched_node & visit  = o.sched.nodes[i];
        float *            deltas = column(o.bank_u, r.head, visit.node, o.sched.write_bank) + r.begin;
        const bool         is_read = i + 1 < o.sched.n_nodes && o.sched.nodes[i + 1].restore_level < 0;
        const rows_io io = {
            visit.restore_level >= 0 ? s.stack + visit.restore_level * n_floats : current,
            visit.save_level >= 0 ? s.stack + visit.save_level * n_floats : is_read ? s.live : nullptr,
        };
        if (io.dst) {
            run_rows<S, false>(o, s, r, io, visit.node, visit.node, deltas);
        } else {
            run_rows<S, true>(o, s, r, io, visit.node, visit.node, deltas);
        }
        current = io.dst;
    }
}

template <typename Fn>
void for_each_group(const operands & o, const rows & r, Fn fn) {
    const int64_t step = group_rows(o.S_k, o.S_v);
    for (int64_t begin = r.begin; begin < r.end; begin += step) {
        fn(rows { r.head, begin, std::min(begin + step, r.end) });
    }
}

// Key and log decay of every node; the deltas are written by the walk.
void write_bank(const operands & o, const scratch & s, int64_t head) {
    for (int32_t i = 0; i < o.sched.n_nodes; i++) {
        const int32_t node  = o.sched.nodes[i].node;
        float *       extra = column(o.bank_u, head, node, o.sched.write_bank) + o.S_v;
        extra[0] = s.gates[node].log_g;
        extra[1] = extra[2] = extra[3] = 0.0f;
        if (head < o.H_k) {
            memcpy(column(o.bank_k, head, node, o.sched.write_bank), s.k + node * o.S_k, o.S_k * sizeof(float));
        }
    }
}

template <int64_t S>
void run_tree(const operands & o, const scratch & s, const rows & r) {
    for (int32_t i = 0; i < o.sched.n_nodes; i++) {
        prepare_node(o, s, r.head, o.sched.nodes[i].node, o.sched.nodes[i].node);
    }
    for_each_group(o, r, [&](const rows & group) {
        fold_pending<S>(o, s, group);
        walk_tree<S>(o, s, group);
    });
    if (r.begin == 0) {
        write_bank(o, s, r.head);
    }
}

template <int64_t S>
void run_fold(const operands & o, const scratch & s, const rows & r) {
    fold_pending<S>(o, s, r);
    for (int64_t first = 0; first < o.sched.n_nodes; first += fold_block) {
        const int64_t n = std::min(fold_block, o.sched.n_nodes - first);
        for (int64_t i = 0; i < n; i++) {
            prepare_node(o, s, r.head, first + i, i);
        }
        for_each_group(o, r, [&](const rows & group) {
            const rows_io io = { durable_state(o, group), durable_state(o, group) };
            for (int64_t i = 0; i < n; i++) {
                run_rows<S, false>(o, s, group, io, first + i, i, s.live);
            }
        });
    }
}

template <int64_t S>
void run(const operands & o, const scratch & s, const rows & r) {
    for (int32_t i = 0; i < o.sched.n_pending; i++) {
        s.decay[i] = ggml_spec_decay(column(o.bank_u, r.head, o.sched.pending[i], o.sched.pending_bank)[o.S_v]);
    }
    if (o.sched.fold) {
        run_fold<S>(o, s, r);
    } else {
        run_tree<S>(o, s, r);
    }
}

void zero_padding(const operands & o, const scratch & s, const rows & r) {
    for (int64_t i = 0; i < o.out->ne[1]; i++) {
        if (!s.visited[i]) {
            memset(column(o.out, i) + r.head * o.S_v + r.begin, 0, r.n() * sizeof(float));
        }
    }
}

void mark_visited(const operands & o, const scratch & s) {
    memset(s.visited, 0, o.out->ne[1]);
    for (int32_t i = 0; i < o.sched.n_nodes; i++) {
        s.visited[o.sched.fold ? i : o.sched.nodes[i].node] = 1;
    }
}

// Parts per head: one where the heads divide among the threads, else enough for a fair share (every part prepares the
// nodes again, so not more than that).
int64_t parts_per_head(const operands & o, int nth) {
    int64_t parts = 1;
    while (parts < 8 && o.S_v % (2 * parts * rows_step) == 0 && (o.H_v * parts) % nth != 0 && o.H_v * parts < 4 * nth) {
        parts *= 2;
    }
    return parts;
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

    const int64_t parts = parts_per_head(o, params->nth);
    const int64_t n     = o.S_v / parts;
    const range   units = share(o.H_v * parts, 1, params->ith, params->nth);
    for (int64_t unit = units.begin; unit < units.end; unit++) {
        const int64_t begin = unit % parts * n;
        const rows    r     = { unit / parts, begin, begin + n };
        switch (o.S_k) {
            case 64:  run<64>(o, s, r);  break;
            case 128: run<128>(o, s, r); break;
            default:  run<0>(o, s, r);   break;
        }
        zero_padding(o, s, r);
    }
}

}  // namespace ggml_spec
