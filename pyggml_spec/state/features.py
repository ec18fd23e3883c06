"""Captured target features: a ring of rows that verifies and prefill write and the drafter reads.

Rows never leave the device; the host keeps which row holds the features of which committed position.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyggml_spec.ggml import F32, Backend, Context


class FeatureRing:
    """Feature rows f32 [n_features * n_embd, n_slots * n_rows + 1]; the last row takes what padding rows write."""

    def __init__(self, backend: Backend, *, n_features: int, n_embd: int, n_slots: int, n_rows: int) -> None:
        self.n_features = n_features
        self.n_embd = n_embd
        self.n_rows = n_rows
        self.padding_row = n_slots * n_rows
        self._context = Context(1)
        self.tensor = self._context.new_tensor(F32, [n_features * n_embd, n_slots * n_rows + 1], "features")
        self._buffer = backend.allocate(self._context, f"{n_slots * n_rows} rows of target features")

    @property
    def n_bytes(self) -> int:
        return self._buffer.n_bytes

    def close(self) -> None:
        """Free the device memory; safe to call twice."""
        self._buffer.close()
        self._context.close()


class SequenceFeatures:
    """Rows of one sequence: those of the newest call, and committed ones that the drafter has not read yet."""

    def __init__(self, ring: FeatureRing, slot: int) -> None:
        self.ring = ring
        self._first = slot * ring.n_rows
        self._next = 0
        self.unread: list[int] = []  # ring rows of committed tokens, in position order

    @property
    def n_room(self) -> int:
        """Rows that a call may write without touching unread ones."""
        return self.ring.n_rows - len(self.unread)

    def rows_for(self, n: int) -> list[int]:
        """Ring rows for the n nodes of the next call; the caller has made room (`n_room`)."""
        taken = set(self.unread)
        rows: list[int] = []
        while len(rows) < n:
            row = self._first + self._next
            self._next = (self._next + 1) % self.ring.n_rows
            if row not in taken:
                rows.append(row)
        return rows

    def commit(self, rows: Sequence[int]) -> None:
        """Rows whose tokens were accepted, in position order."""
        self.unread.extend(rows)

    def take_unread(self, n: int) -> list[int]:
        """The n oldest unread rows, which count as read from now on."""
        taken, self.unread = self.unread[:n], self.unread[n:]
        return taken

    def reset(self) -> None:
        """Forget everything; the next call starts a new context."""
        self.unread.clear()
        self._next = 0
