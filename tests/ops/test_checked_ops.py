"""What ggml would abort on is an exception here: every operation with operands it cannot take, in this very process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pyggml_spec._native import lib
from pyggml_spec.errors import OptionError, ShapeError
from pyggml_spec.ggml import F16, F32, I32, Q8_0, Backend, Context, Graph, GraphArena, Tensor, ops, type_by_name
from pyggml_spec.ggml.backend import choose_device

pytestmark = pytest.mark.native

Make = Callable[..., Tensor]


@pytest.fixture
def context() -> Iterator[Context]:
    """Room for a few descriptors."""
    with Context(64) as made:
        yield made


@pytest.fixture
def f32(context: Context) -> Make:
    """f32 tensors of the given sizes."""
    return lambda *ne: context.new_tensor(F32, ne, "f")


@pytest.fixture
def i32(context: Context) -> Make:
    """i32 tensors of the given sizes."""
    return lambda *ne: context.new_tensor(I32, ne, "i")


def test_products(context: Context, f32: Make, i32: Make) -> None:
    """Inner sizes, types, batch sizes and rows."""
    for weight, x in [
        (f32(4, 3), f32(5, 2)),
        (f32(4, 3), i32(4, 2)),
        (f32(4, 3, 2), f32(4, 2, 3)),
        (Tensor(context, lib.ggml_transpose(context.live(), f32(4, 4).ptr)), f32(4, 2)),
    ]:
        with pytest.raises(ShapeError, match="mul_mat"):
            ops.mul_mat(context, weight, x)


def test_elementwise(context: Context, f32: Make, i32: Make) -> None:
    """Types, and a second operand that does not repeat to the first."""
    for call in (ops.add, ops.mul):
        with pytest.raises(ShapeError, match="cannot repeat"):
            call(context, f32(4, 3), f32(3))
        with pytest.raises(ShapeError, match="must be f32"):
            call(context, f32(4), i32(4))
    with pytest.raises(ShapeError, match="rms_norm"):
        ops.rms_norm(context, f32(4, 3), f32(5), 1e-6)
    with pytest.raises(ShapeError, match="swiglu"):
        ops.swiglu_split(context, f32(4, 3), f32(4, 2))
    with pytest.raises(ShapeError, match="strided"):
        wide = f32(8, 6, 2)
        ops.swiglu_split(context, ops.view(context, wide, [4, 3, 2], [32, 192]), f32(4, 3, 2))
    with pytest.raises(ShapeError, match="scale"):
        ops.scale(context, i32(4), 2.0)
    with pytest.raises(ShapeError, match="contiguous"):
        ops.tanh(context, ops.view(context, f32(8, 3), [4, 3], [32]))


def test_rows(context: Context, f32: Make, i32: Make) -> None:
    """Ids that are no list of integers, rows of another length, tables of a type that cannot be written."""
    with pytest.raises(ShapeError, match="ids must be i32"):
        ops.get_rows(context, f32(4, 8), f32(2))
    with pytest.raises(ShapeError, match="list of ids"):
        ops.get_rows(context, f32(4, 8), i32(2, 2))
    with pytest.raises(ShapeError, match="one id a row"):
        ops.set_rows(context, f32(4, 8), f32(4, 3), i32(2))
    with pytest.raises(ShapeError, match="one id a row"):
        ops.set_rows(context, f32(4, 8), f32(5, 2), i32(2))
    with pytest.raises(ShapeError, match="table must be"):
        ops.set_rows(context, i32(4, 8), f32(4, 2), i32(2))


def test_shapes(context: Context, f32: Make) -> None:
    """Reshape and view."""
    with pytest.raises(ShapeError, match="cannot reshape"):
        ops.reshape(context, f32(4, 3), [5, 2])
    with pytest.raises(ShapeError, match="leaves its source"):
        ops.view(context, f32(4, 3), [4, 2], [16], offset=32)
    with pytest.raises(ShapeError, match="leaves its source"):
        ops.view(context, f32(4, 3), [4], offset=-4)
    with pytest.raises(ShapeError, match="strides"):
        ops.view(context, f32(4, 3), [4, 2])


def test_joining_and_copying(context: Context, f32: Make, i32: Make) -> None:
    """Types that differ, and sizes that do not line up."""
    with pytest.raises(ShapeError, match="equal other sizes"):
        ops.concat(context, f32(4, 3), f32(5, 3), 1)
    with pytest.raises(ShapeError, match="right operand"):
        ops.concat(context, f32(4), i32(4), 0)
    with pytest.raises(ShapeError, match="left operand"):
        ops.concat(context, context.new_tensor(F16, [4], "h"), f32(4), 0)
    with pytest.raises(ShapeError, match="copy needs equal shapes"):
        ops.copy(context, f32(4, 3), f32(3, 4))
    with pytest.raises(ShapeError, match="copy's destination"):
        ops.copy(context, f32(4), i32(4))
    with pytest.raises(ShapeError, match="axis 4"):
        ops.concat(context, f32(4), f32(4), 4)


def test_rope(context: Context, f32: Make, i32: Make) -> None:
    """Positions per token, an even number of dimensions inside the head."""
    with pytest.raises(ShapeError, match="rope"):
        ops.rope(context, f32(64, 2, 3), i32(4), n_dims=64, theta=1e6)
    with pytest.raises(ShapeError, match="rope"):
        ops.rope(context, f32(64, 2, 3), i32(3), n_dims=66, theta=1e6)


def test_new_tensors(context: Context) -> None:
    """Sizes that are absurd, negative, or not a whole number of blocks."""
    for ne in ([0], [-1], [1 << 40, 1 << 40], [], [1, 1, 1, 1, 1]):
        with pytest.raises(ShapeError):
            context.new_tensor(F32, ne, "t")
    with pytest.raises(ShapeError, match="blocks of 32"):
        context.new_tensor(Q8_0, [33], "t")
    with pytest.raises(OptionError, match="'q9'"):
        type_by_name("q9")


def test_full_and_closed_contexts() -> None:
    """ggml aborts when its arena is full; a closed context has no memory at all."""
    small = Context(1)
    small.new_tensor(F32, [1], "t")
    with pytest.raises(ShapeError, match="full"):
        small.new_tensor(F32, [1], "t")
    small.close()
    small.close()
    with pytest.raises(ShapeError):
        small.new_tensor(F32, [1], "t")


def test_transfers() -> None:
    """Uploads and downloads of the wrong size, and before there is memory."""
    with Backend(choose_device("cpu"), 1) as backend, Context(4) as context:
        homeless = context.new_tensor(F32, [4], "homeless")
        with pytest.raises(ShapeError, match="no memory yet"):
            homeless.set(np.zeros(4, np.float32))
        with pytest.raises(ShapeError, match="no memory yet"):
            homeless.get()
        buffer = backend.allocate(context, "a test")
        with pytest.raises(ShapeError, match="does not fit"):
            homeless.set(np.zeros(5, np.float32))
        with pytest.raises(ShapeError, match="does not fit"):
            homeless.set(np.zeros(1, np.float32), offset_bytes=16)
        with pytest.raises(ShapeError, match="16 bytes"):
            homeless.get(np.zeros(3, np.float32))
        with pytest.raises(ShapeError, match="do not lie inside"):
            homeless.get_bytes(12, 5)
        homeless.set(np.arange(4, dtype=np.float32))

        assert homeless.get().ravel().tolist() == [0, 1, 2, 3]
        assert homeless.get_bytes(4, 8).view(np.float32).tolist() == [1, 2]
        buffer.close()
        buffer.close()


def test_graph_of_an_older_arena_is_refused() -> None:
    """When the scratch memory moves, graphs placed before it would compute on freed memory."""
    with Backend(choose_device("cpu"), 1) as backend:
        arena = GraphArena(backend)
        graphs = []
        for n in (8, 1 << 16):
            graph = Graph(arena, 8)
            x = graph.input(F32, [n], "x")
            graph.output(ops.scale(graph.context, x, 2.0))
            graph.place()
            graphs.append(graph)
        with pytest.raises(ShapeError, match="build it again"):
            graphs[0].run()
        graphs[1].run()
        with pytest.raises(ShapeError, match="does not exist"):
            graphs[1].node(99)
        for graph in graphs:
            graph.close()
        arena.close()
        arena.close()
