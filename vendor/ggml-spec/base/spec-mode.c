#include "ggml-spec-impl.h"

enum ggml_spec_mode ggml_spec_mode_of(const struct ggml_tensor * t) {
    const int  mode   = ggml_spec_mode_fast(t);
    const bool agrees = (mode == GGML_SPEC_MODE_CONV_TREE      && t->op == GGML_OP_SSM_CONV) ||
                        (mode == GGML_SPEC_MODE_DELTA_NET_TREE && t->op == GGML_OP_GATED_DELTA_NET) ||
                        (mode == GGML_SPEC_MODE_TOP_K          && t->op == GGML_OP_TOP_K) ||
                        (mode == GGML_SPEC_MODE_ATTENTION      && t->op == GGML_OP_FLASH_ATTN_EXT) ||
                        (mode == GGML_SPEC_MODE_PACKED         && t->op == GGML_OP_NONE) ||
                        (mode == GGML_SPEC_MODE_BLOCK_CONV     && t->op == GGML_OP_SSM_CONV) ||
                        (mode == GGML_SPEC_MODE_ADD_RMS_NORM   && t->op == GGML_OP_NORM) ||
                        (mode == GGML_SPEC_MODE_GATED_RMS_NORM && t->op == GGML_OP_NORM);
    return agrees ? (enum ggml_spec_mode) mode : GGML_SPEC_MODE_NONE;
}

bool ggml_spec_is_mode(const struct ggml_tensor * t) {
    return ggml_spec_mode_of(t) != GGML_SPEC_MODE_NONE;
}

const char * ggml_spec_mode_name(const struct ggml_tensor * t) {
    switch (ggml_spec_mode_of(t)) {
        case GGML_SPEC_MODE_CONV_TREE:      return "SSM_CONV/TREE";
        case GGML_SPEC_MODE_DELTA_NET_TREE: return "GATED_DELTA_NET/TREE";
        case GGML_SPEC_MODE_TOP_K:          return "TOP_K/SORTED";
        case GGML_SPEC_MODE_ATTENTION:      return "FLASH_ATTN_EXT/LISTED";
        case GGML_SPEC_MODE_PACKED:         return "PACKED WEIGHTS";
        case GGML_SPEC_MODE_BLOCK_CONV:     return "SSM_CONV/BLOCK";
        case GGML_SPEC_MODE_ADD_RMS_NORM:   return "NORM/ADD_RMS";
        case GGML_SPEC_MODE_GATED_RMS_NORM: return "NORM/GATED_RMS";
        case GGML_SPEC_MODE_NONE:           break;
    }
    return "none";
}

bool ggml_spec_is_packed(const struct ggml_tensor * weights) {
    return ggml_spec_mode_of(weights->view_src != NULL ? weights->view_src : weights) == GGML_SPEC_MODE_PACKED;
}
