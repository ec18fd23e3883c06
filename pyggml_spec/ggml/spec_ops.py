"""The fork's own operations (vendor/ggml-spec): the native check functions speak first, then the node is made.

Shapes are ne, fastest first. What changes per call (schedule, nodes, cells) is data the caller validates.
"""

from __future__ import annotations

from typing import Any

from pyggml_spec._native import ffi, lib
from pyggml_spec.errors import ShapeError
from pyggml_spec.ggml.context import Context
from pyggml_spec.ggml.ops import view
from pyggml_spec.ggml.tensor import Tensor

SCHEDULE_HEADER = 8  # i32 words before the nodes of a schedule
SCHEDULE_NODE_WORDS = 4
NODES_HEADER = 4  # i32 words before the (cell, parent) pairs of an attention call
NODES_VERSION = 1
BANK_U_EXTRA = 4  # floats after the deltas of a bank_u row
TOP_K_MAX = 16


def _refuse(fault: Any) -> None:
    if fault != ffi.NULL:
        raise ShapeError(ffi.string(fault).decode())


def conv_tree(context: Context, x: Tensor, w: Tensor, window: Tensor, bank_x: Tensor, schedule: Tensor) -> Tensor:
    """Causal convolution + SiLU along each node's path.

    x f32 [C, N], w [K, C], window [K-1, C, n_slots] and bank_x [C, n_rows, n_banks] updated in place -> [C, N].
    """
    operands = (x.ptr, w.ptr, window.ptr, bank_x.ptr, schedule.ptr)
    _refuse(lib.ggml_spec_check_conv_tree(*operands))
    context.claim()
    return Tensor(context, lib.ggml_spec_conv_tree(context.live(), *operands))


def delta_net_tree(
    context: Context,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    state: Tensor,
    bank_k: Tensor,
    bank_u: Tensor,
    schedule: Tensor,
    gates: Tensor,
    norm_eps: float,
) -> Tensor:
    """Gated DeltaNet over a draft tree, gates and l2-norms applied by the kernel (design: OPS.md).

    q, k f32 [S, H_k, N], v [S, H_v, N], alpha, beta [H_v, N] raw, gates [2 H_v] = dt_bias | A,
    state [S, S, H_v, n_slots], bank_k [S, H_k, n_rows, n_banks], bank_u [S + 4, H_v, n_rows, n_banks] updated in
    place -> [S * H_v, N].
    """
    operands = tuple(t.ptr for t in (q, k, v, alpha, beta, state, bank_k, bank_u, schedule))
    _refuse(lib.ggml_spec_check_delta_net_tree(*operands))
    context.claim()
    node = Tensor(context, lib.ggml_spec_delta_net_tree(context.live(), *operands))
    _refuse(lib.ggml_spec_check_raw_gates(node.ptr, gates.ptr))
    lib.ggml_spec_set_raw_gates(node.ptr, gates.ptr)
    lib.ggml_spec_set_qk_l2norm(node.ptr, norm_eps)
    return node


VISIBLE_ANCESTORS, VISIBLE_BLOCK, VISIBLE_PREFIX = 0, 1, 2


def attention(
    context: Context,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    nodes: Tensor,
    committed: Tensor,
    scale: float,
    window: int = 0,
    visibility: int = VISIBLE_ANCESTORS,
    gate: Tensor | None = None,
) -> Tensor:
    """Attention over listed KV cells: q f32 [D, H, N], k and v [D * H_kv, n_cells] -> [D * H, N].

    nodes i32 [4 + 2 N], committed i32 [n_list, n_lists]; gate [D, H, N] multiplies the result by its sigmoid.
    """
    operands = tuple(t.ptr for t in (q, k, v, nodes, committed))
    gate_ptr = ffi.NULL if gate is None else gate.ptr
    _refuse(lib.ggml_spec_check_attention(*operands, gate_ptr, window, visibility))
    context.claim()
    node = Tensor(context, lib.ggml_spec_attention(context.live(), *operands, scale, window, visibility))
    if gate is not None:
        lib.ggml_spec_attention_set_gate(node.ptr, gate_ptr)
    return node


def block_conv(context: Context, x: Tensor, dynamic: Tensor, base: Tensor, side: int) -> Tensor:
    """DFlash2's causal convolution over the slots of a block, x f32 [C, N] -> [C, N].

    base f32 [C, taps, 2]; dynamic [2 * taps * n_groups, N] adds to it per slot, groups fastest, sides slowest.
    """
    operands = (x.ptr, dynamic.ptr, base.ptr, side)
    _refuse(lib.ggml_spec_check_block_conv(*operands))
    context.claim()
    return Tensor(context, lib.ggml_spec_block_conv(context.live(), *operands))


def add_rms_norm(context: Context, a: Tensor, b: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum a + b, f32 [n, N] each, and its RMS norm times weight [n]: two contiguous [n, N] views of one result."""
    operands = (a.ptr, b.ptr, weight.ptr, eps)
    _refuse(lib.ggml_spec_check_add_rms_norm(*operands))
    context.claim()
    both = Tensor(context, lib.ggml_spec_add_rms_norm(context.live(), *operands))
    (n, n_rows), (_, row_bytes, plane_bytes, _) = both.ne[:2], both.nb
    first, second = (view(context, both, [n, n_rows], [row_bytes], plane * plane_bytes) for plane in (0, 1))
    return first, second


def gated_rms_norm(context: Context, x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """RMS norm of every head of x f32 [S * H, N] times weight [S] and silu(gate), gate like x -> [S * H, N]."""
    operands = (x.ptr, weight.ptr, gate.ptr, eps)
    _refuse(lib.ggml_spec_check_gated_rms_norm(*operands))
    context.claim()
    return Tensor(context, lib.ggml_spec_gated_rms_norm(context.live(), *operands))


def top_k(context: Context, logits: Tensor, k: int, logprobs: bool) -> Tensor:
    """Best k of each row of logits f32 [V, N] -> i32 [2k, N]: ids best first, then f32 bits of their
    log-probabilities (or of the raw logits when `logprobs` is false)."""
    _refuse(lib.ggml_spec_check_top_k(logits.ptr, k))
    context.claim()
    return Tensor(context, lib.ggml_spec_top_k(context.live(), logits.ptr, k, logprobs))
