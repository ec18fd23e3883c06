"""Top-k with log-probabilities: exact order, ties to the lower id, NaN last, the same bits for every thread count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import Harness, message, view

from pyggml_spec._native import ffi, lib

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("device")]

# log-sum-exp of float32 values through a 2-ulp exponential, then one rounding of a value around log(V).
ABSOLUTE = 4e-6
quick = settings(max_examples=50, deadline=None)


def run(logits: np.ndarray, k: int, logprobs: bool, n_threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """ids (n, k) and values (n, k) of logits (n, V)."""
    with Harness(n_threads) as h:
        tensor = h.tensor(logits.shape[1], logits.shape[0])
        out = lib.ggml_spec_top_k(h.context, tensor, k, logprobs)
        h.finish(out)
        view(tensor).reshape(logits.shape)[...] = logits
        h.compute()
        words = view(out).reshape(len(logits), 2 * k).copy()
    return words[:, :k], words[:, k:].view(np.float32)


def expected_ids(row: np.ndarray, k: int) -> np.ndarray:
    """Best first: numbers before NaN, then by value descending, then by id."""
    return np.lexsort((np.arange(len(row)), np.where(np.isnan(row), np.inf, -row), np.isnan(row)))[:k]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    top = x.max(axis=1, keepdims=True)
    return x - top - np.log(np.exp(x - top).sum(axis=1, keepdims=True))


sizes = st.sampled_from([16, 17, 63, 64, 65, 1000, 4095, 4096, 4097, 8192, 20000])


@quick
@given(sizes, st.integers(1, 5), st.integers(1, 16), st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_order_and_log_probabilities(n_values: int, n_rows: int, k: int, seed: int, n_threads: int) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(n_rows, n_values)) * rng.choice([0.1, 3, 30])).astype(np.float32)
    ids, values = run(logits, k, True, n_threads)
    for row in range(n_rows):
        assert np.array_equal(ids[row], expected_ids(logits[row], k))
    found = np.take_along_axis(log_softmax(logits), ids, axis=1)
    assert np.max(np.abs(values - found)) < ABSOLUTE * max(1.0, float(np.abs(logits).max()))


@quick
@given(sizes, st.integers(1, 16), st.integers(0, 2**32 - 1), st.integers(2, 5))
def test_thread_count_changes_no_bit(n_values: int, k: int, seed: int, n_threads: int) -> None:
    logits = np.random.default_rng(seed).normal(size=(3, n_values)).astype(np.float32)
    one, many = run(logits, k, True), run(logits, k, True, n_threads)
    assert np.array_equal(one[0], many[0]) and np.array_equal(one[1], many[1])


@quick
@given(sizes, st.integers(1, 16), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3, 0.99, 1.0]), st.integers(1, 3))
def test_ties_go_to_the_lower_id_and_nan_comes_last(
    n_values: int, k: int, seed: int, nan_share: float, n_threads: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.choice([-np.inf, -1.0, 0.0, 2.0, np.inf], size=(2, n_values)).astype(np.float32)
    logits[rng.random(logits.shape) < nan_share] = np.nan
    ids, values = run(logits, k, False, n_threads)
    for row in range(2):
        expected = expected_ids(logits[row], k)
        assert np.array_equal(ids[row], expected)
        assert np.array_equal(values[row], logits[row][expected], equal_nan=True)


def test_ascending_values_replace_the_whole_list_again_and_again() -> None:
    logits = np.arange(10000, dtype=np.float32)[None]
    assert run(logits, 4, False)[0].tolist() == [[9999, 9998, 9997, 9996]]
    assert run(logits[:, ::-1].copy(), 4, False)[0].tolist() == [[0, 1, 2, 3]]


def test_argmax_of_many_rows() -> None:
    logits = np.random.default_rng(0).normal(size=(23, 8192)).astype(np.float32)
    ids, values = run(logits, 1, False, 2)
    assert np.array_equal(ids[:, 0], logits.argmax(axis=1))
    assert np.array_equal(values[:, 0], logits.max(axis=1))


@pytest.mark.parametrize(
    ("shape", "k", "complaint"),
    [
        ((100, 4), 0, "k = 0, it must be 1 to 16"),
        ((100, 4), 17, "k = 17, it must be 1 to 16"),
        ((8, 4), 9, "k = 9 is more than the 8 values of a row"),
        ((100, 4, 2), 4, "logits has more than two axes, it must be [V, N]"),
    ],
)
def test_wrong_operands_are_refused_with_their_own_message(shape: tuple[int, ...], k: int, complaint: str) -> None:
    with Harness() as h:
        found = message(lib.ggml_spec_check_top_k(h.tensor(*shape), k))
        fits = message(lib.ggml_spec_check_top_k(h.tensor(100, 4), 4))
    assert found == f"top_k (TOP_K, mode SORTED): {complaint}" and fits == ""


def test_mode_is_marked() -> None:
    with Harness() as h:
        out = lib.ggml_spec_top_k(h.context, h.tensor(64, 2), 4, True)
        assert ffi.string(lib.ggml_spec_mode_name(out)) == b"TOP_K/SORTED"
