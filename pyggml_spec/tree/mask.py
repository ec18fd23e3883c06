"""The ancestor mask: which KV cells each column of a verify may attend to, written into the buffer that is uploaded.

Cells are any rows of the attention cache: committed tokens need not lie together, because the mask is made from cell
numbers and nothing ever moves. 0 lets a column see a cell and -inf hides it, in float16, as flash attention reads it.

The part that all columns share is kept as one row from round to round: committing a token is `row[cells] = VISIBLE`,
and a round costs one broadcast of that row plus the few cells of the tree.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyggml_spec.errors import ShapeError

VISIBLE = np.float16(0)
HIDDEN = np.float16(-np.inf)


def committed_row(n_kv: int, cells: ArrayLike = ()) -> NDArray[np.float16]:
    """The row that all columns share: these cells visible, the others hidden; shape (n_kv,) float16."""
    row = np.full(n_kv, HIDDEN, dtype=np.float16)
    row[np.asarray(cells, dtype=np.int64)] = VISIBLE
    return row


def ancestor_matrix(parents: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Who sees whom inside a tree: row i marks node i and its ancestors.

    Shapes: parents (n,) int32 in topological order, -1 for the root -> (n, n) bool.
    """
    n = len(parents)
    if n == 0 or (parents[-1] == n - 2 and np.array_equal(parents, np.arange(-1, n - 1))):
        return np.tri(n, dtype=np.bool_)
    seen = np.eye(n, dtype=np.bool_)
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def fill_ancestor_mask(
    out: NDArray[np.float16], committed: NDArray[np.float16], column_cells: ArrayLike, parents: NDArray[np.int32]
) -> None:
    """Write the whole mask of one verify.

    Column i < n sees the committed cells, its ancestors' cells and its own. A padding column (i >= n) sees its own
    trash cell as well as the committed ones: a fully hidden row would turn flash attention's output into NaN.

    Shapes:
        out:          (n_columns, n_kv) float16, overwritten
        committed:    at least (n_kv,) float16, from `committed_row`; further cells are ignored
        column_cells: (n_columns,) cells that the columns write to; the first n belong to the nodes, and padding
                      columns may share one trash cell, which no node uses
        parents:      (n,) int32, topological, n <= n_columns

    Raises:
        ShapeError: column_cells does not name one cell per column, or there are more nodes than columns.
    """
    n_columns, n = out.shape[0], len(parents)
    cells = np.asarray(column_cells, dtype=np.int64)
    if cells.shape != (n_columns,) or n > n_columns or len(committed) < out.shape[1]:
        raise ShapeError(
            f"the mask is {out.shape} but there are {cells.shape} cells, {n} nodes and a committed row of "
            f"{len(committed)}: one cell per column, no more nodes than columns, one committed entry per KV cell"
        )
    np.copyto(out, committed[: out.shape[1]])
    if n:
        out[:n, cells[:n]] = np.where(ancestor_matrix(parents), VISIBLE, HIDDEN)
    if n < n_columns:
        out[np.arange(n, n_columns), cells[n:]] = VISIBLE
