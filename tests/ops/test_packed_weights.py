"""Weights in the CPU kernel's own order give the same bits as plain ones, in products and as rows."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from pyggml_spec.errors import ShapeError
from pyggml_spec.ggml import F16, F32, I32, Q8_0, Backend, Context, Graph, GraphArena, ops
from pyggml_spec.ggml.backend import choose_device

pytestmark = pytest.mark.native

WIDTHS = (1, 2, 3, 4, 5, 8, 9, 33, 70)


def results(weights: np.ndarray, *, n_in: int, n_rows: int, is_packed: bool) -> list[bytes]:
    """Products of every width and all rows, as bytes."""
    found: list[bytes] = []
    with Backend(choose_device("cpu"), 2) as backend, Context(1) as context:
        weight = context.new_tensor(Q8_0, [n_in, n_rows], "w")
        buffer = backend.allocate(context, "weights")
        weight.set(weights)
        if is_packed and not weight.pack():
            pytest.skip("this flavour multiplies q8_0 in the order of the file: there is nothing to compare")
        arena = GraphArena(backend)
        for width in WIDTHS:
            graph = Graph(arena, 8)
            x, ids = graph.input(F32, [n_in, width], "x"), graph.input(I32, [n_rows], "ids")
            product = graph.output(ops.mul_mat(graph.context, weight, x))
            rows = graph.output(ops.get_rows(graph.context, weight, ids))
            graph.place()
            x.set(np.random.default_rng(width).standard_normal((width, n_in)).astype(np.float32))
            ids.set(np.arange(n_rows, dtype=np.int32)[::-1].copy())
            graph.run()
            found += [product.get().tobytes(), rows.get().tobytes()]
            graph.close()
        arena.close()
        buffer.close()
    return found


@pytest.mark.parametrize(
    ("n_in", "n_rows"), [(256, 1552), (32, 33), (64, 5), (1024, 96), (288, 64), (4096, 40)], ids=str
)
def test_packed_weights_change_no_bit(n_in: int, n_rows: int) -> None:
    """Whole tiles, a rest of rows, fewer rows than a tile; one block a row and many."""
    values = np.random.default_rng(n_rows).standard_normal((n_rows, n_in)).astype(np.float32)
    weights = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0).reshape(-1)
    plain = results(weights, n_in=n_in, n_rows=n_rows, is_packed=False)

    assert results(weights, n_in=n_in, n_rows=n_rows, is_packed=True) == plain


def test_what_cannot_read_packed_weights_is_refused() -> None:
    """Half-precision operands, and cuts through a tile."""
    with Backend(choose_device("cpu"), 1) as backend, Context(16) as context:
        weight = context.new_tensor(Q8_0, [64, 128], "w")
        buffer = backend.allocate(context, "weights")
        if not weight.pack():
            pytest.skip("this flavour has no order of its own for q8_0 weights")

        assert weight.is_packed
        assert not weight.pack()
        with pytest.raises(ShapeError, match="packed weights take f32"):
            ops.mul_mat(context, weight, context.new_tensor(F16, [64, 2], "x"))
        assert ops.weight_rows(context, weight, 1, 32) is None
        assert ops.weight_rows(context, weight, 0, 33) is None
        assert ops.weight_rows(context, weight, 64, 64).is_packed
        buffer.close()


def test_other_types_stay_as_they_are() -> None:
    """Packing says no and changes nothing."""
    with Backend(choose_device("cpu"), 1) as backend, Context(2) as context:
        weight = context.new_tensor(F32, [64, 64], "w")
        buffer = backend.allocate(context, "weights")
        values = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
        weight.set(values)

        assert not weight.pack()
        assert (weight.get() == values).all()
        buffer.close()
