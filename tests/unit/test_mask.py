"""The ancestor mask against its definition, entry by entry."""

from __future__ import annotations

import numpy as np
import pytest

from pyggml_spec.errors import ShapeError
from pyggml_spec.tree.mask import HIDDEN, VISIBLE, ancestor_matrix, committed_row, fill_ancestor_mask

SHAPES = {
    "root": [-1],
    "chain": [-1, 0, 1, 2, 3],
    "star": [-1, 0, 0, 0, 0, 0],
    "fork": [-1, 0, 1, 1, 0, 4, 4, 2],
    "chain that ends in a fork": [-1, 0, 1, 2, 2],
}


def ancestors(parents: list[int], node: int) -> set[int]:
    """The node and everything above it."""
    return {node} | (ancestors(parents, parents[node]) if parents[node] >= 0 else set())


@pytest.mark.parametrize("parents", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("n_padding", [0, 3])
def test_every_entry(parents: list[int], n_padding: int):
    """A node sees committed cells, its ancestors and itself; cells lie anywhere; the buffer's old content is gone."""
    rng = np.random.default_rng(len(parents))
    n, n_kv = len(parents), 64
    cells = rng.permutation(n_kv)
    committed, own, trash = cells[:20], cells[20 : 20 + n], cells[40]
    out = rng.choice(np.array([0, -np.inf, np.nan], dtype=np.float16), size=(n + n_padding, n_kv))

    fill_ancestor_mask(
        out, committed_row(n_kv, committed), [*own, *[trash] * n_padding], np.array(parents, dtype=np.int32)
    )

    for node in range(n):
        visible = set(committed.tolist()) | {int(own[i]) for i in ancestors(parents, node)}
        assert set(np.flatnonzero(out[node] == 0).tolist()) == visible
        assert np.isneginf(out[node]).sum() == n_kv - len(visible)
    for padding in range(n, n + n_padding):
        assert set(np.flatnonzero(out[padding] == 0).tolist()) == {*committed.tolist(), int(trash)}


def test_no_row_is_fully_hidden():
    """An empty context and padding columns still see one cell each: softmax over nothing is NaN."""
    out = np.empty((4, 16), dtype=np.float16)

    fill_ancestor_mask(out, committed_row(16), [3, 15, 15, 15], np.array([-1], dtype=np.int32))

    assert (out == 0).any(axis=1).all()


def test_commit_is_one_assignment():
    """The row that all columns share is kept between rounds; a mask narrower than the cache takes its first cells."""
    row = committed_row(32, [1])
    row[[4, 30]] = VISIBLE
    row[1] = HIDDEN
    out = np.empty((1, 16), dtype=np.float16)

    fill_ancestor_mask(out, row, [0], np.array([-1], dtype=np.int32))

    assert np.flatnonzero(out[0] == 0).tolist() == [0, 4]


def test_ancestor_matrix_of_nothing():
    """No nodes, no matrix (a flush has columns but no nodes)."""
    assert ancestor_matrix(np.array([], dtype=np.int32)).shape == (0, 0)


def test_shapes_are_checked():
    """One cell per column, no more nodes than columns, a committed row as long as the mask."""
    out, root = np.empty((2, 8), dtype=np.float16), np.array([-1], dtype=np.int32)
    for committed, cells, parents in [
        (committed_row(8), [1], root),
        (committed_row(8), [1, 2], np.array([-1, 0, 1], dtype=np.int32)),
        (committed_row(4), [1, 2], root),
    ]:
        with pytest.raises(ShapeError, match="one cell per column"):
            fill_ancestor_mask(out, committed, cells, parents)
