"""The causal convolution over draft trees: against the float64 reference, and bit for bit against serial decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import Harness, message, view
from reference import conv
from reference.trees import parent_lists, path_to, shuffled_siblings

from pyggml_spec._native import ffi, lib
from pyggml_spec.tree.schedule import chain_schedule, encode_schedule, schedule_tree

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("device")]

# A few roundings of the sum, SiLU's fast exponential (2 ulp) and a division.
REL_L2 = 1e-6
quick = settings(max_examples=50, deadline=None)


@dataclass(frozen=True)
class Dims:
    n_channels: int = 64
    n_taps: int = 4
    n_columns: int = 64
    n_rows: int = 64
    n_slots: int = 1


class Layer:
    """One convolution layer: the operation on tensors that start full of garbage."""

    def __init__(self, dims: Dims, n_threads: int = 1, seed: int = 0) -> None:
        self.dims = d = dims
        self.harness = h = Harness(n_threads)
        self.x = h.tensor(d.n_channels, d.n_columns)
        self.w = h.tensor(d.n_taps, d.n_channels)
        self.window = h.tensor(d.n_taps - 1, d.n_channels, d.n_slots)
        self.bank = h.tensor(d.n_channels, d.n_rows, 2 * d.n_slots)
        self.sched = h.tensor(8 + 4 * d.n_columns + d.n_rows, dtype=np.int32)
        self.out = lib.ggml_spec_conv_tree(h.context, self.x, self.w, self.window, self.bank, self.sched)
        h.finish(self.out)
        rng = np.random.default_rng(seed)
        view(self.w)[...] = rng.normal(size=view(self.w).shape)
        view(self.window)[...] = rng.normal(size=view(self.window).shape)
        for garbage in (self.bank, self.out, self.x):
            view(garbage)[...] = np.nan
        self.banks = [(2 * slot, 2 * slot + 1) for slot in range(d.n_slots)]  # pending, write
        self.pending: list[list[int]] = [[] for _ in range(d.n_slots)]

    def call(self, x: np.ndarray, parents: list[int] | None, slot: int = 0) -> np.ndarray:
        """Columns x (n, C) as a tree; parents=None is a prefill chain, no columns is a flush."""
        n = len(x)
        view(self.x).reshape(-1, self.dims.n_channels)[:n] = x
        schedule = None if not n else chain_schedule(n) if parents is None else schedule_tree(parents)
        encode_schedule(
            view(self.sched),
            schedule=schedule,
            n_columns=self.dims.n_columns,
            pending_rows=self.pending[slot],
            pending_bank=self.banks[slot][0],
            write_bank=self.banks[slot][1],
            state_slot=slot,
            fold=parents is None,
        )
        self.harness.compute()
        self.pending[slot] = []
        return view(self.out).reshape(-1, self.dims.n_channels).copy()

    def accept(self, path: list[int], slot: int = 0) -> None:
        """The rows just written become the pending ones."""
        self.banks[slot] = self.banks[slot][::-1]
        self.pending[slot] = path

    def durable(self, slot: int = 0) -> np.ndarray:
        """(C, K-1) of the slot, a copy."""
        d = self.dims
        return view(self.window).reshape(d.n_slots, d.n_channels, d.n_taps - 1)[slot].copy()

    def flush(self, slot: int = 0) -> np.ndarray:
        self.call(np.zeros((0, self.dims.n_channels)), [-1], slot)
        return self.durable(slot)

    def reset_to(self, window: np.ndarray) -> None:
        view(self.window).reshape(window.shape)[...] = window
        self.pending[0] = []

    def weights(self) -> np.ndarray:
        return view(self.w).copy()

    def close(self) -> None:
        self.harness.__exit__(None, None, None)


def serial(dims: Dims, seed: int, window: np.ndarray, x: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Plain decoding, one token per call and one column: outputs per token, window after them."""
    layer = Layer(replace(dims, n_columns=1, n_slots=1), seed=seed)
    layer.reset_to(window)
    outputs = []
    for row in x:
        outputs.append(layer.call(row[None], [-1])[0])
        layer.accept([0])
    final = layer.flush()
    layer.close()
    return outputs, final


def random_x(dims: Dims, n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, dims.n_channels)).astype(np.float32)


def relative_l2(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


layers = st.builds(Dims, st.sampled_from([16, 64, 80, 256, 400, 768]), st.integers(2, 6))


@quick
@given(layers, parent_lists(), st.integers(0, 2**32 - 1), st.integers(0, 6))
def test_every_node_equals_the_reference_along_its_path(
    dims: Dims, parents: list[int], seed: int, n_pending: int
) -> None:
    n = len(parents)
    x = random_x(dims, n + n_pending, seed)
    layer = Layer(dims, seed=seed)
    start, before = layer.durable(), list(range(n, n + n_pending))
    if before:
        layer.call(x[before], list(range(-1, n_pending - 1)))
        layer.accept(list(range(n_pending)))
    outputs, weights = layer.call(x[:n], parents), layer.weights()
    layer.close()
    for node in range(n):
        expected, _ = conv.run_path(start, weights, x, before + path_to(parents, node))
        assert relative_l2(outputs[node], expected) < REL_L2
    assert not outputs[n:].any()


@quick
@given(layers, parent_lists(max_nodes=24), st.integers(0, 2**32 - 1), st.integers(0, 4))
def test_accepting_any_node_leaves_the_serial_window_bit_for_bit(
    dims: Dims, parents: list[int], seed: int, n_pending: int
) -> None:
    n = len(parents)
    x = random_x(dims, n + n_pending, seed)
    layer = Layer(dims, seed=seed)
    start, before = layer.durable(), list(range(n, n + n_pending))
    for node in {0, n - 1, n // 2, int(seed % n)}:
        path = path_to(parents, node)
        layer.reset_to(start)
        if before:
            layer.call(x[before], list(range(-1, n_pending - 1)))
            layer.accept(list(range(n_pending)))
        outputs = layer.call(x[:n], parents)
        layer.accept(path)
        expected_outputs, expected_window = serial(dims, seed, start, x[before + path])
        assert np.array_equal(outputs[path], expected_outputs[len(before) :])
        layer.call(x[:1], [-1])
        assert np.array_equal(layer.durable(), expected_window)
        assert np.array_equal(layer.flush(), expected_window)
    layer.close()


@quick
@given(layers, parent_lists(), st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_order_padding_and_threads_change_nothing(dims: Dims, parents: list[int], seed: int, n_threads: int) -> None:
    n = len(parents)
    x = random_x(dims, n, seed)
    new_of = shuffled_siblings(parents, np.random.default_rng(seed))
    tokens = [new_of.index(i) for i in range(n)]
    other_parents = [-1] + [new_of[parents[token]] for token in tokens[1:]]
    wide, narrow = Layer(dims, seed=seed), Layer(replace(dims, n_columns=n), n_threads, seed)
    outputs, others = wide.call(x, parents), narrow.call(x[tokens], other_parents)
    wide.close()
    narrow.close()
    assert np.array_equal(outputs[:n], others[new_of])


@quick
@given(layers, st.integers(1, 100), st.integers(0, 100), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_prefill_equals_step_by_step(dims: Dims, n: int, cut: int, n_pending: int, seed: int) -> None:
    cut = min(cut, n)
    x = random_x(dims, n + n_pending, seed)
    layer = Layer(replace(dims, n_columns=100, n_rows=8), seed=seed)
    start = layer.durable()
    if n_pending:
        layer.call(x[n:], list(range(-1, n_pending - 1)))
        layer.accept(list(range(n_pending)))
    bank = view(layer.bank).copy()
    outputs = [layer.call(part, None)[: len(part)] for part in (x[:cut], x[cut:n]) if len(part)]
    expected_outputs, expected_window = serial(dims, seed, start, np.concatenate([x[n:], x[:n]]))
    assert np.array_equal(np.concatenate(outputs), expected_outputs[n_pending:])
    assert np.array_equal(layer.durable(), expected_window)
    assert np.array_equal(view(layer.bank), bank, equal_nan=True)
    layer.close()


def test_slots_of_one_tensor_do_not_disturb_each_other() -> None:
    dims = Dims(n_channels=96, n_slots=3)
    x, parents = random_x(dims, 12, 5), [-1, 0, 0, 1, 1, 2]
    layer = Layer(dims, seed=5)
    starts = [layer.durable(slot) for slot in range(3)]
    for first in (0, 6):  # two interleaved rounds per slot
        for slot in range(3):
            layer.call(x[[(first + slot + i) % 12 for i in range(6)]], parents, slot)
            layer.accept([0, 1, 4], slot)
    for slot in range(3):
        tokens = [(first + slot + i) % 12 for first in (0, 6) for i in (0, 1, 4)]
        assert np.array_equal(layer.flush(slot), serial(dims, 5, starts[slot], x[tokens])[1])
    layer.close()


def test_columns_may_be_strided() -> None:
    """The convolution reads a part of a wider projection without a copy."""
    with Harness() as h:
        wide = h.tensor(96, 4)
        x = lib.ggml_view_2d(h.context, wide, 64, 4, wide.nb[1], 16 * 4)
        w, window, bank = h.tensor(4, 64), h.tensor(3, 64, 1), h.tensor(64, 4, 2)
        sched = h.tensor(8 + 16 + 4, dtype=np.int32)
        out = lib.ggml_spec_conv_tree(h.context, x, w, window, bank, sched)
        h.finish(out)
        rng = np.random.default_rng(3)
        for tensor in (wide, w, window):
            view(tensor)[...] = rng.normal(size=view(tensor).shape)
        encode_schedule(
            view(sched), schedule=schedule_tree([-1, 0, 0, 2]), n_columns=4, pending_bank=0, write_bank=1, state_slot=0
        )
        inside = view(wide)[:, 16:80].copy()
        h.compute()
        expected, _ = conv.run_path(view(window), view(w), inside, [0, 2, 3])
        assert relative_l2(view(out)[3], expected) < REL_L2


FITTING = {"x": (64, 4), "w": (4, 64), "window": (3, 64, 2), "bank_x": (64, 4, 4), "sched": (8 + 4 * 4 + 4,)}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"x": (40, 4)}, "C = 40, it must be a positive multiple of 16"),
    ({"x": (64, 4, 2)}, "x has more than two axes, it must be [C, N]"),
    ({"w": (4, 32)}, "w has ne[1] = 32, it must be C = 64"),
    ({"w": (9, 64)}, "w has 9 taps, it must have 2 to 8"),
    ({"window": (4, 64, 2)}, "window has ne[0] = 4, it must be K - 1 = 3"),
    ({"bank_x": (32, 4, 4)}, "bank_x has ne[0] = 32, it must be C = 64"),
    ({"bank_x": (64, 4, 2)}, "2 banks for 2 state slots, there must be two per slot"),
    ({"sched": (20,)}, "sched holds 20 words, 4 columns and 4 bank rows need 28"),
]


@pytest.mark.parametrize(("changed", "complaint"), WRONG)
def test_wrong_operands_are_refused_with_their_own_message(changed: dict[str, tuple[int, ...]], complaint: str) -> None:
    with Harness() as h:
        shapes = FITTING | changed
        tensors = [h.tensor(*ne, dtype=np.int32 if name == "sched" else np.float32) for name, ne in shapes.items()]
        found = message(lib.ggml_spec_check_conv_tree(*tensors))
    assert found == f"conv_tree (SSM_CONV, mode TREE): {complaint}"


def test_modes_are_marked() -> None:
    layer = Layer(Dims())
    assert ffi.string(lib.ggml_spec_mode_name(layer.out)) == b"SSM_CONV/TREE"
    layer.close()
