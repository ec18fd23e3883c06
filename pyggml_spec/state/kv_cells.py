"""KV cells: the rows of the attention cache and who owns them.

Cells are never moved. A sequence lists its committed cells in position order; the list lives on the device and grows
by the accepted nodes of a round, so attention needs no mask over cells.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyggml_spec.errors import ContextLimitError
from pyggml_spec.ggml import I32, Backend, Context, Tensor, TensorType


@dataclass(frozen=True)
class KvTypes:
    """Element types of the cached keys and values."""

    k: TensorType
    v: TensorType


class KvCache:
    """K and V tensors of the attention layers: per layer [D * H_kv, n_cells + 1] each.

    The last cell takes what padding rows write and is never read.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        n_layers: int,
        width: int,
        n_cells: int,
        n_ctx: int,
        n_slots: int,
        types: KvTypes,
    ) -> None:
        self._context = Context(2 * n_layers + 1)
        ne = [width, n_cells + 1]
        self.k: list[Tensor] = [self._context.new_tensor(types.k, ne, f"cache_k_l{i}") for i in range(n_layers)]
        self.v: list[Tensor] = [self._context.new_tensor(types.v, ne, f"cache_v_l{i}") for i in range(n_layers)]
        self.committed = self._context.new_tensor(I32, [n_ctx, n_slots], "committed_cells")
        self._buffer = backend.allocate(self._context, f"a KV cache of {n_cells} cells")
        self.padding_cell = n_cells
        self.n_ctx = n_ctx
        self._free = list(range(n_cells))  # a heap: the lowest cell is taken first, which keeps a cache dense

    @property
    def n_bytes(self) -> int:
        return self._buffer.n_bytes

    def take(self, n: int) -> list[int]:
        """The n lowest free cells; raises ContextLimitError when fewer are left."""
        if n > len(self._free):
            raise ContextLimitError(f"the KV cache is full: {n} cells are needed and {len(self._free)} are free")
        return [heapq.heappop(self._free) for _ in range(n)]

    def give_back(self, cells: Sequence[int]) -> None:
        """Make cells free again."""
        for cell in cells:
            heapq.heappush(self._free, cell)

    def close(self) -> None:
        """Free the device memory; safe to call twice."""
        self._buffer.close()
        self._context.close()


class SequenceCells:
    """The committed cells of one sequence, in position order, mirrored to its list on the device."""

    def __init__(self, cache: KvCache, slot: int) -> None:
        self.cache = cache
        self.slot = slot
        self.cells = np.zeros(cache.n_ctx, dtype=np.int32)  # (n_ctx,)
        self.length = 0

    def append(self, cells: Sequence[int]) -> None:
        """Commit cells of the next positions."""
        end = self.length + len(cells)
        if end > self.cache.n_ctx:
            raise ContextLimitError(f"the context of {self.cache.n_ctx} tokens is full")
        self.cells[self.length : end] = cells
        offset = 4 * (self.slot * self.cache.n_ctx + self.length)
        self.cache.committed.set(self.cells[self.length : end], offset)
        self.length = end

    def truncate(self, length: int) -> None:
        """Give back the cells of all positions from `length` on."""
        self.cache.give_back(self.cells[length : self.length].tolist())
        self.length = length
