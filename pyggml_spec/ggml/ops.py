"""Operations of a graph: every rule ggml would abort on is checked, then the call is made.

Each function takes tensors of one context and returns the new node. Shapes are ne, fastest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyggml_spec._native import ffi, lib
from pyggml_spec.errors import ShapeError
from pyggml_spec.ggml.context import Context
from pyggml_spec.ggml.tensor import Tensor, require_f32, require_i32, require_type
from pyggml_spec.ggml.types import F16, F32, I32, Q4_0, Q8_0


def _node(context: Context, ptr: Any) -> Tensor:
    return Tensor(context, ptr)


def _check(holds: bool, rule: str, *operands: Tensor) -> None:
    if not holds:
        shapes = ", ".join(f"'{t.name}' {t.type.name} ne={list(t.ne)}" for t in operands)
        raise ShapeError(f"{rule}; found {shapes}")


def _begin(context: Context) -> object:
    context.claim()
    return context.live()


def mul_mat(context: Context, weight: Tensor, x: Tensor) -> Tensor:
    """Matrix product: weight [K, M], x [K, N] -> f32 [M, N]."""
    _check(weight.ne[0] == x.ne[0], "mul_mat needs equal first sizes", weight, x)
    _check(x.ne[2] % weight.ne[2] == 0 and x.ne[3] % weight.ne[3] == 0, "mul_mat cannot broadcast these", weight, x)
    _check(weight.has_contiguous_rows and x.has_contiguous_rows, "mul_mat needs contiguous rows", weight, x)
    require_type(x, F32, F16, what="the right operand of mul_mat")
    if weight.is_packed:
        _check(x.type == F32 and x.ne[2:] == weight.ne[2:] == (1, 1), "packed weights take f32 matrices", weight, x)
    return _node(context, lib.ggml_mul_mat(_begin(context), weight.ptr, x.ptr))


def weight_rows(context: Context, weight: Tensor, first: int, n: int) -> Tensor | None:
    """Rows first .. first + n of a weight matrix as a matrix, or None where its packing cannot be cut so."""
    if weight.is_packed:
        step, end = lib.ggml_spec_pack_rows(), first + n
        if first % step or (end % step and end != weight.ne[1]):
            return None
    return view(context, weight, [weight.ne[0], n], [weight.nb[1]], first * weight.nb[1])


def _elementwise(call: Any, name: str, context: Context, a: Tensor, b: Tensor) -> Tensor:
    require_f32(a, f"the left operand of {name}")
    require_f32(b, f"the right operand of {name}")
    fits = all(n % m == 0 for n, m in zip(a.ne, b.ne, strict=True))
    _check(fits, f"{name} cannot repeat the second operand to the first", a, b)
    return _node(context, call(_begin(context), a.ptr, b.ptr))


def add(context: Context, a: Tensor, b: Tensor) -> Tensor:
    """a + b, b repeated to a's shape."""
    return _elementwise(lib.ggml_add, "add", context, a, b)


def mul(context: Context, a: Tensor, b: Tensor) -> Tensor:
    """a * b, b repeated to a's shape."""
    return _elementwise(lib.ggml_mul, "mul", context, a, b)


def rms_norm(context: Context, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the first axis; weight [ne0]."""
    require_f32(x, "rms_norm's input")
    _check(x.has_contiguous_rows and weight.ne[0] == x.ne[0], "rms_norm needs rows as long as its weight", x, weight)
    return mul(context, _node(context, lib.ggml_rms_norm(_begin(context), x.ptr, eps)), weight)


def scale(context: Context, x: Tensor, factor: float) -> Tensor:
    """x * factor."""
    require_f32(x, "scale's input")
    return _node(context, lib.ggml_scale(_begin(context), x.ptr, factor))


def tanh(context: Context, x: Tensor) -> Tensor:
    """Hyperbolic tangent, elementwise."""
    _check(x.is_contiguous, "tanh needs a contiguous input", x)
    return _node(context, lib.ggml_tanh(_begin(context), x.ptr))


def swiglu_split(context: Context, gate: Tensor, x: Tensor) -> Tensor:
    """silu(gate) * x, both of one shape."""
    require_f32(gate, "swiglu's gate")
    require_f32(x, "swiglu's input")
    _check(gate.ne == x.ne, "swiglu needs equal shapes", gate, x)
    dense = all(lib.ggml_is_contiguous_1(t.ptr) and t.has_contiguous_rows for t in (gate, x))
    _check(dense, "swiglu takes matrices whose rows may be strided, nothing else", gate, x)
    return _node(context, lib.ggml_swiglu_split(_begin(context), gate.ptr, x.ptr))


def get_rows(context: Context, table: Tensor, ids: Tensor) -> Tensor:
    """Rows of table [ne0, n_rows] named by ids i32 [n] -> f32 [ne0, n]. The caller range-checks the ids."""
    require_i32(ids, "get_rows' ids")
    _check(ids.ne[1:] == (1, 1, 1) and table.ne[2:] == (1, 1), "get_rows takes a matrix and a list of ids", table, ids)
    return _node(context, lib.ggml_get_rows(_begin(context), table.ptr, ids.ptr))


def set_rows(context: Context, table: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """Write rows f32 [ne0, n] into table [ne0, n_rows] (f32, f16, q8_0 or q4_0) at ids i32 [n]; returns the table.

    The caller range-checks the ids: the kernel does not.
    """
    require_i32(ids, "set_rows' ids")
    require_f32(rows, "set_rows' rows")
    require_type(table, F32, F16, Q8_0, Q4_0, what="set_rows' table")
    _check(
        table.ne[0] == rows.ne[0] and rows.ne[1] == ids.ne[0] and table.ne[2:] == rows.ne[2:] == (1, 1)
        and ids.ne[1:] == (1, 1, 1) and rows.has_contiguous_rows and table.has_contiguous_rows,
        "set_rows needs rows as long as the table's and one id a row", table, rows, ids,
    )  # fmt: skip
    return _node(context, lib.ggml_set_rows(_begin(context), table.ptr, rows.ptr, ids.ptr))


def reshape(context: Context, x: Tensor, ne: Sequence[int]) -> Tensor:
    """The same values of a contiguous tensor under another shape of 1 to 4 sizes."""
    product = 1
    for n in ne:
        product *= n
    _check(x.is_contiguous and product == x.n_values and 1 <= len(ne) <= 4, f"cannot reshape to ne={list(ne)}", x)
    sizes = [*ne, *([1] * (4 - len(ne)))]
    return _node(context, lib.ggml_reshape_4d(_begin(context), x.ptr, *sizes))


def view(context: Context, x: Tensor, ne: Sequence[int], strides: Sequence[int] = (), offset: int = 0) -> Tensor:
    """A window into x: sizes ne, `strides` in bytes for axes 1.. (len(ne) - 1 of them), `offset` in bytes.

    The last byte the window reaches must lie inside x.
    """
    if not 1 <= len(ne) <= 4 or len(strides) != len(ne) - 1:
        raise ShapeError(f"a view of ne={list(ne)} needs {len(ne) - 1} strides, found {list(strides)}")
    last = offset + x.type.row_bytes(ne[0]) + sum((n - 1) * s for n, s in zip(ne[1:], strides, strict=True))
    fits = ne[0] % x.type.block_size == 0 and offset >= 0 and last <= x.n_bytes
    _check(fits, f"a view of ne={list(ne)} at byte {offset} leaves its source", x)
    sizes = [*ne, *([1] * (4 - len(ne)))]
    steps = list(strides)
    while len(steps) < 3:
        steps.append((steps[-1] if steps else x.type.row_bytes(ne[0])) * sizes[len(steps)])
    return _node(context, lib.ggml_view_4d(_begin(context), x.ptr, *sizes, *steps, offset))


def contiguous(context: Context, x: Tensor) -> Tensor:
    """A contiguous copy."""
    return _node(context, lib.ggml_cont(_begin(context), x.ptr))


def concat(context: Context, a: Tensor, b: Tensor, axis: int) -> Tensor:
    """a followed by b along one axis; both f32 or both i32, the other sizes equal."""
    require_type(a, F32, I32, what="the left operand of concat")
    require_type(b, a.type, what="the right operand of concat")
    fits = 0 <= axis < 4 and all(n == m for i, (n, m) in enumerate(zip(a.ne, b.ne, strict=True)) if i != axis)
    _check(fits, f"concat along axis {axis} needs equal other sizes", a, b)
    return _node(context, lib.ggml_concat(_begin(context), a.ptr, b.ptr, axis))


def copy(context: Context, source: Tensor, destination: Tensor) -> Tensor:
    """Write f32 values into memory that outlives the graph; the result is a view of `destination`."""
    require_f32(source, "copy's source")
    require_f32(destination, "copy's destination")
    _check(source.ne == destination.ne, "copy needs equal shapes", source, destination)
    return _node(context, lib.ggml_cpy(_begin(context), source.ptr, destination.ptr))


def rope(
    context: Context,
    x: Tensor,
    pos: Tensor,
    *,
    n_dims: int,
    theta: float,
    n_ctx_original: int = 0,
    factor: float = 1.0,
    yarn_mix: float = 0.0,
    attention_factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> Tensor:
    """Rotary embedding (half-split pairs) of the first n_dims of x [D, H, N] at positions pos i32 [N].

    Multi-section rope with equal text positions in all used sections is this same rotation.
    """
    require_i32(pos, "rope's positions")
    require_f32(x, "rope's input")
    _check(
        x.ne[2] == pos.ne[0] and pos.ne[1:] == (1, 1, 1) and n_dims % 2 == 0 and 0 < n_dims <= x.ne[0],
        f"rope of {n_dims} dimensions does not fit", x, pos,
    )  # fmt: skip
    return _node(
        context,
        lib.ggml_rope_ext(
            _begin(context), x.ptr, pos.ptr, ffi.NULL, n_dims, lib.GGML_ROPE_TYPE_NEOX, n_ctx_original,
            theta, 1.0 / factor, yarn_mix, attention_factor, beta_fast, beta_slow,
        ),
    )  # fmt: skip
