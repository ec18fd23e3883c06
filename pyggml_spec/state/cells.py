"""Who holds which cell of a cache: several holders may share one, and a cell without a holder is free.

Holders register themselves, so the counts can be made anew from what is really held: an interrupt that comes between
taking cells and noting them loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from pyggml_spec.errors import ContextLimitError

_SCAN = 1024  # cells looked at together


class Holder(Protocol):
    """Something that keeps cells."""

    def held(self) -> Sequence[int] | NDArray[np.int32]:
        """Its cells, each once."""


class CellPool:
    """Cells 0 .. n_cells - 1; the lowest free ones are taken first, which keeps a cache dense.

    `reclaim` is asked when too few are free: it gives up something that holds cells (a cached prefix) and says whether
    there was anything left to give up.
    """

    def __init__(self, n_cells: int) -> None:
        self.n_cells = n_cells
        self.reclaim: Callable[[], bool] | None = None
        self._n_holders = np.zeros(n_cells, dtype=np.int32)  # (n_cells,)
        self._first = 0  # no cell below is free
        self._holders: WeakSet[Holder] = WeakSet()

    @property
    def n_free(self) -> int:
        """Cells without a holder."""
        return self.n_cells - int(np.count_nonzero(self._n_holders))

    def register(self, holder: Holder) -> None:
        """Count this holder's cells in every `recount`, as long as the object lives."""
        self._holders.add(holder)

    def take(self, n: int) -> list[int]:
        """The n lowest free cells, in order; raises ContextLimitError when fewer are left."""
        cells = self._lowest_free(n)
        while len(cells) < n and self.reclaim is not None and self.reclaim():
            cells = self._lowest_free(n)
        if len(cells) < n:
            raise ContextLimitError(f"the KV cache is full: {n} cells are needed and {len(cells)} are free")
        self._n_holders[cells] = 1
        if cells:
            self._first = cells[-1] + 1
        return cells

    def share(self, cells: Sequence[int] | NDArray[np.int32]) -> None:
        """One more holder for each of these held cells."""
        self._n_holders[cells] += 1

    def give_back(self, cells: Sequence[int] | NDArray[np.int32]) -> None:
        """One holder less for each of these cells; those without any are free again."""
        if len(cells):
            self._n_holders[cells] -= 1
            self._first = min(self._first, int(min(cells)))

    def recount(self) -> None:
        """Count all holders anew."""
        counts = np.zeros_like(self._n_holders)
        for holder in self._holders:
            counts[np.asarray(holder.held(), dtype=np.int64)] += 1
        self._n_holders, self._first = counts, 0

    def _lowest_free(self, n: int) -> list[int]:
        cells: list[int] = []
        begin = self._first
        while len(cells) < n and begin < self.n_cells:
            free = np.flatnonzero(self._n_holders[begin : begin + _SCAN] == 0)[: n - len(cells)]
            cells += (free + begin).tolist()
            begin += _SCAN
        return cells


class CellHold:
    """Cells kept by something other than a sequence: a snapshot, a drafter's block. `release` gives them back."""

    def __init__(self, pool: CellPool, cells: Sequence[int] | NDArray[np.int32]) -> None:
        self.pool = pool
        self.cells = np.array(cells, dtype=np.int32)  # (n,), a copy: the list it came from goes on changing
        pool.register(self)

    def held(self) -> NDArray[np.int32]:
        """Its cells, each once."""
        return self.cells

    def release(self) -> None:
        """Give all cells back; safe to call twice."""
        cells, self.cells = self.cells, self.cells[:0]
        self.pool.give_back(cells)
