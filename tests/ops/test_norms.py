"""Fused norms: random operands against float64, on the CPU ggml's own bits, rows that lie anywhere in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import Harness, message
from reference.drafter import rms_norm

from pyggml_spec._native import ffi, lib
from pyggml_spec.errors import ShapeError
from pyggml_spec.ggml import F32, I32, Backend, Context, Graph, GraphArena, Tensor, ops, spec_ops
from pyggml_spec.ggml.backend import choose_device

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("device")]

# Relative, in rounding units. The worst case is a GPU's: a mean of squares after at most 16 additions in a thread and
# 10 among threads, of which a square root leaves half (13); the terms' own rounding, eps, mean, root, quotient and
# products (8); an exponential of 2 ulp, its sum and quotient, the product with the gate (7).
ROUNDING = 28 * 2.0**-24
EPS = 1e-6


@dataclass(frozen=True)
class Layout:
    """How the rows of a matrix lie in its memory, in floats; 0, 0 is dense and aligned."""

    shift: int = 0
    gap: int = 0


layouts = st.builds(Layout, st.sampled_from([0, 1, 4]), st.sampled_from([0, 3, 4]))
Build = Callable[..., list[Tensor]]


def compute(
    build: Build, matrices: list[np.ndarray], weight: np.ndarray, layout: Layout = Layout(), n_threads: int = 1
) -> list[np.ndarray]:
    """What `build` makes of the matrices (N, n), laid out so, and the weight; one dense array a result."""
    with Backend(choose_device(Harness.device), n_threads) as backend:
        arena = GraphArena(backend)
        graph = Graph(arena, 32)
        inputs, values = [], []
        for matrix in matrices:
            n_rows, n = matrix.shape
            memory = np.full(layout.shift + n_rows * (n + layout.gap), np.nan, np.float32)
            memory[layout.shift :].reshape(n_rows, -1)[:, :n] = matrix
            whole = graph.input(F32, [len(memory)], "matrix")
            values.append((whole, memory))
            inputs.append(ops.view(graph.context, whole, [n, n_rows], [4 * (n + layout.gap)], 4 * layout.shift))
        weight_input = graph.input(F32, [len(weight)], "weight")
        outputs = [graph.output(result) for result in build(graph.context, *inputs, weight_input)]
        graph.place()
        for tensor, array in [*values, (weight_input, weight)]:
            tensor.set(array)
        graph.run()
        results = [output.get() for output in outputs]
        graph.close()
        arena.close()
    return results


def add_rms_norm(ctx: Context, a: Tensor, b: Tensor, weight: Tensor) -> list[Tensor]:
    return list(spec_ops.add_rms_norm(ctx, a, b, weight, EPS))


def add_then_norm(ctx: Context, a: Tensor, b: Tensor, weight: Tensor) -> list[Tensor]:
    total = ops.add(ctx, a, b)
    return [total, ops.rms_norm(ctx, total, weight, EPS)]


def gated_rms_norm(ctx: Context, x: Tensor, gate: Tensor, weight: Tensor) -> list[Tensor]:
    return [spec_ops.gated_rms_norm(ctx, x, weight, gate, EPS)]


def norm_then_gate(ctx: Context, x: Tensor, gate: Tensor, weight: Tensor) -> list[Tensor]:
    n, (n_values, n_rows) = weight.ne[0], x.ne[:2]
    heads = ops.view(ctx, x, [n, n_values // n, n_rows], [4 * n, x.nb[1]])
    normed = ops.reshape(ctx, ops.rms_norm(ctx, heads, weight, EPS), [n_values, n_rows])
    return [ops.swiglu_split(ctx, gate, normed)]


def random_rows(rng: np.random.Generator, n_rows: int, n: int) -> np.ndarray:
    """Rows whose sizes differ by powers of ten; now and then one of zeros."""
    sizes = rng.choice([0.0, 1e-3, 1.0, 1.0, 100.0], size=(n_rows, 1))
    return (rng.normal(size=(n_rows, n)) * sizes).astype(np.float32)


def random_pair(seed: int, n_rows: int, n: int, n_weights: int) -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(seed)
    matrices = [random_rows(rng, n_rows, n), (rng.normal(size=(n_rows, n)) * 4).astype(np.float32)]
    return matrices, rng.normal(size=n_weights).astype(np.float32)


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert np.all(np.abs(found - wanted) <= ROUNDING * np.abs(wanted))


sizes = st.sampled_from([1, 3, 4, 31, 64, 127, 384, 1000, 1024, 4096, 4097, 5120, 8192, 8196, 16384])
seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=60, deadline=None)


@quick
@given(n=sizes, n_rows=st.integers(1, 9), layout=layouts, n_threads=st.integers(1, 2), seed=seeds)
def test_sum_and_norm(n: int, n_rows: int, layout: Layout, n_threads: int, seed: int) -> None:
    """The sum is the rounded one, the norm within the bound."""
    (a, b), weight = random_pair(seed, n_rows, n, n)
    total, normed = compute(add_rms_norm, [a, b], weight, layout, n_threads)

    assert np.array_equal(total, a + b)
    assert_close(normed, rms_norm(a.astype(np.float64) + b, weight.astype(np.float64), EPS))


@quick
@given(
    n=st.sampled_from([1, 3, 16, 33, 64, 128, 256, 512]), n_heads=st.integers(1, 9), n_rows=st.integers(1, 9),
    layout=layouts, n_threads=st.integers(1, 2), seed=seeds,
)  # fmt: skip
def test_gated_norm(n: int, n_heads: int, n_rows: int, layout: Layout, n_threads: int, seed: int) -> None:
    """Every head by itself."""
    (x, gate), weight = random_pair(seed, n_rows, n * n_heads, n)
    (found,) = compute(gated_rms_norm, [x, gate], weight, layout, n_threads)
    normed = rms_norm(x.astype(np.float64).reshape(n_rows, n_heads, n), weight.astype(np.float64), EPS)
    gate64 = gate.astype(np.float64)

    assert_close(found, normed.reshape(n_rows, -1) * gate64 / (1 + np.exp(-gate64)))


@quick
@given(n=sizes, n_rows=st.integers(1, 9), seed=seeds)
def test_sum_and_norm_have_the_bits_of_the_operations_they_join(device: str, n: int, n_rows: int, seed: int) -> None:
    """On a CPU; a GPU's norm adds in another order."""
    if device == "CPU":
        matrices, weight = random_pair(seed, n_rows, n, n)
        pairs = zip(compute(add_rms_norm, matrices, weight), compute(add_then_norm, matrices, weight), strict=True)

        assert all(np.array_equal(found, wanted) for found, wanted in pairs)


@quick
@given(n=st.sampled_from([16, 64, 128, 256]), n_heads=st.integers(1, 9), n_rows=st.integers(1, 9), seed=seeds)
def test_gated_norm_has_the_bits_of_the_operations_it_joins(
    device: str, n: int, n_heads: int, n_rows: int, seed: int
) -> None:
    """On a CPU, for heads that are a whole number of its vectors."""
    if device == "CPU":
        matrices, weight = random_pair(seed, n_rows, n * n_heads, n)

        assert np.array_equal(compute(gated_rms_norm, matrices, weight), compute(norm_then_gate, matrices, weight))


@pytest.mark.parametrize(("second", "third"), [(2.0**-12, 0), (2.0**-12, 2.0**-25), (2.0**-12 * (1 - 2.0**-24), 0)])
def test_a_mean_between_two_floats_is_rounded_as_in_order(device: str, second: float, third: float) -> None:
    """The squares add up to the middle between two floats, to little more and to little less."""
    x = np.zeros((1, 64), np.float32)
    x[0, 0], x[0, 20], x[0, 40] = 1, second, third
    matrices, weight = [x, np.zeros_like(x)], np.ones(64, np.float32)
    found, wanted = compute(add_rms_norm, matrices, weight), compute(add_then_norm, matrices, weight)

    assert np.array_equal(found[1], wanted[1]) or device != "CPU"
    assert_close(found[1], rms_norm(x.astype(np.float64), np.ones(64), EPS))


@pytest.mark.parametrize("build", [add_rms_norm, gated_rms_norm])
@pytest.mark.parametrize("n", [64, 132, 384, 5120])
def test_other_rows_threads_and_memory_change_no_bit(build: Build, n: int) -> None:
    (a, b), weight = random_pair(n, 23, n, n if build is add_rms_norm or n < 512 else 128)
    whole = compute(build, [a, b], weight)

    for i, result in enumerate(whole):
        assert np.array_equal(compute(build, [a, b], weight, n_threads=2)[i], result)
        assert np.array_equal(compute(build, [a, b], weight, Layout(shift=1, gap=3))[i], result)
        for first, end in ((0, 1), (22, 23), (5, 13)):
            assert np.array_equal(compute(build, [a[first:end], b[first:end]], weight)[i], result[first:end])


def test_large_gates_neither_overflow_nor_vanish() -> None:
    """silu of -100 is 0 to any bound, of 100 it is 100."""
    x, gate = np.ones((1, 32), np.float32), np.tile(np.float32([-100, 100]), 16)[None]
    (found,) = compute(gated_rms_norm, [x, gate], np.ones(32, np.float32))

    assert np.abs(found[0, ::2]).max() < 1e-30
    assert np.allclose(found[0, 1::2], 100, rtol=1e-6)


def test_rows_longer_than_a_block_holds_are_refused(device: str) -> None:
    """A GPU keeps a row in the registers of one block, a head in those of one warp; a CPU takes any."""
    with Backend(choose_device(device), 1) as backend, Context(16) as ctx:
        for n, n_head, fits in ((16384, 512, True), (16385, 513, device == "CPU")):
            row, heads = (ctx.new_tensor(F32, [n_values, 2], "x") for n_values in (n, 3 * n_head))
            weight, head_weight = (ctx.new_tensor(F32, [n_values], "w") for n_values in (n, n_head))
            lib_node = lib.ggml_spec_add_rms_norm(ctx.live(), row.ptr, row.ptr, weight.ptr, EPS)

            assert backend.supports(Tensor(ctx, lib_node)) == fits
            assert backend.supports(spec_ops.gated_rms_norm(ctx, heads, head_weight, heads, EPS)) == fits


@pytest.mark.parametrize(
    ("a", "b", "weight", "eps", "complaint"),
    [
        ((12, 5, 2), (12, 5, 2), (12,), 0.0, "a and b must be f32 [n, N]"),
        ((12, 5), (12, 1), (12,), 0.0, "nothing is repeated"),
        ((12, 5), (12, 5), (6,), 0.0, "the weight must be f32 [n]"),
        ((12, 5), (12, 5), (12, 2), 0.0, "the weight must be f32 [n]"),
        ((12, 5), (12, 5), (12,), -1.0, "eps must be finite and not negative"),
        ((12, 5), (12, 5), (12,), float("nan"), "eps must be finite and not negative"),
        ((12, 5), (12, 5), (12,), 0.0, ""),
    ],
)
def test_wrong_terms_are_refused(
    a: tuple[int, ...], b: tuple[int, ...], weight: tuple[int, ...], eps: float, complaint: str
) -> None:
    with Harness() as h:
        found = message(lib.ggml_spec_check_add_rms_norm(h.tensor(*a), h.tensor(*b), h.tensor(*weight), eps))

    assert complaint in found and bool(found) == bool(complaint)


@pytest.mark.parametrize(
    ("x", "weight", "gate", "eps", "complaint"),
    [
        ((12, 5, 2), (4,), (12, 5, 2), 0.0, "x and the gate must be f32 [S * H, N]"),
        ((12, 5), (4,), (12, 4), 0.0, "must have the same shape"),
        ((12, 5), (5,), (12, 5), 0.0, "a whole number of such heads"),
        ((12, 5), (4, 3), (12, 5), 0.0, "the weight must be f32 [S]"),
        ((12, 5), (4,), (12, 5), float("inf"), "eps must be finite and not negative"),
        ((12, 5), (4,), (12, 5), 0.0, ""),
    ],
)
def test_wrong_heads_are_refused(
    x: tuple[int, ...], weight: tuple[int, ...], gate: tuple[int, ...], eps: float, complaint: str
) -> None:
    with Harness() as h:
        found = message(lib.ggml_spec_check_gated_rms_norm(h.tensor(*x), h.tensor(*weight), h.tensor(*gate), eps))

    assert complaint in found and bool(found) == bool(complaint)


def test_other_types_are_refused_before_ggml_aborts() -> None:
    with Context(8) as ctx:
        x, ids = ctx.new_tensor(F32, [8, 2], "x"), ctx.new_tensor(I32, [8, 2], "ids")
        weight = ctx.new_tensor(F32, [8], "w")
        with pytest.raises(ShapeError, match="add_rms_norm"):
            spec_ops.add_rms_norm(ctx, x, ids, weight, EPS)
        with pytest.raises(ShapeError, match="gated_rms_norm"):
            spec_ops.gated_rms_norm(ctx, x, weight, ids, EPS)


def test_modes_are_marked() -> None:
    with Harness() as h:
        total = lib.ggml_spec_add_rms_norm(h.context, h.tensor(12, 5), h.tensor(12, 5), h.tensor(12), EPS)
        gated = lib.ggml_spec_gated_rms_norm(h.context, h.tensor(12, 5), h.tensor(4), h.tensor(12, 5), EPS)

        assert ffi.string(lib.ggml_spec_mode_name(total)) == b"NORM/ADD_RMS"
        assert ffi.string(lib.ggml_spec_mode_name(gated)) == b"NORM/GATED_RMS"
