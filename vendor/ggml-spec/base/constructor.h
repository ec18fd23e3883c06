// What the constructors of all modes do alike.
#pragma once

#include "ggml-spec-impl.h"

#include <stddef.h>

// A caller that asked the check first never gets here with a broken rule.
static inline void assert_fits(const char * broken_rule) {
    if (broken_rule != NULL) {
        GGML_ABORT("%s", broken_rule);
    }
}

static inline void set_mode(struct ggml_tensor * t, enum ggml_op op, enum ggml_spec_mode mode, int flags) {
    t->op = op;
    t->op_params[GGML_SPEC_PARAM_FLAGS] = flags;
    t->op_params[GGML_SPEC_PARAM_MAGIC] = GGML_SPEC_MAGIC;
    t->op_params[GGML_SPEC_PARAM_MODE]  = mode;
}

static inline bool is_f32_matrix(const struct ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float) && t->ne[2] == 1 && t->ne[3] == 1;
}
