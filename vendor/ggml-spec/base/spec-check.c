#include "ggml-spec-impl.h"

#include <stdarg.h>
#include <stdio.h>

// One rule after another: the first broken one writes the message, so a check reads as a list.
struct checker {
    const char * op;
    bool         failed;
};

static _Thread_local char message[512];

#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static bool require(struct checker * c, bool holds, const char * format, ...) {
    if (holds || c->failed) {
        return !c->failed;
    }
    c->failed = true;
    const int n = snprintf(message, sizeof(message), "%s: ", c->op);
    va_list args;
    va_start(args, format);
    vsnprintf(message + n, sizeof(message) - n, format, args);
    va_end(args);
    return false;
}

static const char * verdict(const struct checker * c) {
    return c->failed ? message : NULL;
}

static bool require_tensor(struct checker * c, const char * name, const struct ggml_tensor * t, enum ggml_type type) {
    return require(c, t != NULL, "%s is missing", name) &&
           require(c, t->type == type, "%s has type %s, it must be %s", name, ggml_type_name(t->type), ggml_type_name(type)) &&
           require(c, t->nb[0] == ggml_type_size(t->type), "%s has a stride of %zu bytes along its first axis, it must be %zu",
                   name, t->nb[0], ggml_type_size(t->type));
}

static bool require_packed(struct checker * c, const char * name, const struct ggml_tensor * t, enum ggml_type type) {
    return require_tensor(c, name, t, type) &&
           require(c, ggml_is_contiguous(t), "%s is not contiguous, it is used in place or read as one block", name);
}

static bool require_axis(struct checker * c, const char * name, const struct ggml_tensor * t, int axis, int64_t expected,
                         const char * expected_name) {
    return require(c, t->ne[axis] == expected, "%s has ne[%d] = %lld, it must be %s = %lld", name, axis,
                   (long long) t->ne[axis], expected_name, (long long) expected);
}

static bool require_sched(struct checker * c, const struct ggml_tensor * sched, int64_t n_columns, int64_t n_rows) {
    const long long capacity = GGML_SPEC_SCHED_HEADER + GGML_SPEC_SCHED_NODE_WORDS * n_columns + n_rows;
    return require_packed(c, "sched", sched, GGML_TYPE_I32) &&
           require(c, ggml_nelements(sched) == sched->ne[0], "sched has more than one axis, it must be one row of words") &&
           require(c, sched->ne[0] >= capacity, "sched holds %lld words, %lld columns and %lld bank rows need %lld",
                   (long long) sched->ne[0], (long long) n_columns, (long long) n_rows, capacity);
}

static bool require_banks(struct checker * c, int64_t n_banks, int64_t n_slots) {
    return require(c, n_banks == 2 * n_slots, "%lld banks for %lld state slots, there must be two per slot",
                   (long long) n_banks, (long long) n_slots);
}

static bool require_lanes(struct checker * c, const char * name, int64_t n) {
    return require(c, n >= 16 && n % 16 == 0, "%s = %lld, it must be a positive multiple of 16", name, (long long) n);
}

const char * ggml_spec_check_conv_tree(
        const struct ggml_tensor * x,
        const struct ggml_tensor * w,
        const struct ggml_tensor * window,
        const struct ggml_tensor * bank_x,
        const struct ggml_tensor * sched) {
    struct checker c = { "conv_tree (SSM_CONV, mode TREE)", false };
    if (!require_tensor(&c, "x", x, GGML_TYPE_F32) || !require_packed(&c, "w", w, GGML_TYPE_F32) ||
        !require_packed(&c, "window", window, GGML_TYPE_F32) || !require_packed(&c, "bank_x", bank_x, GGML_TYPE_F32)) {
        return verdict(&c);
    }
    const int64_t C = x->ne[0];
    const int64_t K = w->ne[0];
    require(&c, x->ne[2] == 1 && x->ne[3] == 1, "x has more than two axes, it must be [C, N]");
    require(&c, w->ne[2] == 1 && w->ne[3] == 1, "w has more than two axes, it must be [K, C]");
    require(&c, window->ne[3] == 1, "window has four axes, it must be [K-1, C, n_slots]");
    require(&c, bank_x->ne[3] == 1, "bank_x has four axes, it must be [C, n_rows, n_banks]");
    require(&c, x->ne[1] >= 1, "x has no columns, a call without nodes still needs one padding column");
    require(&c, K >= 2 && K <= 8, "w has %lld taps, it must have 2 to 8", (long long) K);
    require_lanes(&c, "C", C);
    require_axis(&c, "w", w, 1, C, "C");
    require_axis(&c, "window", window, 0, K - 1, "K - 1");
    require_axis(&c, "window", window, 1, C, "C");
    require_axis(&c, "bank_x", bank_x, 0, C, "C");
    require_banks(&c, bank_x->ne[2], window->ne[2]);
    require_sched(&c, sched, x->ne[1], bank_x->ne[1]);
    return verdict(&c);
}

// Head size, heads and columns that the operands of delta_net_tree must agree on.
struct delta_dims {
    int64_t S_k, H_k, S_v, H_v, N;
};

static void require_delta_inputs(struct checker * c, const struct delta_dims * d, const struct ggml_tensor * q,
        const struct ggml_tensor * k, const struct ggml_tensor * v, const struct ggml_tensor * g,
        const struct ggml_tensor * beta) {
    require_lanes(c, "S_k", d->S_k);
    require_lanes(c, "S_v", d->S_v);
    require(c, d->N >= 1, "q has no columns, a call without nodes still needs one padding column");
    require(c, d->H_k >= 1 && d->H_v >= 1 && d->H_v % d->H_k == 0, "H_v = %lld is not a multiple of H_k = %lld", (long long) d->H_v, (long long) d->H_k);
    require(c, q->ne[3] == 1 && k->ne[3] == 1 && v->ne[3] == 1, "q, k or v has four axes, each must be [S, H, N]");
    require_axis(c, "k", k, 0, d->S_k, "S_k");
    require_axis(c, "k", k, 1, d->H_k, "H_k");
    require_axis(c, "k", k, 2, d->N, "N of q");
    require_axis(c, "v", v, 2, d->N, "N of q");
    require(c, g->ne[2] == 1 && g->ne[3] == 1, "g has more than two axes, it must be [H_v, N]");
    require_axis(c, "g", g, 0, d->H_v, "H_v");
    require_axis(c, "g", g, 1, d->N, "N of q");
    require(c, beta->ne[2] == 1 && beta->ne[3] == 1, "beta has more than two axes, it must be [H_v, N]");
    require_axis(c, "beta", beta, 0, d->H_v, "H_v");
    require_axis(c, "beta", beta, 1, d->N, "N of q");
}

static void require_delta_state(struct checker * c, const struct delta_dims * d, const struct ggml_tensor * state,
        const struct ggml_tensor * bank_k, const struct ggml_tensor * bank_u) {
    require_axis(c, "state", state, 0, d->S_k, "S_k");
    require_axis(c, "state", state, 1, d->S_v, "S_v");
    require_axis(c, "state", state, 2, d->H_v, "H_v");
    require_axis(c, "bank_k", bank_k, 0, d->S_k, "S_k");
    require_axis(c, "bank_k", bank_k, 1, d->H_k, "H_k");
    require_axis(c, "bank_u", bank_u, 0, d->S_v + GGML_SPEC_BANK_U_EXTRA, "S_v + 4");
    require_axis(c, "bank_u", bank_u, 1, d->H_v, "H_v");
    require_axis(c, "bank_u", bank_u, 2, bank_k->ne[2], "n_rows of bank_k");
    require_axis(c, "bank_u", bank_u, 3, bank_k->ne[3], "n_banks of bank_k");
    require_banks(c, bank_k->ne[3], state->ne[3]);
}

const char * ggml_spec_check_delta_net_tree(
        const struct ggml_tensor * q,
        const struct ggml_tensor * k,
        const struct ggml_tensor * v,
        const struct ggml_tensor * g,
        const struct ggml_tensor * beta,
        const struct ggml_tensor * state,
        const struct ggml_tensor * bank_k,
        const struct ggml_tensor * bank_u,
        const struct ggml_tensor * sched) {
    struct checker c = { "delta_net_tree (GATED_DELTA_NET, mode TREE)", false };
    if (!require_tensor(&c, "q", q, GGML_TYPE_F32) || !require_tensor(&c, "k", k, GGML_TYPE_F32) ||
        !require_tensor(&c, "v", v, GGML_TYPE_F32) || !require_tensor(&c, "g", g, GGML_TYPE_F32) ||
        !require_tensor(&c, "beta", beta, GGML_TYPE_F32) || !require_packed(&c, "state", state, GGML_TYPE_F32) ||
        !require_packed(&c, "bank_k", bank_k, GGML_TYPE_F32) || !require_packed(&c, "bank_u", bank_u, GGML_TYPE_F32)) {
        return verdict(&c);
    }
    const struct delta_dims d = { q->ne[0], q->ne[1], v->ne[0], v->ne[1], q->ne[2] };
    require_delta_inputs(&c, &d, q, k, v, g, beta);
    require_delta_state(&c, &d, state, bank_k, bank_u);
    require_sched(&c, sched, d.N, bank_k->ne[2]);
    return verdict(&c);
}

const char * ggml_spec_check_raw_gates(const struct ggml_tensor * t, const struct ggml_tensor * gates) {
    struct checker c = { "set_raw_gates (GATED_DELTA_NET, mode TREE)", false };
    if (!require(&c, t != NULL && ggml_spec_mode_of(t) == GGML_SPEC_MODE_DELTA_NET_TREE,
                 "the tensor is not a result of delta_net_tree") ||
        !require_packed(&c, "gates", gates, GGML_TYPE_F32)) {
        return verdict(&c);
    }
    const int64_t H_v = t->src[GGML_SPEC_DELTA_SRC_V]->ne[1];
    require(&c, ggml_nelements(gates) == gates->ne[0], "gates has more than one axis, it must be [2*H_v]");
    require_axis(&c, "gates", gates, 0, 2 * H_v, "2*H_v");
    return verdict(&c);
}

const char * ggml_spec_check_top_k(const struct ggml_tensor * logits, int k) {
    struct checker c = { "top_k (TOP_K, mode SORTED)", false };
    if (!require_tensor(&c, "logits", logits, GGML_TYPE_F32)) {
        return verdict(&c);
    }
    require(&c, logits->ne[2] == 1 && logits->ne[3] == 1, "logits has more than two axes, it must be [V, N]");
    require(&c, logits->ne[1] >= 1, "logits has no rows");
    require(&c, logits->ne[0] <= INT32_MAX, "logits has rows of %lld values, ids are 32 bits", (long long) logits->ne[0]);
    require(&c, k >= 1 && k <= GGML_SPEC_TOP_K_MAX, "k = %d, it must be 1 to %d", k, GGML_SPEC_TOP_K_MAX);
    require(&c, logits->ne[0] >= k, "k = %d is more than the %lld values of a row", k, (long long) logits->ne[0]);
    return verdict(&c);
}
