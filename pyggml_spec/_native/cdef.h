// Made by tools/make_cdef.py from the pinned headers and names.txt; not to be edited.

#define GGML_MAX_DIMS ...
#define GGML_MAX_SRC ...
#define GGML_MAX_OP_PARAMS ...
#define GGML_MAX_NAME ...
#define GGML_DEFAULT_GRAPH_SIZE ...
#define GGML_ROPE_TYPE_NORMAL ...
#define GGML_ROPE_TYPE_NEOX ...
#define GGML_ROPE_TYPE_MROPE ...
#define GGML_ROPE_TYPE_IMROPE ...
#define GGML_MROPE_SECTIONS ...
#define GGML_SPEC_ATTENTION_TILE ...
#define GGML_SPEC_BANK_U_EXTRA ...
#define GGML_SPEC_NODES_HEADER ...
#define GGML_SPEC_NODES_VERSION ...
#define GGML_SPEC_SCHED_HEADER ...
#define GGML_SPEC_SCHED_NODE_WORDS ...
#define GGML_SPEC_SCHED_VERSION ...
#define GGML_SPEC_TOP_K_MAX ...
typedef void (*ggml_abort_callback_t)(const char *error_message);
ggml_abort_callback_t ggml_set_abort_callback(ggml_abort_callback_t callback);
enum ggml_status
{
  GGML_STATUS_ALLOC_FAILED = -2,
  GGML_STATUS_FAILED = -1,
  GGML_STATUS_SUCCESS = 0,
  GGML_STATUS_ABORTED = 1
};
const char *ggml_status_to_string(enum ggml_status status);
typedef uint16_t ggml_fp16_t;
void ggml_fp16_to_fp32_row(const ggml_fp16_t *, float *, int64_t);
void ggml_fp32_to_fp16_row(const float *, ggml_fp16_t *, int64_t);
typedef struct 
{
  uint16_t bits;
} ggml_bf16_t;
void ggml_bf16_to_fp32_row(const ggml_bf16_t *, float *, int64_t);
void ggml_fp32_to_bf16_row(const float *, ggml_bf16_t *, int64_t);
enum ggml_type
{
  GGML_TYPE_F32 = 0,
  GGML_TYPE_F16 = 1,
  GGML_TYPE_Q4_0 = 2,
  GGML_TYPE_Q4_1 = 3,
  GGML_TYPE_Q5_0 = 6,
  GGML_TYPE_Q5_1 = 7,
  GGML_TYPE_Q8_0 = 8,
  GGML_TYPE_Q8_1 = 9,
  GGML_TYPE_Q2_K = 10,
  GGML_TYPE_Q3_K = 11,
  GGML_TYPE_Q4_K = 12,
  GGML_TYPE_Q5_K = 13,
  GGML_TYPE_Q6_K = 14,
  GGML_TYPE_Q8_K = 15,
  GGML_TYPE_IQ2_XXS = 16,
  GGML_TYPE_IQ2_XS = 17,
  GGML_TYPE_IQ3_XXS = 18,
  GGML_TYPE_IQ1_S = 19,
  GGML_TYPE_IQ4_NL = 20,
  GGML_TYPE_IQ3_S = 21,
  GGML_TYPE_IQ2_S = 22,
  GGML_TYPE_IQ4_XS = 23,
  GGML_TYPE_I8 = 24,
  GGML_TYPE_I16 = 25,
  GGML_TYPE_I32 = 26,
  GGML_TYPE_I64 = 27,
  GGML_TYPE_F64 = 28,
  GGML_TYPE_IQ1_M = 29,
  GGML_TYPE_BF16 = 30,
  GGML_TYPE_TQ1_0 = 34,
  GGML_TYPE_TQ2_0 = 35,
  GGML_TYPE_MXFP4 = 39,
  GGML_TYPE_NVFP4 = 40,
  GGML_TYPE_Q1_0 = 41,
  GGML_TYPE_Q2_0 = 42,
  GGML_TYPE_COUNT = 43
};
enum ggml_prec
{
  GGML_PREC_UNDEFINED = 0,
  GGML_PREC_DEFAULT = 0,
  GGML_PREC_F32 = 10,
  GGML_PREC_BF16 = 15,
  GGML_PREC_F16 = 20,
  GGML_PREC_Q8 = 30,
  GGML_PREC_Q4 = 40
};
enum ggml_op_hint
{
  GGML_HINT_NONE = 0,
  GGML_HINT_SRC0_IS_HADAMARD = 1
};
enum ggml_op
{
  GGML_OP_NONE = 0,
  GGML_OP_DUP,
  GGML_OP_ADD,
  GGML_OP_ADD_ID,
  GGML_OP_ADD1,
  GGML_OP_ACC,
  GGML_OP_SUB,
  GGML_OP_MUL,
  GGML_OP_DIV,
  GGML_OP_SQR,
  GGML_OP_SQRT,
  GGML_OP_LOG,
  GGML_OP_SIN,
  GGML_OP_COS,
  GGML_OP_SUM,
  GGML_OP_SUM_ROWS,
  GGML_OP_CUMSUM,
  GGML_OP_MEAN,
  GGML_OP_ARGMAX,
  GGML_OP_COUNT_EQUAL,
  GGML_OP_REPEAT,
  GGML_OP_REPEAT_BACK,
  GGML_OP_CONCAT,
  GGML_OP_SILU_BACK,
  GGML_OP_NORM,
  GGML_OP_RMS_NORM,
  GGML_OP_RMS_NORM_BACK,
  GGML_OP_GROUP_NORM,
  GGML_OP_L2_NORM,
  GGML_OP_MUL_MAT,
  GGML_OP_MUL_MAT_ID,
  GGML_OP_OUT_PROD,
  GGML_OP_SCALE,
  GGML_OP_SET,
  GGML_OP_CPY,
  GGML_OP_CONT,
  GGML_OP_RESHAPE,
  GGML_OP_VIEW,
  GGML_OP_PERMUTE,
  GGML_OP_TRANSPOSE,
  GGML_OP_GET_ROWS,
  GGML_OP_GET_ROWS_BACK,
  GGML_OP_SET_ROWS,
  GGML_OP_DIAG,
  GGML_OP_DIAG_MASK_INF,
  GGML_OP_DIAG_MASK_ZERO,
  GGML_OP_SOFT_MAX,
  GGML_OP_SOFT_MAX_BACK,
  GGML_OP_ROPE,
  GGML_OP_ROPE_BACK,
  GGML_OP_CLAMP,
  GGML_OP_CONV_TRANSPOSE_1D,
  GGML_OP_IM2COL,
  GGML_OP_IM2COL_BACK,
  GGML_OP_IM2COL_3D,
  GGML_OP_COL2IM_1D,
  GGML_OP_CONV_2D,
  GGML_OP_CONV_3D,
  GGML_OP_CONV_2D_DW,
  GGML_OP_CONV_TRANSPOSE_2D,
  GGML_OP_POOL_1D,
  GGML_OP_POOL_2D,
  GGML_OP_POOL_2D_BACK,
  GGML_OP_UPSCALE,
  GGML_OP_PAD,
  GGML_OP_PAD_REFLECT_1D,
  GGML_OP_ROLL,
  GGML_OP_ARANGE,
  GGML_OP_TIMESTEP_EMBEDDING,
  GGML_OP_ARGSORT,
  GGML_OP_TOP_K,
  GGML_OP_LEAKY_RELU,
  GGML_OP_TRI,
  GGML_OP_FILL,
  GGML_OP_FLASH_ATTN_EXT,
  GGML_OP_FLASH_ATTN_BACK,
  GGML_OP_SSM_CONV,
  GGML_OP_SSM_SCAN,
  GGML_OP_WIN_PART,
  GGML_OP_WIN_UNPART,
  GGML_OP_GET_REL_POS,
  GGML_OP_ADD_REL_POS,
  GGML_OP_RWKV_WKV6,
  GGML_OP_GATED_LINEAR_ATTN,
  GGML_OP_RWKV_WKV7,
  GGML_OP_SOLVE_TRI,
  GGML_OP_GATED_DELTA_NET,
  GGML_OP_LIGHTNING_INDEXER,
  GGML_OP_DSV4_HC_COMB,
  GGML_OP_DSV4_HC_PRE,
  GGML_OP_DSV4_HC_POST,
  GGML_OP_UNARY,
  GGML_OP_MAP_CUSTOM1,
  GGML_OP_MAP_CUSTOM2,
  GGML_OP_MAP_CUSTOM3,
  GGML_OP_CUSTOM,
  GGML_OP_CROSS_ENTROPY_LOSS,
  GGML_OP_CROSS_ENTROPY_LOSS_BACK,
  GGML_OP_OPT_STEP_ADAMW,
  GGML_OP_OPT_STEP_SGD,
  GGML_OP_GLU,
  GGML_OP_COUNT
};
enum ggml_unary_op
{
  GGML_UNARY_OP_ABS,
  GGML_UNARY_OP_SGN,
  GGML_UNARY_OP_NEG,
  GGML_UNARY_OP_STEP,
  GGML_UNARY_OP_TANH,
  GGML_UNARY_OP_ELU,
  GGML_UNARY_OP_RELU,
  GGML_UNARY_OP_SIGMOID,
  GGML_UNARY_OP_GELU,
  GGML_UNARY_OP_GELU_QUICK,
  GGML_UNARY_OP_SILU,
  GGML_UNARY_OP_HARDSWISH,
  GGML_UNARY_OP_HARDSIGMOID,
  GGML_UNARY_OP_EXP,
  GGML_UNARY_OP_EXPM1,
  GGML_UNARY_OP_SOFTPLUS,
  GGML_UNARY_OP_GELU_ERF,
  GGML_UNARY_OP_XIELU,
  GGML_UNARY_OP_FLOOR,
  GGML_UNARY_OP_CEIL,
  GGML_UNARY_OP_ROUND,
  GGML_UNARY_OP_TRUNC,
  GGML_UNARY_OP_COUNT
};
enum ggml_glu_op
{
  GGML_GLU_OP_REGLU,
  GGML_GLU_OP_GEGLU,
  GGML_GLU_OP_SWIGLU,
  GGML_GLU_OP_SWIGLU_OAI,
  GGML_GLU_OP_GEGLU_ERF,
  GGML_GLU_OP_GEGLU_QUICK,
  GGML_GLU_OP_SWIGLU_CLAMP,
  GGML_GLU_OP_COUNT
};
struct ggml_init_params
{
  size_t mem_size;
  void *mem_buffer;
  _Bool no_alloc;
};
struct ggml_tensor
{
  enum ggml_type type;
  struct ggml_backend_buffer *buffer;
  int64_t ne[4];
  size_t nb[4];
  enum ggml_op op;
  int32_t op_params[...];
  int32_t flags;
  struct ggml_tensor *src[10];
  struct ggml_tensor *view_src;
  size_t view_offs;
  void *data;
  char name[64];
  void *extra;
  char padding[8];
};
typedef _Bool (*ggml_abort_callback)(void *data);
const char *ggml_version(void);
const char *ggml_commit(void);
void ggml_time_init(void);
int64_t ggml_time_us(void);
int64_t ggml_nelements(const struct ggml_tensor *tensor);
int64_t ggml_nrows(const struct ggml_tensor *tensor);
size_t ggml_nbytes(const struct ggml_tensor *tensor);
int64_t ggml_blck_size(enum ggml_type type);
size_t ggml_type_size(enum ggml_type type);
size_t ggml_row_size(enum ggml_type type, int64_t ne);
double ggml_type_sizef(enum ggml_type type);
const char *ggml_type_name(enum ggml_type type);
const char *ggml_op_name(enum ggml_op op);
const char *ggml_op_desc(const struct ggml_tensor *t);
size_t ggml_element_size(const struct ggml_tensor *tensor);
_Bool ggml_is_quantized(enum ggml_type type);
_Bool ggml_is_transposed(const struct ggml_tensor *tensor);
_Bool ggml_is_permuted(const struct ggml_tensor *tensor);
_Bool ggml_is_view(const struct ggml_tensor *tensor);
int ggml_n_dims(const struct ggml_tensor *tensor);
_Bool ggml_is_contiguous(const struct ggml_tensor *tensor);
_Bool ggml_is_contiguous_1(const struct ggml_tensor *tensor);
_Bool ggml_is_contiguous_rows(const struct ggml_tensor *tensor);
_Bool ggml_are_same_shape(const struct ggml_tensor *t0, const struct ggml_tensor *t1);
_Bool ggml_can_repeat(const struct ggml_tensor *t0, const struct ggml_tensor *t1);
size_t ggml_tensor_overhead(void);
struct ggml_context *ggml_init(struct ggml_init_params params);
void ggml_reset(struct ggml_context *ctx);
void ggml_free(struct ggml_context *ctx);
size_t ggml_used_mem(const struct ggml_context *ctx);
struct ggml_tensor *ggml_new_tensor(struct ggml_context *ctx, enum ggml_type type, int n_dims, const int64_t *ne);
struct ggml_tensor *ggml_new_tensor_1d(struct ggml_context *ctx, enum ggml_type type, int64_t ne0);
struct ggml_tensor *ggml_new_tensor_2d(struct ggml_context *ctx, enum ggml_type type, int64_t ne0, int64_t ne1);
struct ggml_tensor *ggml_new_tensor_3d(struct ggml_context *ctx, enum ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2);
struct ggml_tensor *ggml_new_tensor_4d(struct ggml_context *ctx, enum ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3);
struct ggml_tensor *ggml_dup_tensor(struct ggml_context *ctx, const struct ggml_tensor *src);
struct ggml_tensor *ggml_view_tensor(struct ggml_context *ctx, struct ggml_tensor *src);
struct ggml_tensor *ggml_get_first_tensor(const struct ggml_context *ctx);
struct ggml_tensor *ggml_get_next_tensor(const struct ggml_context *ctx, struct ggml_tensor *tensor);
struct ggml_tensor *ggml_get_tensor(struct ggml_context *ctx, const char *name);
const char *ggml_get_name(const struct ggml_tensor *tensor);
struct ggml_tensor *ggml_set_name(struct ggml_tensor *tensor, const char *name);
void ggml_set_input(struct ggml_tensor *tensor);
void ggml_set_output(struct ggml_tensor *tensor);
void ggml_set_param(struct ggml_tensor *tensor);
struct ggml_tensor *ggml_dup(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_add(struct ggml_context *ctx, struct ggml_tensor *a, struct ggml_tensor *b);
struct ggml_tensor *ggml_add1(struct ggml_context *ctx, struct ggml_tensor *a, struct ggml_tensor *b);
struct ggml_tensor *ggml_sub(struct ggml_context *ctx, struct ggml_tensor *a, struct ggml_tensor *b);
struct ggml_tensor *ggml_mul(struct ggml_context *ctx, struct ggml_tensor *a, struct ggml_tensor *b);
struct ggml_tensor *ggml_div(struct ggml_context *ctx, struct ggml_tensor *a, struct ggml_tensor *b);
struct ggml_tensor *ggml_sqr(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_sqrt(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_log(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_softplus(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_sum_rows(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_argmax(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_repeat(struct ggml_context *ctx, struct ggml_tensor *a, struct ggml_tensor *b);
struct ggml_tensor *ggml_repeat_4d(struct ggml_context *ctx, struct ggml_tensor *a, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3);
struct ggml_tensor *ggml_concat(struct ggml_context *ctx, struct ggml_tensor *a, struct ggml_tensor *b, int dim);
struct ggml_tensor *ggml_neg(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_tanh(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_relu(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_sigmoid(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_gelu(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_silu(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_exp(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_swiglu(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_swiglu_split(struct ggml_context *ctx, struct ggml_tensor *a, struct ggml_tensor *b);
struct ggml_tensor *ggml_norm(struct ggml_context *ctx, struct ggml_tensor *a, float eps);
struct ggml_tensor *ggml_rms_norm(struct ggml_context *ctx, struct ggml_tensor *a, float eps);
struct ggml_tensor *ggml_l2_norm(struct ggml_context *ctx, struct ggml_tensor *a, float eps);
_Bool ggml_prec_set_acc(struct ggml_tensor *a, enum ggml_prec prec);
struct ggml_tensor *ggml_mul_mat(struct ggml_context *ctx, struct ggml_tensor *a, struct ggml_tensor *b);
void ggml_mul_mat_set_hint(struct ggml_tensor *a, enum ggml_op_hint hint);
struct ggml_tensor *ggml_scale(struct ggml_context *ctx, struct ggml_tensor *a, float s);
struct ggml_tensor *ggml_scale_bias(struct ggml_context *ctx, struct ggml_tensor *a, float s, float b);
struct ggml_tensor *ggml_cpy(struct ggml_context *ctx, struct ggml_tensor *a, struct ggml_tensor *b);
struct ggml_tensor *ggml_cast(struct ggml_context *ctx, struct ggml_tensor *a, enum ggml_type type);
struct ggml_tensor *ggml_cont(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_cont_2d(struct ggml_context *ctx, struct ggml_tensor *a, int64_t ne0, int64_t ne1);
struct ggml_tensor *ggml_cont_3d(struct ggml_context *ctx, struct ggml_tensor *a, int64_t ne0, int64_t ne1, int64_t ne2);
struct ggml_tensor *ggml_reshape(struct ggml_context *ctx, struct ggml_tensor *a, struct ggml_tensor *b);
struct ggml_tensor *ggml_reshape_1d(struct ggml_context *ctx, struct ggml_tensor *a, int64_t ne0);
struct ggml_tensor *ggml_reshape_2d(struct ggml_context *ctx, struct ggml_tensor *a, int64_t ne0, int64_t ne1);
struct ggml_tensor *ggml_reshape_3d(struct ggml_context *ctx, struct ggml_tensor *a, int64_t ne0, int64_t ne1, int64_t ne2);
struct ggml_tensor *ggml_reshape_4d(struct ggml_context *ctx, struct ggml_tensor *a, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3);
struct ggml_tensor *ggml_view_1d(struct ggml_context *ctx, struct ggml_tensor *a, int64_t ne0, size_t offset);
struct ggml_tensor *ggml_view_2d(struct ggml_context *ctx, struct ggml_tensor *a, int64_t ne0, int64_t ne1, size_t nb1, size_t offset);
struct ggml_tensor *ggml_view_3d(struct ggml_context *ctx, struct ggml_tensor *a, int64_t ne0, int64_t ne1, int64_t ne2, size_t nb1, size_t nb2, size_t offset);
struct ggml_tensor *ggml_view_4d(struct ggml_context *ctx, struct ggml_tensor *a, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3, size_t nb1, size_t nb2, size_t nb3, size_t offset);
struct ggml_tensor *ggml_transpose(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_get_rows(struct ggml_context *ctx, struct ggml_tensor *a, struct ggml_tensor *b);
struct ggml_tensor *ggml_set_rows(struct ggml_context *ctx, struct ggml_tensor *a, struct ggml_tensor *b, struct ggml_tensor *c);
struct ggml_tensor *ggml_clamp(struct ggml_context *ctx, struct ggml_tensor *a, float min, float max);
struct ggml_tensor *ggml_soft_max(struct ggml_context *ctx, struct ggml_tensor *a);
struct ggml_tensor *ggml_soft_max_ext(struct ggml_context *ctx, struct ggml_tensor *a, struct ggml_tensor *mask, float scale, float max_bias);
struct ggml_tensor *ggml_rope_ext(struct ggml_context *ctx, struct ggml_tensor *a, struct ggml_tensor *b, struct ggml_tensor *c, int n_dims, int mode, int n_ctx_orig, float freq_base, float freq_scale, float ext_factor, float attn_factor, float beta_fast, float beta_slow);
struct ggml_tensor *ggml_rope_multi(struct ggml_context *ctx, struct ggml_tensor *a, struct ggml_tensor *b, struct ggml_tensor *c, int n_dims, int sections[4], int mode, int n_ctx_orig, float freq_base, float freq_scale, float ext_factor, float attn_factor, float beta_fast, float beta_slow);
struct ggml_tensor *ggml_pad(struct ggml_context *ctx, struct ggml_tensor *a, int p0, int p1, int p2, int p3);
enum ggml_sort_order
{
  GGML_SORT_ORDER_ASC,
  GGML_SORT_ORDER_DESC
};
struct ggml_tensor *ggml_argsort(struct ggml_context *ctx, struct ggml_tensor *a, enum ggml_sort_order order);
struct ggml_tensor *ggml_argsort_top_k(struct ggml_context *ctx, struct ggml_tensor *a, int k);
struct ggml_tensor *ggml_top_k(struct ggml_context *ctx, struct ggml_tensor *a, int k);
struct ggml_tensor *ggml_arange(struct ggml_context *ctx, float start, float stop, float step);
struct ggml_tensor *ggml_ssm_conv(struct ggml_context *ctx, struct ggml_tensor *sx, struct ggml_tensor *c);
struct ggml_tensor *ggml_unary(struct ggml_context *ctx, struct ggml_tensor *a, enum ggml_unary_op op);
struct ggml_tensor *ggml_gated_delta_net(struct ggml_context *ctx, struct ggml_tensor *q, struct ggml_tensor *k, struct ggml_tensor *v, struct ggml_tensor *g, struct ggml_tensor *beta, struct ggml_tensor *state, int64_t K);
void ggml_build_forward_expand(struct ggml_cgraph *cgraph, struct ggml_tensor *tensor);
struct ggml_cgraph *ggml_new_graph(struct ggml_context *ctx);
struct ggml_cgraph *ggml_new_graph_custom(struct ggml_context *ctx, size_t size, _Bool grads);
void ggml_graph_clear(struct ggml_cgraph *cgraph);
int ggml_graph_size(struct ggml_cgraph *cgraph);
struct ggml_tensor *ggml_graph_node(struct ggml_cgraph *cgraph, int i);
int ggml_graph_n_nodes(struct ggml_cgraph *cgraph);
size_t ggml_graph_overhead(void);
size_t ggml_graph_overhead_custom(size_t size, _Bool grads);
struct ggml_tensor *ggml_graph_get_tensor(const struct ggml_cgraph *cgraph, const char *name);
void ggml_quantize_init(enum ggml_type type);
void ggml_quantize_free(void);
_Bool ggml_quantize_requires_imatrix(enum ggml_type type);
size_t ggml_quantize_chunk(enum ggml_type type, const float *src, void *dst, int64_t start, int64_t nrows, int64_t n_per_row, const float *imatrix);
typedef void (*ggml_to_float_t)(const void * restrict x, float * restrict y, int64_t k);
typedef void (*ggml_from_float_t)(const float * restrict x, void * restrict y, int64_t k);
struct ggml_type_traits
{
  const char *type_name;
  int64_t blck_size;
  int64_t blck_size_interleave;
  size_t type_size;
  _Bool is_quantized;
  ggml_to_float_t to_float;
  ggml_from_float_t from_float_ref;
};
const struct ggml_type_traits *ggml_get_type_traits(enum ggml_type type);
enum ggml_sched_priority
{
  GGML_SCHED_PRIO_LOW = -1,
  GGML_SCHED_PRIO_NORMAL,
  GGML_SCHED_PRIO_MEDIUM,
  GGML_SCHED_PRIO_HIGH,
  GGML_SCHED_PRIO_REALTIME
};
struct ggml_threadpool_params
{
  _Bool cpumask[512];
  int n_threads;
  enum ggml_sched_priority prio;
  uint32_t poll;
  _Bool strict_cpu;
  _Bool paused;
};
typedef struct ggml_threadpool *ggml_threadpool_t;
struct ggml_threadpool_params ggml_threadpool_params_default(int n_threads);
void ggml_threadpool_params_init(struct ggml_threadpool_params *p, int n_threads);
typedef struct ggml_backend_buffer_type *ggml_backend_buffer_type_t;
typedef struct ggml_backend_buffer *ggml_backend_buffer_t;
typedef struct ggml_backend *ggml_backend_t;
struct ggml_tallocr
{
  ggml_backend_buffer_t buffer;
  void *base;
  size_t alignment;
  size_t offset;
};
struct ggml_tallocr ggml_tallocr_new(ggml_backend_buffer_t buffer);
enum ggml_status ggml_tallocr_alloc(struct ggml_tallocr *talloc, struct ggml_tensor *tensor);
typedef struct ggml_gallocr *ggml_gallocr_t;
ggml_gallocr_t ggml_gallocr_new(ggml_backend_buffer_type_t buft);
ggml_gallocr_t ggml_gallocr_new_n(ggml_backend_buffer_type_t *bufts, int n_bufs);
void ggml_gallocr_free(ggml_gallocr_t galloc);
_Bool ggml_gallocr_reserve(ggml_gallocr_t galloc, struct ggml_cgraph *graph);
_Bool ggml_gallocr_alloc_graph(ggml_gallocr_t galloc, struct ggml_cgraph *graph);
size_t ggml_gallocr_get_buffer_size(ggml_gallocr_t galloc, int buffer_id);
size_t ggml_backend_alloc_ctx_tensors_from_buft_size(struct ggml_context *ctx, ggml_backend_buffer_type_t buft);
struct ggml_backend_buffer *ggml_backend_alloc_ctx_tensors_from_buft(struct ggml_context *ctx, ggml_backend_buffer_type_t buft);
struct ggml_backend_buffer *ggml_backend_alloc_ctx_tensors(struct ggml_context *ctx, ggml_backend_t backend);
typedef struct ggml_backend_reg *ggml_backend_reg_t;
typedef struct ggml_backend_device *ggml_backend_dev_t;
const char *ggml_backend_buft_name(ggml_backend_buffer_type_t buft);
ggml_backend_buffer_t ggml_backend_buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size);
size_t ggml_backend_buft_get_alignment(ggml_backend_buffer_type_t buft);
size_t ggml_backend_buft_get_max_size(ggml_backend_buffer_type_t buft);
size_t ggml_backend_buft_get_alloc_size(ggml_backend_buffer_type_t buft, const struct ggml_tensor *tensor);
_Bool ggml_backend_buft_is_host(ggml_backend_buffer_type_t buft);
ggml_backend_dev_t ggml_backend_buft_get_device(ggml_backend_buffer_type_t buft);
enum ggml_backend_buffer_usage
{
  GGML_BACKEND_BUFFER_USAGE_ANY = 0,
  GGML_BACKEND_BUFFER_USAGE_WEIGHTS = 1,
  GGML_BACKEND_BUFFER_USAGE_COMPUTE = 2
};
const char *ggml_backend_buffer_name(ggml_backend_buffer_t buffer);
void ggml_backend_buffer_free(ggml_backend_buffer_t buffer);
void *ggml_backend_buffer_get_base(ggml_backend_buffer_t buffer);
size_t ggml_backend_buffer_get_size(ggml_backend_buffer_t buffer);
enum ggml_status ggml_backend_buffer_init_tensor(ggml_backend_buffer_t buffer, struct ggml_tensor *tensor);
void ggml_backend_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value);
_Bool ggml_backend_buffer_is_host(ggml_backend_buffer_t buffer);
void ggml_backend_buffer_set_usage(ggml_backend_buffer_t buffer, enum ggml_backend_buffer_usage usage);
ggml_backend_buffer_type_t ggml_backend_buffer_get_type(ggml_backend_buffer_t buffer);
void ggml_backend_tensor_copy(const struct ggml_tensor *src, struct ggml_tensor *dst);
const char *ggml_backend_name(ggml_backend_t backend);
void ggml_backend_free(ggml_backend_t backend);
ggml_backend_buffer_type_t ggml_backend_get_default_buffer_type(ggml_backend_t backend);
ggml_backend_buffer_t ggml_backend_alloc_buffer(ggml_backend_t backend, size_t size);
size_t ggml_backend_get_alignment(ggml_backend_t backend);
void ggml_backend_tensor_set_async(ggml_backend_t backend, struct ggml_tensor *tensor, const void *data, size_t offset, size_t size);
void ggml_backend_tensor_get_async(ggml_backend_t backend, const struct ggml_tensor *tensor, void *data, size_t offset, size_t size);
void ggml_backend_tensor_set(struct ggml_tensor *tensor, const void *data, size_t offset, size_t size);
void ggml_backend_tensor_get(const struct ggml_tensor *tensor, void *data, size_t offset, size_t size);
void ggml_backend_tensor_memset(struct ggml_tensor *tensor, uint8_t value, size_t offset, size_t size);
void ggml_backend_synchronize(ggml_backend_t backend);
enum ggml_status ggml_backend_graph_compute(ggml_backend_t backend, struct ggml_cgraph *cgraph);
enum ggml_status ggml_backend_graph_compute_async(ggml_backend_t backend, struct ggml_cgraph *cgraph);
_Bool ggml_backend_supports_op(ggml_backend_t backend, const struct ggml_tensor *op);
_Bool ggml_backend_supports_buft(ggml_backend_t backend, ggml_backend_buffer_type_t buft);
void ggml_backend_tensor_copy_async(ggml_backend_t backend_src, ggml_backend_t backend_dst, const struct ggml_tensor *src, struct ggml_tensor *dst);
ggml_backend_dev_t ggml_backend_get_device(ggml_backend_t backend);
enum ggml_backend_dev_type
{
  GGML_BACKEND_DEVICE_TYPE_CPU,
  GGML_BACKEND_DEVICE_TYPE_GPU,
  GGML_BACKEND_DEVICE_TYPE_IGPU,
  GGML_BACKEND_DEVICE_TYPE_ACCEL,
  GGML_BACKEND_DEVICE_TYPE_META
};
struct ggml_backend_dev_caps
{
  _Bool async;
  _Bool host_buffer;
  _Bool buffer_from_host_ptr;
  _Bool events;
  _Bool mmap_support;
};
struct ggml_backend_dev_props
{
  const char *name;
  const char *description;
  size_t memory_free;
  size_t memory_total;
  enum ggml_backend_dev_type type;
  const char *device_id;
  struct ggml_backend_dev_caps caps;
};
const char *ggml_backend_dev_name(ggml_backend_dev_t device);
const char *ggml_backend_dev_description(ggml_backend_dev_t device);
void ggml_backend_dev_memory(ggml_backend_dev_t device, size_t *free, size_t *total);
enum ggml_backend_dev_type ggml_backend_dev_type(ggml_backend_dev_t device);
void ggml_backend_dev_get_props(ggml_backend_dev_t device, struct ggml_backend_dev_props *props);
ggml_backend_reg_t ggml_backend_dev_backend_reg(ggml_backend_dev_t device);
ggml_backend_t ggml_backend_dev_init(ggml_backend_dev_t device, const char *params);
ggml_backend_buffer_type_t ggml_backend_dev_buffer_type(ggml_backend_dev_t device);
ggml_backend_buffer_type_t ggml_backend_dev_host_buffer_type(ggml_backend_dev_t device);
ggml_backend_buffer_t ggml_backend_dev_buffer_from_host_ptr(ggml_backend_dev_t device, void *ptr, size_t size, size_t max_tensor_size);
_Bool ggml_backend_dev_supports_op(ggml_backend_dev_t device, const struct ggml_tensor *op);
_Bool ggml_backend_dev_supports_buft(ggml_backend_dev_t device, ggml_backend_buffer_type_t buft);
const char *ggml_backend_reg_name(ggml_backend_reg_t reg);
size_t ggml_backend_reg_dev_count(ggml_backend_reg_t reg);
ggml_backend_dev_t ggml_backend_reg_dev_get(ggml_backend_reg_t reg, size_t index);
void *ggml_backend_reg_get_proc_address(ggml_backend_reg_t reg, const char *name);
size_t ggml_backend_reg_count(void);
ggml_backend_reg_t ggml_backend_reg_get(size_t index);
size_t ggml_backend_dev_count(void);
ggml_backend_dev_t ggml_backend_dev_get(size_t index);
ggml_backend_dev_t ggml_backend_dev_by_name(const char *name);
ggml_backend_dev_t ggml_backend_dev_by_type(enum ggml_backend_dev_type type);
enum ggml_status ggml_backend_tensor_alloc(ggml_backend_buffer_t buffer, struct ggml_tensor *tensor, void *addr);
enum ggml_status ggml_backend_view_init(struct ggml_tensor *tensor);
ggml_backend_buffer_t ggml_backend_cpu_buffer_from_ptr(void *ptr, size_t size);
ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type(void);
struct ggml_threadpool *ggml_threadpool_new(struct ggml_threadpool_params *params);
void ggml_threadpool_free(struct ggml_threadpool *threadpool);
void ggml_threadpool_pause(struct ggml_threadpool *threadpool);
void ggml_threadpool_resume(struct ggml_threadpool *threadpool);
int ggml_cpu_has_sse3(void);
int ggml_cpu_has_ssse3(void);
int ggml_cpu_has_avx(void);
int ggml_cpu_has_avx_vnni(void);
int ggml_cpu_has_avx2(void);
int ggml_cpu_has_bmi2(void);
int ggml_cpu_has_f16c(void);
int ggml_cpu_has_fma(void);
int ggml_cpu_has_avx512(void);
int ggml_cpu_has_avx512_vbmi(void);
int ggml_cpu_has_avx512_vnni(void);
int ggml_cpu_has_avx512_bf16(void);
int ggml_cpu_has_neon(void);
int ggml_cpu_has_dotprod(void);
int ggml_cpu_has_llamafile(void);
typedef void (*ggml_vec_dot_t)(int n, float * restrict s, size_t bs, const void * restrict x, size_t bx, const void * restrict y, size_t by, int nrc);
struct ggml_type_traits_cpu
{
  ggml_from_float_t from_float;
  ggml_vec_dot_t vec_dot;
  enum ggml_type vec_dot_type;
  int64_t nrows;
};
const struct ggml_type_traits_cpu *ggml_get_type_traits_cpu(enum ggml_type type);
void ggml_cpu_init(void);
ggml_backend_t ggml_backend_cpu_init(void);
_Bool ggml_backend_is_cpu(ggml_backend_t backend);
void ggml_backend_cpu_set_n_threads(ggml_backend_t backend_cpu, int n_threads);
void ggml_backend_cpu_set_threadpool(ggml_backend_t backend_cpu, ggml_threadpool_t threadpool);
void ggml_backend_cpu_set_abort_callback(ggml_backend_t backend_cpu, ggml_abort_callback abort_callback, void *abort_callback_data);
void ggml_backend_cpu_set_use_ref(ggml_backend_t backend_cpu, _Bool use_ref);
enum ggml_spec_sched_word
{
  GGML_SPEC_SCHED_WORD_VERSION = 0,
  GGML_SPEC_SCHED_WORD_N_NODES = 1,
  GGML_SPEC_SCHED_WORD_N_PENDING = 2,
  GGML_SPEC_SCHED_WORD_PENDING_BANK = 3,
  GGML_SPEC_SCHED_WORD_WRITE_BANK = 4,
  GGML_SPEC_SCHED_WORD_STATE_SLOT = 5,
  GGML_SPEC_SCHED_WORD_N_LEVELS = 6,
  GGML_SPEC_SCHED_WORD_FOLD = 7
};
enum ggml_spec_mode
{
  GGML_SPEC_MODE_NONE = 0,
  GGML_SPEC_MODE_CONV_TREE = 1,
  GGML_SPEC_MODE_DELTA_NET_TREE = 2,
  GGML_SPEC_MODE_TOP_K = 3,
  GGML_SPEC_MODE_ATTENTION = 4,
  GGML_SPEC_MODE_PACKED = 5,
  GGML_SPEC_MODE_BLOCK_CONV = 6,
  GGML_SPEC_MODE_ADD_RMS_NORM = 7,
  GGML_SPEC_MODE_GATED_RMS_NORM = 8
};
void ggml_spec_init(void);
_Bool ggml_spec_is_mode(const struct ggml_tensor *t);
enum ggml_spec_mode ggml_spec_mode_of(const struct ggml_tensor *t);
const char *ggml_spec_mode_name(const struct ggml_tensor *t);
_Bool ggml_spec_pack(struct ggml_tensor *weights);
int ggml_spec_pack_rows(void);
_Bool ggml_spec_is_packed(const struct ggml_tensor *weights);
const char *ggml_spec_check_conv_tree(const struct ggml_tensor *x, const struct ggml_tensor *w, const struct ggml_tensor *window, const struct ggml_tensor *bank_x, const struct ggml_tensor *sched);
const char *ggml_spec_check_delta_net_tree(const struct ggml_tensor *q, const struct ggml_tensor *k, const struct ggml_tensor *v, const struct ggml_tensor *g, const struct ggml_tensor *beta, const struct ggml_tensor *state, const struct ggml_tensor *bank_k, const struct ggml_tensor *bank_u, const struct ggml_tensor *sched);
const char *ggml_spec_check_raw_gates(const struct ggml_tensor *t, const struct ggml_tensor *gates);
const char *ggml_spec_check_top_k(const struct ggml_tensor *logits, int k);
struct ggml_tensor *ggml_spec_conv_tree(struct ggml_context *ctx, struct ggml_tensor *x, struct ggml_tensor *w, struct ggml_tensor *window, struct ggml_tensor *bank_x, struct ggml_tensor *sched);
struct ggml_tensor *ggml_spec_delta_net_tree(struct ggml_context *ctx, struct ggml_tensor *q, struct ggml_tensor *k, struct ggml_tensor *v, struct ggml_tensor *g, struct ggml_tensor *beta, struct ggml_tensor *state, struct ggml_tensor *bank_k, struct ggml_tensor *bank_u, struct ggml_tensor *sched);
void ggml_spec_set_raw_gates(struct ggml_tensor *t, struct ggml_tensor *gates);
void ggml_spec_set_qk_l2norm(struct ggml_tensor *t, float eps);
struct ggml_tensor *ggml_spec_top_k(struct ggml_context *ctx, struct ggml_tensor *logits, int k, _Bool logprobs);
enum ggml_spec_visibility
{
  GGML_SPEC_VISIBLE_ANCESTORS = 0,
  GGML_SPEC_VISIBLE_BLOCK = 1,
  GGML_SPEC_VISIBLE_PREFIX = 2
};
struct ggml_tensor *ggml_spec_attention(struct ggml_context *ctx, struct ggml_tensor *q, struct ggml_tensor *k, struct ggml_tensor *v, struct ggml_tensor *nodes, struct ggml_tensor *committed, float scale, int window, int visibility);
void ggml_spec_attention_set_gate(struct ggml_tensor *attention, struct ggml_tensor *gate);
const char *ggml_spec_check_attention(const struct ggml_tensor *q, const struct ggml_tensor *k, const struct ggml_tensor *v, const struct ggml_tensor *nodes, const struct ggml_tensor *committed, const struct ggml_tensor *gate, int window, int visibility);
struct ggml_tensor *ggml_spec_block_conv(struct ggml_context *ctx, struct ggml_tensor *x, struct ggml_tensor *dynamic, struct ggml_tensor *base, int side);
const char *ggml_spec_check_block_conv(const struct ggml_tensor *x, const struct ggml_tensor *dynamic, const struct ggml_tensor *base, int side);
void ggml_spec_graph_seal(struct ggml_cgraph *graph);
struct ggml_tensor *ggml_spec_add_rms_norm(struct ggml_context *ctx, struct ggml_tensor *a, struct ggml_tensor *b, struct ggml_tensor *weight, float eps);
struct ggml_tensor *ggml_spec_gated_rms_norm(struct ggml_context *ctx, struct ggml_tensor *x, struct ggml_tensor *weight, struct ggml_tensor *gate, float eps);
const char *ggml_spec_check_add_rms_norm(const struct ggml_tensor *a, const struct ggml_tensor *b, const struct ggml_tensor *weight, float eps);
const char *ggml_spec_check_gated_rms_norm(const struct ggml_tensor *x, const struct ggml_tensor *weight, const struct ggml_tensor *gate, float eps);
void pyggml_spec_log_install(void);
size_t pyggml_spec_log_tail(char *out, size_t size);
