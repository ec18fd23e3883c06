#include "mul-mat.h"

#include "mul-mat-f16.h"
#include "mul-mat-k.h"
#include "mul-mat-packed.h"
#include "mul-mat-q8.h"
#include "tiled/tiled.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

namespace ggml_spec {
namespace {

// Bytes of the activations of a column per 256 numbers; 0 for a weight type without integer kernels.
size_t act_bytes(ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q8_0: return sizeof(q8_0_kernel::act) * panel_blocks;
        case GGML_TYPE_Q4_K: return sizeof(k_kernel<q4_k_format>::act);
        case GGML_TYPE_Q5_K: return sizeof(k_kernel<q5_k_format>::act);
        case GGML_TYPE_Q6_K: return sizeof(k_kernel<q6_k_format>::act);
        default:             return 0;
    }
}

bool has_kernel(const ggml_tensor * weights) {
    return act_bytes(weights->type) > 0 || (weights->type == GGML_TYPE_F16 && weights->ne[0] % 16 == 0);
}

bool is_matrix_in_host_memory(const ggml_tensor * t) {
    const ggml_tensor * owner = t->view_src ? t->view_src : t;
    return t->ne[2] == 1 && t->ne[3] == 1 && ggml_is_contiguous(t) && owner->buffer && ggml_backend_buffer_is_host(owner->buffer);
}

}  // namespace

bool mul_mat_takes(const ggml_tensor * op) {
    const ggml_tensor * x = op->src[1];
    return has_kernel(op->src[0]) && is_matrix_in_host_memory(op->src[0]) &&
           x->type == GGML_TYPE_F32 && x->ne[2] == 1 && x->ne[3] == 1 && x->nb[0] == sizeof(float) &&
           op->type == GGML_TYPE_F32 && op->nb[0] == sizeof(float);
}

size_t mul_mat_work_size(int n_threads, const ggml_tensor * op) {
    const ggml_tensor * x    = op->src[1];
    const size_t        ours = (x->ne[0] + QK_K - 1) / QK_K * x->ne[1] * act_bytes(op->src[0]->type);
    // With the backend's use_ref set the node is upstream's, whose needs must then be met.
    const ggml_type     type     = ggml_get_type_traits_cpu(op->src[0]->type)->vec_dot_type;
    const size_t        upstream = padded(ggml_row_size(type, ggml_nelements(x))) +
                                   ggml_tiled_wdata_size(n_threads, const_cast<ggml_tensor *>(op));
    return std::max(ours, upstream);
}

void mul_mat_compute(const ggml_compute_params * params, ggml_tensor * op) {
    const ggml_tensor * w = op->src[0];
    GGML_ASSERT(mul_mat_takes(op) && "mul_mat: packed weights take f32 matrices only");
    const product       m = { w, op->src[1], op, params->wdata, w->ne[0] / block_size, w->ne[1], op->src[1]->ne[1] };
    switch (w->type) {
        case GGML_TYPE_Q8_0:
            if (ggml_spec_is_packed(w)) {
                run_packed(params, m);
            } else {
                run_integer_kernel<q8_0_kernel>(params, m);
            }
            break;
        case GGML_TYPE_Q4_K: run_integer_kernel<k_kernel<q4_k_format>>(params, m); break;
        case GGML_TYPE_Q5_K: run_integer_kernel<k_kernel<q5_k_format>>(params, m); break;
        case GGML_TYPE_Q6_K: run_integer_kernel<k_kernel<q6_k_format>>(params, m); break;
        case GGML_TYPE_F16:  run_half_kernel(params, m); break;
        default: GGML_ABORT("mul_mat: no kernel for weights of type %s", ggml_type_name(w->type));
    }
}

void packed_rows_compute(const ggml_compute_params * params, ggml_tensor * op) {
    const ggml_tensor * w        = op->src[0];
    const ggml_tensor * ids      = op->src[1];
    const int64_t       n_packed = w->ne[1] / tile_rows * tile_rows;
    for (int64_t i = params->ith; i < ids->ne[0]; i += params->nth) {
        const int64_t row = *(const int32_t *) ((const char *) ids->data + i * ids->nb[0]);
        GGML_ASSERT(row >= 0 && row < w->ne[1] && "get_rows: a row number beyond the packed matrix");
        if (row < n_packed) {
            unpack_row(column(op, i), (const uint8_t *) w->data, w->nb[1], row, w->ne[0] / block_size);
        } else {
            ggml_get_type_traits(w->type)->to_float((const char *) w->data + row * w->nb[1], column(op, i), w->ne[0]);
        }
    }
}

}  // namespace ggml_spec

int ggml_spec_pack_rows(void) {
    return ggml_spec::can_pack ? ggml_spec::tile_rows : 0;
}

bool ggml_spec_pack(struct ggml_tensor * weights) {
    using namespace ggml_spec;
    const bool is_plain = weights->op == GGML_OP_NONE && weights->view_src == nullptr && !ggml_spec_is_packed(weights);
    if (!can_pack || weights->type != GGML_TYPE_Q8_0 || !is_plain || !is_matrix_in_host_memory(weights)) {
        return false;
    }
    pack_scratch scratch;
    uint8_t * data = (uint8_t *) weights->data;
    for (int64_t row = 0; row + tile_rows <= weights->ne[1]; row += tile_rows) {
        pack_tile(data + row * weights->nb[1], weights->ne[0] / block_size, weights->nb[1], scratch);
    }
    weights->op_params[GGML_SPEC_PARAM_MAGIC] = GGML_SPEC_MAGIC;
    weights->op_params[GGML_SPEC_PARAM_MODE]  = GGML_SPEC_MODE_PACKED;
    return true;
}
