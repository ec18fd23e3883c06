"""The ancestor mask: which KV cells each column of a verify may attend to, written into the buffer that is uploaded.

Cells are any rows of the attention cache: committed tokens need not lie together, because the mask is made from cell
numbers and nothing ever moves. 0 lets a column see a cell and -inf hides it, in float16, as flash attention reads it.

Between two rounds only a few cells change, so a `MaskBuffer` rewrites those and leaves the rest: at 32k cells a full
rewrite of 23 columns would cost more than everything else the host does in a round.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pyggml_spec.errors import ShapeError

_HIDDEN = np.float16(-np.inf)
_JOURNAL_LIMIT = 4096  # changes after which one full rewrite is cheaper than following the journal


def ancestor_matrix(parents: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Who sees whom inside a tree: row i marks node i and its ancestors.

    Shapes: parents (n,) int32 in topological order, -1 for roots -> (n, n) bool.
    """
    n = len(parents)
    if n == 0 or (parents[-1] == n - 2 and np.array_equal(parents, np.arange(-1, n - 1))):
        return np.tri(n, dtype=np.bool_)
    seen = np.eye(n, dtype=np.bool_)
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


class CommittedRow:
    """The part of the mask that all columns share: 0 at committed cells, -inf elsewhere.

    Shapes: row (n_kv,) float16. Changes are journalled so that each `MaskBuffer` applies only those it has not seen.
    """

    def __init__(self, n_kv: int) -> None:
        self.row: NDArray[np.float16] = np.full(n_kv, _HIDDEN, dtype=np.float16)
        self._changes: list[int] = []
        self._generation = 0

    def commit(self, cells: NDArray[np.integer] | list[int]) -> None:
        """Show these cells to every column from now on."""
        self._write(cells, np.float16(0))

    def release(self, cells: NDArray[np.integer] | list[int]) -> None:
        """Hide these cells again."""
        self._write(cells, _HIDDEN)

    def reset(self) -> None:
        """Hide every cell."""
        self.row.fill(_HIDDEN)
        self._restart_journal()

    def changes_since(self, mark: tuple[int, int]) -> list[int] | None:
        """Cells changed since `mark`, or None when so many did that a full rewrite is due."""
        generation, position = mark
        return self._changes[position:] if generation == self._generation else None

    @property
    def mark(self) -> tuple[int, int]:
        """The present point of the journal."""
        return self._generation, len(self._changes)

    def _write(self, cells: NDArray[np.integer] | list[int], value: np.float16) -> None:
        self.row[cells] = value
        self._changes.extend(np.asarray(cells).tolist())
        if len(self._changes) > _JOURNAL_LIMIT:
            self._restart_journal()

    def _restart_journal(self) -> None:
        self._changes = []
        self._generation += 1


class MaskBuffer:
    """One upload buffer (n_columns, n_kv) float16 and the memory of what was written into it last.

    Nothing else may write to `out`: the next `fill` rewrites only what changed.
    """

    def __init__(self, out: NDArray[np.float16]) -> None:
        self.out = out
        self._owner: CommittedRow | None = None
        self._mark = (-1, 0)
        self._last_cells: list[int] = []

    def fill(
        self, committed: CommittedRow, column_cells: NDArray[np.integer] | list[int], parents: NDArray[np.int32]
    ) -> None:
        """Bring the buffer up to date: committed cells for the nodes' columns, and the tree's own cells by ancestry.

        Shapes: column_cells (n_columns,), parents (n,) as in `fill_ancestor_mask`.
        """
        changes = committed.changes_since(self._mark) if committed is self._owner else None
        if changes is None or len(self._last_cells) > self.out.shape[1] // 8:
            np.copyto(self.out, committed.row[: self.out.shape[1]])
        else:
            stale = [cell for cell in changes if cell < self.out.shape[1]] + self._last_cells
            self.out[:, stale] = committed.row[stale]
        _write_tree(self.out, column_cells, parents)
        self._owner, self._mark, self._last_cells = committed, committed.mark, np.asarray(column_cells).tolist()


def fill_ancestor_mask(
    out: NDArray[np.float16],
    committed_cells: NDArray[np.generic],
    column_cells: NDArray[np.integer] | list[int],
    parents: NDArray[np.int32],
) -> None:
    """Write a whole mask without any memory of the last one.

    Column i < n sees the committed cells, its ancestors' cells and its own. A padding column (i >= n) sees its own
    trash cell besides: a fully hidden row would turn flash attention's output into NaN.

    Shapes:
        out:             (n_columns, n_kv) float16, overwritten with 0 or -inf
        committed_cells: (n_kv,) bool, or an index array
        column_cells:    (n_columns,) cells the columns write to; the first n belong to the nodes, several padding
                         columns may share one trash cell, which no node uses
        parents:         (n,) int32, topological, n <= n_columns

    Raises:
        ShapeError: column_cells does not name one cell per column, or there are more nodes than columns.
    """
    row = np.full(out.shape[1], _HIDDEN, dtype=np.float16)
    row[committed_cells] = 0
    np.copyto(out, row)
    _write_tree(out, column_cells, parents)


def _write_tree(
    out: NDArray[np.float16], column_cells: NDArray[np.integer] | list[int], parents: NDArray[np.int32]
) -> None:
    n_columns, n = out.shape[0], len(parents)
    cells = np.asarray(column_cells)
    if len(cells) != n_columns or n > n_columns:
        raise ShapeError(f"the mask has {n_columns} columns, got {len(cells)} cells and {n} nodes: one cell per column")
    if n:
        out[:n, cells[:n]] = np.where(ancestor_matrix(parents), np.float16(0), _HIDDEN)
    if n < n_columns:
        out[np.arange(n, n_columns), cells[n:]] = 0
