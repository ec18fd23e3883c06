"""Where two greedy runs part, and how close the decision was."""

from __future__ import annotations

import math

import pytest

from pyggml_spec.decode.parity import Parity, compare_runs
from pyggml_spec.records import TokenLogprob


def entries(*rows: tuple[int, float]) -> list[TokenLogprob]:
    """Tokens with the gap to their second-best."""
    return [TokenLogprob(token, -0.1, ((token, -0.1), (99, -0.1 - gap))) for token, gap in rows]


def test_equal_runs():
    """The closest decision is told, so that luck can be told from parity."""
    run = entries((1, 2.0), (2, 0.25), (3, 1.0))

    parity = compare_runs(run, list(run))
    assert parity.is_equal and parity.is_within(0.0)
    assert (parity.n_tokens, parity.smallest_gap) == (3, pytest.approx(0.25))


def test_first_difference():
    """Both choices and both gaps; what comes after is not compared."""
    parity = compare_runs(entries((1, 2.0), (2, 0.01), (3, 1.0)), entries((1, 2.0), (5, 0.02), (7, 1.0)))

    assert (parity.n_tokens, parity.first_divergence, parity.plain_id, parity.speculative_id) == (1, 1, 2, 5)
    assert (parity.plain_gap, parity.speculative_gap) == (pytest.approx(0.01), pytest.approx(0.02))
    assert parity.is_within(0.03) and not parity.is_within(0.015) and not parity.is_equal


@pytest.mark.parametrize("swap", [False, True])
def test_a_run_that_ends_early(swap: bool):
    """A missing token is a difference, and never a near-tie."""
    runs = entries((1, 2.0), (2, 0.01)), entries((1, 2.0))
    parity = compare_runs(*(runs[::-1] if swap else runs))

    assert parity.first_divergence == 1 and not parity.is_within(1.0)
    assert {parity.plain_id, parity.speculative_id} == {2, None}


def test_nothing_to_compare():
    """Two empty runs agree."""
    assert compare_runs([], []) == Parity(0, math.inf)
