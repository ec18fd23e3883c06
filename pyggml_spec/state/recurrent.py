"""Recurrent state of the Gated DeltaNet layers: durable state, convolution window, factor banks and their rotation.

A verify reads the pending bank, folds the pending rows into the durable state and writes its own factors to the other
bank. Accepting a path makes its rows pending and flips the banks: nothing is copied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pyggml_spec.ggml import F32, Backend, Context, Tensor
from pyggml_spec.ggml.spec_ops import BANK_U_EXTRA
from pyggml_spec.records import TargetConfig


@dataclass(frozen=True)
class LayerState:
    """Tensors of one recurrent layer, every sequence in its slot."""

    state: Tensor  # f32 [S, S, H_v, n_slots], row j of memory is column j of S
    window: Tensor  # f32 [K-1, C, n_slots]
    bank_k: Tensor  # f32 [S, H_k, n_rows, 2 n_slots]
    bank_u: Tensor  # f32 [S+4, H_v, n_rows, 2 n_slots]
    bank_x: Tensor  # f32 [C, n_rows, 2 n_slots]


class RecurrentState:
    """State and banks of all recurrent layers for `n_slots` sequences and verifies of up to `n_rows` nodes."""

    def __init__(self, backend: Backend, config: TargetConfig, *, n_slots: int, n_rows: int) -> None:
        self.n_slots = n_slots
        self.n_rows = n_rows
        n_layers = sum(config.recurrent_layers)
        self._context = Context(max(1, 5 * n_layers))
        self.layers = {
            i: self._new_layer(config, i) for i, recurrent in enumerate(config.recurrent_layers) if recurrent
        }
        what = f"the recurrent state of {n_slots} sequences"
        self._buffer = backend.allocate(self._context, what) if n_layers else None
        self._spare: list[NDArray[np.uint8]] = []
        banks = [t for layer in self.layers.values() for t in (layer.bank_k, layer.bank_u, layer.bank_x)]
        self.bank_bytes = sum(t.n_bytes for t in banks)  # memory of the factor banks
        self.state_bytes = sum(t.n_bytes for t in self._durable())  # of the states: one snapshot of every sequence

    def _new_layer(self, config: TargetConfig, i: int) -> LayerState:
        s, h_k, h_v, c = config.state_size, config.n_heads_k, config.n_heads_v, config.n_conv_channels
        n_banks = 2 * self.n_slots

        def new(ne: list[int], name: str) -> Tensor:
            return self._context.new_tensor(F32, ne, f"{name}_l{i}")

        return LayerState(
            state=new([s, s, h_v, self.n_slots], "state"),
            window=new([config.conv_taps - 1, c, self.n_slots], "window"),
            bank_k=new([s, h_k, self.n_rows, n_banks], "bank_k"),
            bank_u=new([s + BANK_U_EXTRA, h_v, self.n_rows, n_banks], "bank_u"),
            bank_x=new([c, self.n_rows, n_banks], "bank_x"),
        )

    @property
    def dense_bytes(self) -> int:
        """Memory that a state per node would take where the banks keep factors: the usual way to undo a draft."""
        return self.n_rows * self.state_bytes

    def _durable(self) -> Iterator[Tensor]:
        for layer in self.layers.values():
            yield from (layer.state, layer.window)

    def clear_slot(self, slot: int) -> None:
        """Zero the durable state and window of one sequence."""
        for tensor in self._durable():
            n_bytes = tensor.n_bytes // self.n_slots
            tensor.zero(slot * n_bytes, n_bytes)

    def copy_slot(self, slot: int) -> NDArray[np.uint8]:
        """Durable states and windows of one sequence on the host: (state_bytes / n_slots,), layer by layer."""
        copy = self._spare.pop() if self._spare else np.empty(self.state_bytes // self.n_slots, dtype=np.uint8)
        for tensor, part in self._parts(copy):
            tensor.read(slot * part.nbytes, part)
        return copy

    def write_slot(self, slot: int, copy: NDArray[np.uint8]) -> None:
        """The reverse of `copy_slot`, into any slot."""
        for tensor, part in self._parts(copy):
            tensor.set(part, slot * part.nbytes)

    def recycle(self, copy: NDArray[np.uint8]) -> None:
        """Take back a copy that nobody needs: fresh memory costs several times what the copying does."""
        if not self._spare:
            self._spare.append(copy)

    def _parts(self, copy: NDArray[np.uint8]) -> Iterator[tuple[Tensor, NDArray[np.uint8]]]:
        """Every durable tensor with its part of a copy."""
        begin = 0
        for tensor in self._durable():
            end = begin + tensor.n_bytes // self.n_slots
            yield tensor, copy[begin:end]
            begin = end

    def hashes(self, slot: int) -> list[str]:
        """One digest per recurrent layer of the durable state and window of `slot` (tests compare runs with it)."""
        copy = self.copy_slot(slot)
        parts = [part for _, part in self._parts(copy)]
        pairs = zip(parts[::2], parts[1::2], strict=True)
        digests = [hashlib.sha256(state.tobytes() + window.tobytes()).hexdigest()[:16] for state, window in pairs]
        self.recycle(copy)
        return digests

    def close(self) -> None:
        """Free the device memory; safe to call twice."""
        if self._buffer is not None:
            self._buffer.close()
        self._context.close()


@dataclass
class Rotation:
    """Which bank of a slot is pending, and which of its rows are accepted but not folded yet."""

    slot: int
    pending_rows: list[int] = field(default_factory=list)
    parity: int = 0

    @property
    def pending_bank(self) -> int:
        return 2 * self.slot + self.parity

    @property
    def write_bank(self) -> int:
        return 2 * self.slot + 1 - self.parity

    def accept(self, path: Sequence[int]) -> None:
        """After a verify: its rows on the accepted path become pending."""
        self.pending_rows = list(path)
        self.parity ^= 1

    def clear(self) -> None:
        """Nothing is pending: after a flush, a prefill chunk, or a verify whose result was discarded."""
        self.pending_rows = []
