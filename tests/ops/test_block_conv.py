"""DFlash2's convolution: memory order proved with exact values, then random operands against float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import Harness, message
from reference import heads

from pyggml_spec._native import ffi, lib
from pyggml_spec.ggml import F32, Backend, Graph, GraphArena, ops, spec_ops
from pyggml_spec.ggml.backend import choose_device

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("device")]

# Per tap one sum and one product, then a sum over the taps: 4 rounding units of the largest term each.
ROUNDING = 4 * 2.0**-24


def run(x: np.ndarray, dynamic: np.ndarray, base: np.ndarray, side: int, n_threads: int = 1) -> np.ndarray:
    """x (n, c), dynamic (n, 2, taps, groups), base (2, taps, c) -> (n, c); rows of x and dynamic lie apart."""
    arrays = {"x": np.repeat(x, 2, axis=0), "dynamic": np.repeat(dynamic.reshape(len(x), -1), 3, axis=0), "base": base}
    with Backend(choose_device(Harness.device), n_threads) as backend:
        arena = GraphArena(backend)
        graph = Graph(arena, 16)
        inputs = {name: graph.input(F32, array.shape[::-1], name) for name, array in arrays.items()}
        sparse = {}
        for name, step in (("x", 2), ("dynamic", 3)):
            whole = inputs[name]
            sparse[name] = ops.view(graph.context, whole, [whole.ne[0], len(x)], [step * whole.nb[1]])
        out = graph.output(spec_ops.block_conv(graph.context, sparse["x"], sparse["dynamic"], inputs["base"], side))
        graph.place()
        for name, array in arrays.items():
            inputs[name].set(np.ascontiguousarray(array, np.float32))
        graph.run()
        result = out.get()
        graph.close()
        arena.close()
    return result


def random_operands(
    rng: np.random.Generator, n: int, taps: int, groups: int, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shapes = [(n, groups * size), (n, 2, taps, groups), (2, taps, groups * size)]
    x, dynamic, base = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return x, dynamic, base


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 17), taps=st.integers(1, 7), groups=st.integers(1, 9), size=st.sampled_from([1, 3, 8, 16, 33]),
    side=st.integers(0, 1), n_threads=st.integers(1, 2), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_any_size(n: int, taps: int, groups: int, size: int, side: int, n_threads: int, seed: int) -> None:
    """Against the definition; more taps than slots included."""
    x, dynamic, base = random_operands(np.random.default_rng(seed), n, taps, groups, size)
    weights = np.repeat(dynamic.astype(np.float64), size, axis=3) + base
    wanted = heads.convolve(x.astype(np.float64), weights, side)
    largest = max(1.0, float(np.abs(weights).max() * np.abs(x).max()))

    assert np.abs(run(x, dynamic, base, side, n_threads) - wanted).max() < ROUNDING * taps * largest


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("tap", [0, 1, 2])
def test_tap_order(side: int, tap: int) -> None:
    """With one learned weight set to 1, tap t shifts the block by t slots: exact, so memory order cannot be off."""
    base = np.zeros((2, 3, 12), np.float32)
    base[side, tap] = 1
    x = np.arange(5 * 12, dtype=np.float32).reshape(5, 12) + 1
    out = run(x, np.zeros((5, 2, 3, 3), np.float32), base, side)

    assert np.array_equal(out[tap:], x[: 5 - tap]) and not out[:tap].any()


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("tap", [0, 1, 2])
@pytest.mark.parametrize("group", [0, 2])
def test_computed_weight_order(side: int, tap: int, group: int) -> None:
    """Value (side, tap, group) of a slot weighs that tap of that group's channels, at that slot and side only."""
    dynamic = np.zeros((5, 2, 3, 3), np.float32)
    dynamic[:, side, tap, group] = np.arange(5) + 1
    sides = [run(np.ones((5, 12), np.float32), dynamic, np.zeros((2, 3, 12), np.float32), s) for s in (0, 1)]
    wanted = np.zeros((5, 12))
    wanted[tap:, 4 * group : 4 * group + 4] = np.arange(tap, 5)[:, None] + 1

    assert np.array_equal(sides[side], wanted) and not sides[1 - side].any()


def test_threads_and_later_slots_change_no_bit() -> None:
    x, dynamic, base = random_operands(np.random.default_rng(1), 9, 3, 7, 16)
    whole = run(x, dynamic, base, 0)

    assert np.array_equal(run(x, dynamic, base, 0, n_threads=2), whole)
    assert np.array_equal(run(x[:4], dynamic[:4], base, 0), whole[:4])


@pytest.mark.parametrize(
    ("x", "dynamic", "base", "side", "complaint"),
    [
        ((12, 5, 2), (18, 5), (12, 3, 2), 0, "x must be f32 [C, N]"),
        ((12, 5), (18, 5), (13, 3, 2), 0, "base must be contiguous f32 [C, taps, 2]"),
        ((12, 5), (18, 5), (12, 3, 3), 0, "base must be contiguous f32 [C, taps, 2]"),
        ((12, 5), (18, 4), (12, 3, 2), 0, "dynamic must be f32"),
        ((12, 5), (17, 5), (12, 3, 2), 0, "a row per side, tap and group"),
        ((12, 5), (30, 5), (12, 3, 2), 0, "groups of equal size"),
        ((12, 5), (18, 5), (12, 3, 2), 2, "the side must be 0 (before) or 1 (after)"),
        ((12, 5), (18, 5), (12, 3, 2), 1, ""),
    ],
)
def test_wrong_operands_are_refused(
    x: tuple[int, ...], dynamic: tuple[int, ...], base: tuple[int, ...], side: int, complaint: str
) -> None:
    with Harness() as h:
        found = message(lib.ggml_spec_check_block_conv(h.tensor(*x), h.tensor(*dynamic), h.tensor(*base), side))

    assert complaint in found and bool(found) == bool(complaint)


def test_mode_is_marked() -> None:
    with Harness() as h:
        out = lib.ggml_spec_block_conv(h.context, h.tensor(12, 5), h.tensor(18, 5), h.tensor(12, 3, 2), 0)

        assert ffi.string(lib.ggml_spec_mode_name(out)) == b"SSM_CONV/BLOCK"
