#include "spec-cpu.h"

#include "attention.h"
#include "ggml-backend-impl.h"
#include "mul-mat.h"
#include "traits.h"

namespace ggml_spec {

schedule read_schedule(const ggml_tensor * sched, int64_t n_columns, int64_t n_rows, int64_t n_slots) {
    const int32_t * words = (const int32_t *) sched->data;
    schedule s;
    s.n_nodes      = words[GGML_SPEC_SCHED_WORD_N_NODES];
    s.n_pending    = words[GGML_SPEC_SCHED_WORD_N_PENDING];
    s.pending_bank = words[GGML_SPEC_SCHED_WORD_PENDING_BANK];
    s.write_bank   = words[GGML_SPEC_SCHED_WORD_WRITE_BANK];
    s.state_slot   = words[GGML_SPEC_SCHED_WORD_STATE_SLOT];
    s.n_levels     = words[GGML_SPEC_SCHED_WORD_N_LEVELS];
    s.fold         = words[GGML_SPEC_SCHED_WORD_FOLD] != 0;
    s.nodes        = (const sched_node *) (words + GGML_SPEC_SCHED_HEADER);
    s.pending      = words + GGML_SPEC_SCHED_HEADER + GGML_SPEC_SCHED_NODE_WORDS * n_columns;

    GGML_ASSERT(words[GGML_SPEC_SCHED_WORD_VERSION] == GGML_SPEC_SCHED_VERSION && "schedule of another version");
    GGML_ASSERT(s.n_nodes >= 0 && s.n_nodes <= n_columns && "schedule names more nodes than columns");
    GGML_ASSERT((s.fold || s.n_nodes <= n_rows) && "schedule names more nodes than bank rows");
    GGML_ASSERT(s.n_pending >= 0 && s.n_pending <= n_rows && "schedule names more pending rows than bank rows");
    GGML_ASSERT(s.state_slot >= 0 && s.state_slot < n_slots && "schedule names a slot that does not exist");
    GGML_ASSERT(s.pending_bank >= 0 && s.pending_bank < 2 * n_slots && "schedule names a pending bank that does not exist");
    GGML_ASSERT(s.write_bank >= 0 && s.write_bank < 2 * n_slots && "schedule names a write bank that does not exist");
    GGML_ASSERT(s.n_levels >= 0 && s.n_levels <= ggml_spec_levels_max(s.n_nodes) && "schedule is deeper than heavy-light order");
    return s;
}

namespace {

struct kernel : ggml::cpu::tensor_traits {
    using work_size_fn = size_t (*)(int, const ggml_tensor *);
    using compute_fn   = void (*)(const ggml_compute_params *, ggml_tensor *);

    kernel(work_size_fn work_size, compute_fn compute) : work_size_(work_size), compute_(compute) {}

    bool work_size(int n_threads, const ggml_tensor * op, size_t & size) override {
        size = work_size_(n_threads, op);
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        if (params->use_ref && !ggml_spec_is_mode(op) && !ggml_spec_is_packed(op->src[0])) {
            return false;  // upstream can compute this one too
        }
        compute_(params, op);
        return true;
    }

    work_size_fn work_size_;
    compute_fn   compute_;
};

size_t no_work_size(int, const ggml_tensor *) {
    return 0;
}

// Asked for every node of every graph, so the common answer costs one comparison.
struct kernels : ggml::cpu::extra_buffer_type {
    bool supports_op(ggml_backend_dev_t, const ggml_tensor *) override { return false; }

    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * op) override {
        if (op->op == GGML_OP_GET_ROWS) {
            return ggml_spec_is_packed(op->src[0]) ? &packed_rows : nullptr;
        }
        if (op->op == GGML_OP_MUL_MAT) {
            return ggml_spec_is_packed(op->src[0]) || mul_mat_takes(op) ? &mul_mat : nullptr;
        }
        if (op->op_params[GGML_SPEC_PARAM_MAGIC] != GGML_SPEC_MAGIC) {
            return nullptr;
        }
        switch (ggml_spec_mode_of(op)) {
            case GGML_SPEC_MODE_CONV_TREE:      return &conv_tree;
            case GGML_SPEC_MODE_DELTA_NET_TREE: return &delta_net_tree;
            case GGML_SPEC_MODE_TOP_K:          return &top_k;
            case GGML_SPEC_MODE_ATTENTION:      return &attention;
            case GGML_SPEC_MODE_BLOCK_CONV:     return &block_conv;
            case GGML_SPEC_MODE_ADD_RMS_NORM:   return &add_rms_norm;
            case GGML_SPEC_MODE_GATED_RMS_NORM: return &gated_rms_norm;
            case GGML_SPEC_MODE_PACKED:
            case GGML_SPEC_MODE_NONE:           break;
        }
        return nullptr;
    }

    kernel conv_tree      { conv_tree_work_size,      conv_tree_compute };
    kernel delta_net_tree { delta_net_tree_work_size, delta_net_tree_compute };
    kernel block_conv     { no_work_size,             block_conv_compute };
    kernel add_rms_norm   { no_work_size,             add_rms_norm_compute };
    kernel gated_rms_norm { no_work_size,             gated_rms_norm_compute };
    kernel top_k          { top_k_work_size,          top_k_compute };
    kernel mul_mat        { mul_mat_work_size,        mul_mat_compute };
    kernel packed_rows    { no_work_size,             packed_rows_compute };
    kernel attention      { ggml_spec_cpu_attention_work_size, ggml_spec_cpu_attention };
};

const char * buffer_type_name(ggml_backend_buffer_type_t) {
    return "CPU_SPEC_KERNELS";
}

ggml_backend_buffer_t buffer_type_alloc(ggml_backend_buffer_type_t, size_t) {
    return nullptr;  // carries kernels, never tensors
}

size_t buffer_type_alignment(ggml_backend_buffer_type_t) {
    return 64;
}

bool register_kernels() {
    static kernels instance;
    static ggml_backend_buffer_type type = {};
    type.iface.get_name      = buffer_type_name;
    type.iface.alloc_buffer  = buffer_type_alloc;
    type.iface.get_alignment = buffer_type_alignment;
    type.context             = &instance;
    ggml_backend_cpu_get_extra_buffer_types().push_back(&type);
    return true;
}

}  // namespace
}  // namespace ggml_spec

void ggml_spec_init(void) {
    static const bool registered = ggml_spec::register_kernels();
    GGML_UNUSED(registered);
}
