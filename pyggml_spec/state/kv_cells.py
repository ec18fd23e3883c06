"""KV cells: the rows of the attention cache and who owns them.

Cells are never moved. A sequence lists its committed cells in position order; the list lives on the device and grows
by the accepted nodes of a round, so attention needs no mask over cells. Sequences and snapshots may share cells: a
committed cell is never written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pyggml_spec.errors import ContextLimitError, OptionError
from pyggml_spec.ggml import F32, I32, Backend, Context, Tensor, TensorType
from pyggml_spec.state.cells import CellHold, CellPool


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
        rotated_head_dim: int = 0,
    ) -> None:
        self._context = Context(2 * n_layers + 2)
        ne = [width, n_cells + 1]
        self.k: list[Tensor] = [self._context.new_tensor(types.k, ne, f"cache_k_l{i}") for i in range(n_layers)]
        self.v: list[Tensor] = [self._context.new_tensor(types.v, ne, f"cache_v_l{i}") for i in range(n_layers)]
        self.committed = self._context.new_tensor(I32, [n_ctx, n_slots], "committed_cells")
        self.rotation: Tensor | None = None  # f32 [D, D]: keys are stored, and queries asked, multiplied by it
        if rotated_head_dim:
            values = hadamard(rotated_head_dim)
            self.rotation = self._context.new_tensor(F32, values.shape, "key_rotation")
        self._buffer = backend.allocate(self._context, f"a KV cache of {n_cells} cells")
        if self.rotation is not None:
            self.rotation.set(values)
        self.padding_cell = n_cells
        self.n_ctx = n_ctx
        self.pool = CellPool(n_cells)

    @property
    def n_bytes(self) -> int:
        return self._buffer.n_bytes

    def hold_new(self, n: int) -> CellHold:
        """Free cells for something other than a sequence; raises ContextLimitError when fewer are left."""
        return CellHold(self.pool, self.pool.take(n))

    def close(self) -> None:
        """Free the device memory; safe to call twice."""
        self._buffer.close()
        self._context.close()


def hadamard(n: int) -> NDArray[np.float32]:
    """The orthonormal Hadamard matrix (n, n): it spreads a value that sticks out over its whole head, so that blocks of
    a quantised cache lose less.

    Raises OptionError unless n is a power of two.
    """
    if n < 1 or n & (n - 1):
        raise OptionError(f"keys of heads of {n} values cannot be rotated: it takes a power of two; turn rotation off")
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]) / np.float32(np.sqrt(2))
    return np.ascontiguousarray(matrix, np.float32)


class SequenceCells:
    """Cells of one sequence: the committed ones in position order, mirrored to its list on the device, and those taken
    for the running call."""

    def __init__(self, cache: KvCache, slot: int) -> None:
        self.cache = cache
        self.slot = slot
        self.cells = np.zeros(cache.n_ctx, dtype=np.int32)  # (n_ctx,)
        self.length = 0
        self.open: list[int] = []  # of the running call, in node order
        cache.pool.register(self)

    def held(self) -> NDArray[np.int32]:
        """All cells of this sequence."""
        return np.concatenate([self.cells[: self.length], np.array(self.open, dtype=np.int32)])

    def take(self, n: int) -> list[int]:
        """Cells for the n nodes of a call, open until committed or dropped; raises ContextLimitError."""
        self.open = self.cache.pool.take(n)
        return self.open

    def commit(self, nodes: Sequence[int] | None = None) -> None:
        """Nodes of the running call (None = all) become the next positions; the other open cells are free again."""
        taken = self.open
        chosen = taken if nodes is None else [taken[node] for node in nodes]
        self._append(chosen)
        self.open = []
        if len(chosen) < len(taken):
            kept = set(chosen)
            self.cache.pool.give_back([cell for cell in taken if cell not in kept])

    def drop(self) -> None:
        """The running call's cells are free again."""
        taken, self.open = self.open, []
        self.cache.pool.give_back(taken)

    def _append(self, cells: Sequence[int] | NDArray[np.int32]) -> None:
        end = self.length + len(cells)
        if end > self.cache.n_ctx:
            raise ContextLimitError(f"the context of {self.cache.n_ctx} tokens is full")
        self.cells[self.length : end] = cells
        offset = 4 * (self.slot * self.cache.n_ctx + self.length)
        self.cache.committed.set(self.cells[self.length : end], offset)
        self.length = end

    def hold(self) -> CellHold:
        """The committed cells, kept beyond this sequence's own use of them."""
        cells = self.cells[: self.length]
        self.cache.pool.share(cells)
        return CellHold(self.cache.pool, cells)

    def restore(self, hold: CellHold) -> None:
        """Start from shared cells: this sequence appends to them and writes none of them."""
        self.reset()
        self.cache.pool.share(hold.cells)
        self._append(hold.cells)

    def reset(self) -> None:
        """Give everything back, whatever an interrupt left behind."""
        self.length, self.open = 0, []
        self.cache.pool.recount()
