"""The CPU product of quantised and f16 weights: within its rounding bound, and the same bits for every width."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import Harness, view

from pyggml_spec._native import ffi, lib

QUANTISED = {
    "Q8_0": (lib.GGML_TYPE_Q8_0, 32),  # numbers under one activation scale
    "Q4_K": (lib.GGML_TYPE_Q4_K, 256),
    "Q5_K": (lib.GGML_TYPE_Q5_K, 256),
    "Q6_K": (lib.GGML_TYPE_Q6_K, 256),
}
TYPES = [*QUANTISED, "F16"]
quick = settings(max_examples=8, deadline=None)


def make_weights(kind: str, n_in: int, n_rows: int, rng: np.random.Generator) -> bytes:
    """Rows of the type as a file holds them."""
    values = rng.normal(size=(n_rows, n_in)).astype(np.float32)
    if kind == "F16":
        return values.astype(np.float16).tobytes()
    type_id, _ = QUANTISED[kind]
    out = bytearray(n_rows * lib.ggml_row_size(type_id, n_in))
    memory = ffi.cast("float *", ffi.from_buffer(values))
    lib.ggml_quantize_chunk(type_id, memory, ffi.from_buffer(out), 0, n_rows, n_in, ffi.NULL)
    return bytes(out)


def as_float64(kind: str, weights: bytes, n_rows: int) -> np.ndarray:
    """(n_rows, n_in), by an implementation that is not ggml's."""
    data = np.frombuffer(weights, dtype=np.uint8).reshape(n_rows, -1)
    values = gguf.quants.dequantize(data, getattr(gguf.GGMLQuantizationType, kind))
    return values.reshape(n_rows, -1).astype(np.float64)


def run(
    kind: str, weights: bytes, x: np.ndarray, n_rows: int, n_threads: int = 1, upstream: bool = False
) -> np.ndarray:
    """Product (n_columns, n_rows) of x (n_columns, n_in) whose columns lie in a wider tensor."""
    n_columns, n_in = x.shape
    with Harness(n_threads) as h:
        w = h.tensor(n_in, n_rows, type_id=getattr(lib, f"GGML_TYPE_{kind}"))
        wide = h.tensor(n_in + 32, n_columns)
        out = lib.ggml_mul_mat(h.context, w, lib.ggml_view_2d(h.context, wide, n_in, n_columns, wide.nb[1], 64))
        h.finish(out)
        ffi.buffer(w.data, len(weights))[:] = weights
        view(wide).reshape(n_columns, -1)[:, 16 : 16 + n_in] = x
        if upstream:
            w.buffer = ffi.NULL  # weights of unknown memory are left to upstream
        h.compute()
        return view(out).reshape(n_columns, n_rows).copy()


def rounding_bound(kind: str, weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """What (n_columns, n_rows) may be off by: half a step per activation, and float32 sums."""
    magnitude = np.abs(x) @ np.abs(weights).T
    float_sums = magnitude * x.shape[1] * 2.0**-24
    if kind == "F16":
        return float_sums
    _, shared = QUANTISED[kind]
    steps = np.abs(x.reshape(len(x), -1, shared)).max(axis=2) / 127.0
    half_steps = np.repeat(steps, shared, axis=1) / 2.0
    # A minimum of the k-quants is subtracted from numbers of up to a few times the weight: their sums round first.
    return half_steps @ np.abs(weights).T * (1 + 1e-5) + 4 * float_sums


shapes = st.tuples(st.sampled_from([256, 512, 768, 2304]), st.sampled_from([1, 5, 8, 31, 32, 33, 100]))


@pytest.mark.parametrize("kind", TYPES)
@quick
@given(shapes, st.integers(1, 40), st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_results_stay_within_the_rounding_bound(
    kind: str, shape: tuple[int, int], n_columns: int, seed: int, n_threads: int
) -> None:
    n_in, n_rows = shape
    rng = np.random.default_rng(seed)
    weights = make_weights(kind, n_in, n_rows, rng)
    x = rng.normal(size=(n_columns, n_in)).astype(np.float32)
    x[0, :: n_in // 4] *= 50  # outliers
    exact = as_float64(kind, weights, n_rows)
    found = run(kind, weights, x, n_rows, n_threads)
    assert np.all(np.abs(found - x.astype(np.float64) @ exact.T) <= rounding_bound(kind, exact, x.astype(np.float64)))


@pytest.mark.parametrize("kind", TYPES)
@quick
@given(shapes, st.integers(0, 2**32 - 1), st.integers(2, 5))
def test_a_column_has_the_same_bits_in_every_width(
    kind: str, shape: tuple[int, int], seed: int, n_threads: int
) -> None:
    n_in, n_rows = shape
    rng = np.random.default_rng(seed)
    weights = make_weights(kind, n_in, n_rows, rng)
    x = rng.normal(size=(70, n_in)).astype(np.float32)
    whole = run(kind, weights, x, n_rows, n_threads)
    for width in (1, 2, 3, 4, 5, 8, 17, 32, 65):
        first = int(rng.integers(0, 70 - width + 1))
        part = run(kind, weights, x[first : first + width], n_rows, int(rng.integers(1, 4)))
        assert np.array_equal(part, whole[first : first + width])


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("n_columns", [1, 7])
def test_results_are_close_to_upstream(kind: str, n_columns: int) -> None:
    """Differences are the half precision that upstream rounds activation scales (q8_0) or activations (f16) to."""
    rng = np.random.default_rng(n_columns)
    weights = make_weights(kind, 1024, 96, rng)
    x = rng.normal(size=(n_columns, 1024)).astype(np.float32)
    ours, theirs = run(kind, weights, x, 96), run(kind, weights, x, 96, upstream=True)
    bound = 2.0**-11 if kind in ("Q8_0", "F16") else 1e-6
    assert np.linalg.norm(ours - theirs) <= bound * np.linalg.norm(theirs)


def test_zero_activations_give_zeros() -> None:
    for kind in TYPES:
        weights = make_weights(kind, 256, 40, np.random.default_rng(1))
        assert not run(kind, weights, np.zeros((3, 256), dtype=np.float32), 40).any()


def test_shapes_without_a_kernel_are_left_to_upstream() -> None:
    """Several matrices at once, as an attention product has them."""
    rng = np.random.default_rng(2)
    with Harness() as h:
        w: Any = h.tensor(64, 10, 3, type_id=lib.GGML_TYPE_F16)
        x = h.tensor(64, 4, 3)
        out = lib.ggml_mul_mat(h.context, w, x)
        h.finish(out)
        values = rng.normal(size=(3, 10, 64)).astype(np.float16)
        ffi.buffer(w.data, values.nbytes)[:] = values.tobytes()
        view(x)[...] = rng.normal(size=(3, 4, 64))
        h.compute()
        expected = view(x).astype(np.float64) @ values.astype(np.float64).transpose(0, 2, 1)
        assert np.linalg.norm(view(out) - expected) < 1e-3 * np.linalg.norm(expected)
