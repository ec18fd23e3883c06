#pragma once

// Shared by the constructors and by the kernels of every backend; not part of the public interface.

#include "ggml-spec.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define GGML_SPEC_INLINE static __host__ __device__ __forceinline__
#else
#define GGML_SPEC_INLINE static inline
#endif

// Upstream reads the low words of these ops in several places, so the marks sit in the last ones.
#define GGML_SPEC_MAGIC 0x53504543  // "SPEC"

enum ggml_spec_param {
    GGML_SPEC_PARAM_EPS   = 12,  // f32 bits: the norms, and DELTA_NET_TREE with GGML_SPEC_FLAG_QK_L2NORM
    GGML_SPEC_PARAM_FLAGS = 13,  // GGML_SPEC_FLAG_*; TOP_K: k << 8 besides
    GGML_SPEC_PARAM_MAGIC = 14,
    GGML_SPEC_PARAM_MODE  = 15,
};

enum ggml_spec_flag {
    GGML_SPEC_FLAG_RAW_GATES = 1,
    GGML_SPEC_FLAG_QK_L2NORM = 2,
    GGML_SPEC_FLAG_LOGPROBS  = 4,
};

enum ggml_spec_conv_src {
    GGML_SPEC_CONV_SRC_X, GGML_SPEC_CONV_SRC_W, GGML_SPEC_CONV_SRC_WINDOW, GGML_SPEC_CONV_SRC_BANK_X,
    GGML_SPEC_CONV_SRC_SCHED,
};

enum ggml_spec_delta_src {
    GGML_SPEC_DELTA_SRC_Q, GGML_SPEC_DELTA_SRC_K, GGML_SPEC_DELTA_SRC_V, GGML_SPEC_DELTA_SRC_G,
    GGML_SPEC_DELTA_SRC_BETA, GGML_SPEC_DELTA_SRC_STATE, GGML_SPEC_DELTA_SRC_BANK_K, GGML_SPEC_DELTA_SRC_BANK_U,
    GGML_SPEC_DELTA_SRC_SCHED, GGML_SPEC_DELTA_SRC_GATES,
};

GGML_SPEC_INLINE int ggml_spec_mode_fast(const struct ggml_tensor * t) {
    return t->op_params[GGML_SPEC_PARAM_MAGIC] == GGML_SPEC_MAGIC ? t->op_params[GGML_SPEC_PARAM_MODE] : 0;
}

GGML_SPEC_INLINE int ggml_spec_flags(const struct ggml_tensor * t) {
    return t->op_params[GGML_SPEC_PARAM_FLAGS];
}

GGML_SPEC_INLINE float ggml_spec_eps(const struct ggml_tensor * t) {
    float eps;
    memcpy(&eps, &t->op_params[GGML_SPEC_PARAM_EPS], sizeof(eps));
    return eps;
}

// Deepest state stack that a heavy-light schedule of n nodes needs: floor(log2 n) + 1.
GGML_SPEC_INLINE int ggml_spec_levels_max(int64_t n) {
    int levels = 1;
    while (n > 1) {
        n >>= 1;
        levels++;
    }
    return levels;
}

// The gate formulas, for every kernel that applies them.
GGML_SPEC_INLINE float ggml_spec_log_decay(float alpha, float dt_bias, float a) {
    const float x = alpha + dt_bias;
    return (x > 20.0f ? x : log1pf(expf(x))) * a;
}

GGML_SPEC_INLINE float ggml_spec_write_strength(float b) {
    return 1.0f / (1.0f + expf(-b));
}

GGML_SPEC_INLINE float ggml_spec_decay(float log_g) {
    return expf(log_g);
}
