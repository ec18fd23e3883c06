"""The gated delta rule over draft trees: against the float64 reference, and bit for bit against serial decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import Harness, message, view
from reference import delta_net
from reference.trees import parent_lists, path_to, shuffled_siblings

from pyggml_spec._native import ffi, lib
from pyggml_spec.tree.schedule import chain_schedule, encode_schedule, schedule_tree

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("device")]

EPS = 1e-6
REL_L2 = 1e-5  # of one output against float64: a few hundred float32 roundings at most
SIZES = st.sampled_from([(16, 16), (32, 32), (64, 64), (128, 128), (64, 32), (16, 48)])  # S_k, S_v
quick = settings(max_examples=50, deadline=None)


@dataclass(frozen=True)
class Dims:
    s_k: int = 16
    s_v: int = 16
    n_heads_k: int = 1
    n_heads_v: int = 1
    n_columns: int = 64
    n_rows: int = 64
    n_slots: int = 1


class Layer:
    """One recurrent layer: the operation on tensors that start full of garbage."""

    def __init__(self, dims: Dims, n_threads: int = 1, seed: int = 0, modified: bool = True) -> None:
        self.dims = d = dims
        self.harness = h = Harness(n_threads)
        self.q = h.tensor(d.s_k, d.n_heads_k, d.n_columns)
        self.k = h.tensor(d.s_k, d.n_heads_k, d.n_columns)
        self.v = h.tensor(d.s_v, d.n_heads_v, d.n_columns)
        self.alpha = h.tensor(d.n_heads_v, d.n_columns)
        self.b = h.tensor(d.n_heads_v, d.n_columns)
        self.gates = h.tensor(2 * d.n_heads_v)
        self.state = h.tensor(d.s_k, d.s_v, d.n_heads_v, d.n_slots)
        self.bank_k = h.tensor(d.s_k, d.n_heads_k, d.n_rows, 2 * d.n_slots)
        self.bank_u = h.tensor(d.s_v + 4, d.n_heads_v, d.n_rows, 2 * d.n_slots)
        self.sched = h.tensor(8 + 4 * d.n_columns + d.n_rows, dtype=np.int32)
        self.out = lib.ggml_spec_delta_net_tree(h.context, *self.operands())
        if modified:
            lib.ggml_spec_set_raw_gates(self.out, self.gates)
            lib.ggml_spec_set_qk_l2norm(self.out, EPS)
        h.finish(self.out)
        self.rng = np.random.default_rng(seed)
        view(self.state)[...] = self.rng.normal(size=view(self.state).shape)
        for garbage in (self.bank_k, self.bank_u, self.out, self.q, self.k, self.v):
            view(garbage)[...] = np.nan
        self.banks = [(2 * slot, 2 * slot + 1) for slot in range(d.n_slots)]  # pending, write
        self.pending: list[list[int]] = [[] for _ in range(d.n_slots)]

    def operands(self) -> tuple[Any, ...]:
        return (self.q, self.k, self.v, self.alpha, self.b, self.state, self.bank_k, self.bank_u, self.sched)

    def load(self, inputs: delta_net.Inputs, tokens: list[int]) -> None:
        """Tokens of `inputs` become the columns 0, 1, ..."""
        n = len(tokens)
        view(self.gates)[...] = np.concatenate([inputs.dt_bias, inputs.a])
        for name in ("q", "k", "v", "alpha", "b"):
            values = getattr(inputs, name)
            view(getattr(self, name)).reshape(-1, *values.shape[1:])[:n] = values[tokens]

    def call(self, inputs: delta_net.Inputs, tokens: list[int], parents: list[int] | None, slot: int = 0) -> np.ndarray:
        """Verifies a tree whose node i is token tokens[i]; parents=None is a prefill chain, no tokens is a flush."""
        d, fold = self.dims, parents is None
        self.load(inputs, tokens)
        pending_bank, write_bank = self.banks[slot]
        schedule = None if not tokens else chain_schedule(len(tokens)) if parents is None else schedule_tree(parents)
        encode_schedule(
            view(self.sched),
            schedule=schedule,
            n_columns=d.n_columns,
            pending_rows=self.pending[slot],
            pending_bank=pending_bank,
            write_bank=write_bank,
            state_slot=slot,
            fold=fold,
        )
        self.harness.compute()
        self.pending[slot] = []
        return view(self.out).reshape(-1, d.n_heads_v, d.s_v).copy()

    def accept(self, path: list[int], slot: int = 0) -> None:
        """The rows just written become the pending ones."""
        self.banks[slot] = self.banks[slot][::-1]
        self.pending[slot] = path

    def flush(self, inputs: delta_net.Inputs, slot: int = 0) -> np.ndarray:
        self.call(inputs, [], [-1], slot)
        return self.durable(slot)

    def durable(self, slot: int = 0) -> np.ndarray:
        """(H_v, S_v, S_k) of the slot, a copy."""
        d = self.dims
        return view(self.state).reshape(d.n_slots, d.n_heads_v, d.s_v, d.s_k)[slot].copy()

    def reset_to(self, state: np.ndarray, slot: int = 0) -> None:
        d = self.dims
        view(self.state).reshape(d.n_slots, d.n_heads_v, d.s_v, d.s_k)[slot] = state
        self.pending[slot] = []

    def close(self) -> None:
        self.harness.__exit__(None, None, None)


def random_inputs(dims: Dims, n_tokens: int, seed: int) -> delta_net.Inputs:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    d = dims
    q, k = normal(n_tokens, d.n_heads_k, d.s_k), normal(n_tokens, d.n_heads_k, d.s_k)
    v = normal(n_tokens, d.n_heads_v, d.s_v)
    alpha, b = 4 * normal(n_tokens, d.n_heads_v), 2 * normal(n_tokens, d.n_heads_v)
    alpha[0] = 25.0  # past the softplus switch
    a = -rng.uniform(1e-3, 0.5, d.n_heads_v).astype(np.float32)
    return delta_net.Inputs(q, k, v, alpha, b, normal(d.n_heads_v), a, EPS)


def serial(
    dims: Dims, state: np.ndarray, inputs: delta_net.Inputs, tokens: list[int]
) -> tuple[list[np.ndarray], np.ndarray]:
    """Plain decoding, one token per call and one column: outputs per token, durable state after them."""
    layer = Layer(replace(dims, n_columns=1, n_slots=1))
    layer.reset_to(state)
    outputs = []
    for token in tokens:
        outputs.append(layer.call(inputs, [token], [-1])[0])
        layer.accept([0])
    final = layer.flush(inputs)
    layer.close()
    return outputs, final


def relative_l2(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@st.composite
def layers(draw: st.DrawFn) -> Dims:
    s_k, s_v = draw(SIZES)
    n_heads_k = draw(st.integers(1, 3))
    return Dims(s_k, s_v, n_heads_k, n_heads_k * draw(st.integers(1, 4)))


@quick
@given(layers(), parent_lists(), st.integers(0, 2**32 - 1), st.integers(0, 16))
def test_every_node_equals_the_reference_along_its_path(
    dims: Dims, parents: list[int], seed: int, n_pending: int
) -> None:
    n = len(parents)
    inputs = random_inputs(dims, n + n_pending, seed)
    layer = Layer(dims, seed=seed)
    start = layer.durable()
    before = list(range(n, n + n_pending))
    if before:
        layer.call(inputs, before, list(range(-1, n_pending - 1)))
        layer.accept(list(range(n_pending)))
    outputs = layer.call(inputs, list(range(n)), parents)
    layer.close()
    for node in {0, n - 1, n // 2, n // 3}:
        expected, _ = delta_net.run_path(start.transpose(0, 2, 1), inputs, before + path_to(parents, node))
        assert relative_l2(outputs[node], expected) < REL_L2
    assert not outputs[n:].any()


@quick
@given(layers(), parent_lists(max_nodes=24), st.integers(0, 2**32 - 1), st.integers(0, 4))
def test_accepting_any_node_leaves_the_serial_state_bit_for_bit(
    dims: Dims, parents: list[int], seed: int, n_pending: int
) -> None:
    n = len(parents)
    inputs = random_inputs(dims, n + n_pending, seed)
    layer = Layer(dims, seed=seed)
    start, before = layer.durable(), list(range(n, n + n_pending))
    for node in {0, n - 1, n // 2, int(seed % n)}:
        path = path_to(parents, node)
        layer.reset_to(start)
        if before:
            layer.call(inputs, before, list(range(-1, n_pending - 1)))
            layer.accept(list(range(n_pending)))
        outputs = layer.call(inputs, list(range(n)), parents)
        layer.accept(path)
        expected_outputs, expected_state = serial(dims, start, inputs, before + path)
        assert np.array_equal(outputs[path], expected_outputs[len(before) :])
        next_output = layer.call(inputs, [0], [-1])[0]  # the next verify commits; its factors are dropped
        assert np.array_equal(layer.durable(), expected_state)
        assert np.array_equal(next_output, serial(dims, expected_state, inputs, [0])[0][0])
        assert np.array_equal(layer.flush(inputs), expected_state)
    layer.close()


@quick
@given(layers(), parent_lists(), st.integers(0, 2**32 - 1))
def test_sibling_order_and_padding_change_nothing(dims: Dims, parents: list[int], seed: int) -> None:
    n = len(parents)
    inputs = random_inputs(dims, n, seed)
    new_of = shuffled_siblings(parents, np.random.default_rng(seed))
    tokens = [new_of.index(i) for i in range(n)]
    other_parents = [-1] + [new_of[parents[token]] for token in tokens[1:]]
    wide, narrow = Layer(dims, seed=seed), Layer(replace(dims, n_columns=n), seed=seed)
    outputs = wide.call(inputs, list(range(n)), parents)
    others = narrow.call(inputs, tokens, other_parents)
    wide.close()
    narrow.close()
    assert np.array_equal(outputs[:n], others[new_of])


@quick
@given(layers(), st.integers(1, 150), st.integers(0, 150), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_prefill_equals_step_by_step(dims: Dims, n_tokens: int, cut: int, n_pending: int, seed: int) -> None:
    cut = min(cut, n_tokens)
    inputs = random_inputs(dims, n_tokens + n_pending, seed)
    before, tokens = list(range(n_tokens, n_tokens + n_pending)), list(range(n_tokens))
    layer = Layer(replace(dims, n_columns=160, n_rows=8), seed=seed)
    start = layer.durable()
    if before:
        layer.call(inputs, before, list(range(-1, n_pending - 1)))
        layer.accept(list(range(n_pending)))
    banks = view(layer.bank_u).copy(), view(layer.bank_k).copy()
    outputs = [layer.call(inputs, part, None)[: len(part)] for part in (tokens[:cut], tokens[cut:]) if part]
    expected_outputs, expected_state = serial(dims, start, inputs, before + tokens)
    assert np.array_equal(np.concatenate(outputs), expected_outputs[len(before) :])
    assert np.array_equal(layer.durable(), expected_state)
    assert np.array_equal(view(layer.bank_u), banks[0], equal_nan=True)
    assert np.array_equal(view(layer.bank_k), banks[1], equal_nan=True)
    layer.close()


@quick
@given(layers(), parent_lists(), st.integers(0, 2**32 - 1), st.integers(2, 5))
def test_thread_count_changes_no_bit(dims: Dims, parents: list[int], seed: int, n_threads: int) -> None:
    inputs = random_inputs(dims, len(parents), seed)
    results = []
    for count in (1, n_threads):
        layer = Layer(dims, count, seed)
        outputs = layer.call(inputs, list(range(len(parents))), parents)
        layer.accept(path_to(parents, len(parents) - 1))
        results.append((outputs, layer.flush(inputs), view(layer.bank_u)[1].copy()))
        layer.close()
    for one, many in zip(*results, strict=True):
        assert np.array_equal(one, many, equal_nan=True)


def test_slots_of_one_tensor_do_not_disturb_each_other() -> None:
    dims = Dims(n_heads_k=2, n_heads_v=4, n_slots=3)
    inputs = random_inputs(dims, 12, 5)
    layer = Layer(dims, seed=5)
    starts = [layer.durable(slot) for slot in range(3)]
    parents = [-1, 0, 0, 1, 1, 2]
    for first in (0, 6):  # two interleaved rounds per slot
        for slot in range(3):
            tokens = [(first + slot + i) % 12 for i in range(6)]
            layer.call(inputs, tokens, parents, slot)
            layer.accept([0, 1, 4], slot)
    for slot in range(3):
        tokens = [(first + slot + i) % 12 for first in (0, 6) for i in (0, 1, 4)]
        assert np.array_equal(layer.flush(inputs, slot), serial(dims, starts[slot], inputs, tokens)[1])
    layer.close()


def test_two_hundred_accepts_drift_no_more_than_serial_decoding() -> None:
    dims = Dims(n_heads_k=1, n_heads_v=2)
    inputs = random_inputs(dims, 64, 7)
    layer, rng, committed = Layer(dims, seed=7), np.random.default_rng(7), []
    start = layer.durable()
    for _ in range(200):
        n = int(rng.integers(1, 12))
        parents = [-1] + [int(rng.integers(0, i)) for i in range(1, n)]
        tokens = [int(t) for t in rng.integers(0, 64, n)]
        layer.call(inputs, tokens, parents)
        path = path_to(parents, int(rng.integers(n)))
        layer.accept(path)
        committed += [tokens[node] for node in path]
    state = layer.flush(inputs)
    layer.close()
    assert np.array_equal(state, serial(dims, start, inputs, committed)[1])
    _, expected = delta_net.run_path(start.transpose(0, 2, 1), inputs, committed)
    assert relative_l2(state.transpose(0, 2, 1), expected) < REL_L2


def test_given_gates_and_normalised_inputs_need_no_modifier() -> None:
    dims = Dims(s_k=32, s_v=32, n_heads_k=2, n_heads_v=4, n_columns=4, n_rows=4)
    raw = random_inputs(dims, 3, 11)
    plain, modified = Layer(dims, seed=11, modified=False), Layer(dims, seed=11)
    expected = modified.call(raw, [0, 1, 2], [-1, 0, 0])
    heads, tokens = range(4), range(3)
    decays = [[delta_net.log_decay(raw.alpha[t, h], raw.dt_bias[h], raw.a[h]) for h in heads] for t in tokens]
    ready = delta_net.Inputs(
        q=np.apply_along_axis(delta_net.l2_normalise, -1, raw.q, EPS),
        k=np.apply_along_axis(delta_net.l2_normalise, -1, raw.k, EPS),
        v=raw.v,
        alpha=np.array(decays),
        b=np.array([[delta_net.sigmoid(raw.b[t, h]) for h in heads] for t in tokens]),
        dt_bias=raw.dt_bias,
        a=raw.a,
        eps=EPS,
    )
    outputs = plain.call(ready, [0, 1, 2], [-1, 0, 0])
    plain.close()
    modified.close()
    assert relative_l2(outputs[:3], expected[:3]) < REL_L2


FITTING = {
    "q": (16, 1, 4), "k": (16, 1, 4), "v": (16, 2, 4), "g": (2, 4), "beta": (2, 4), "state": (16, 16, 2, 1),
    "bank_k": (16, 1, 4, 2), "bank_u": (20, 2, 4, 2), "sched": (8 + 4 * 4 + 4,),
}  # fmt: skip
WRONG = [
    ({"v": (16, 2, 5)}, "v has ne[2] = 5, it must be N of q = 4"),
    ({"k": (16, 2, 4)}, "k has ne[1] = 2, it must be H_k = 1"),
    ({"q": (16, 3, 4), "k": (16, 3, 4)}, "H_v = 2 is not a multiple of H_k = 3"),
    ({"q": (20, 1, 4)}, "S_k = 20, it must be a positive multiple of 16"),
    ({"g": (2, 3)}, "g has ne[1] = 3, it must be N of q = 4"),
    ({"beta": (1, 4)}, "beta has ne[0] = 1, it must be H_v = 2"),
    ({"state": (16, 32, 2, 1)}, "state has ne[1] = 32, it must be S_v = 16"),
    ({"bank_k": (32, 1, 4, 2)}, "bank_k has ne[0] = 32, it must be S_k = 16"),
    ({"bank_u": (16, 2, 4, 2)}, "bank_u has ne[0] = 16, it must be S_v + 4 = 20"),
    ({"bank_u": (20, 2, 5, 2)}, "bank_u has ne[2] = 5, it must be n_rows of bank_k = 4"),
    ({"state": (16, 16, 2, 2)}, "2 banks for 2 state slots, there must be two per slot"),
    ({"sched": (27,)}, "sched holds 27 words, 4 columns and 4 bank rows need 28"),
]


def check_shapes(harness: Harness, shapes: dict[str, tuple[int, ...]]) -> str:
    tensors = [harness.tensor(*ne, dtype=np.int32 if name == "sched" else np.float32) for name, ne in shapes.items()]
    return message(lib.ggml_spec_check_delta_net_tree(*tensors))


@pytest.mark.parametrize(("changed", "complaint"), WRONG)
def test_wrong_operands_are_refused_with_their_own_message(changed: dict[str, tuple[int, ...]], complaint: str) -> None:
    with Harness() as harness:
        assert check_shapes(harness, FITTING) == ""
        found = check_shapes(harness, FITTING | changed)
    assert found == f"delta_net_tree (GATED_DELTA_NET, mode TREE): {complaint}"


def test_wrong_types_and_layouts_are_refused() -> None:
    with Harness() as harness:
        tensors = [harness.tensor(*ne) for ne in FITTING.values()]
        assert "sched has type f32, it must be i32" in message(lib.ggml_spec_check_delta_net_tree(*tensors))
        tensors[0] = ffi.NULL
        assert "q is missing" in message(lib.ggml_spec_check_delta_net_tree(*tensors))
        wide = harness.tensor(16, 32, 2, 1)
        tensors[0], tensors[5] = harness.tensor(16, 1, 4), lib.ggml_transpose(harness.context, wide)
        assert "state has a stride" in message(lib.ggml_spec_check_delta_net_tree(*tensors))


def test_modes_are_marked_and_gates_are_checked() -> None:
    layer = Layer(Dims())
    assert ffi.string(lib.ggml_spec_mode_name(layer.out)) == b"GATED_DELTA_NET/TREE"
    assert lib.ggml_spec_is_mode(layer.out) and not lib.ggml_spec_is_mode(layer.q)
    assert "not a result" in message(lib.ggml_spec_check_raw_gates(layer.q, layer.gates))
    assert "it must be [2*H_v]" in message(lib.ggml_spec_check_raw_gates(layer.out, layer.v))
    layer.close()
