"""Imposed acceptance: as often as asked for, by depth and among siblings, and said aloud."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from pyggml_spec.cli import main
from pyggml_spec.cli.bench_impose import SIBLING_SHARE, ImposedDrafter, ImposedTarget, shares
from pyggml_spec.cli.bench_report import render_head
from pyggml_spec.decode.protocols import DraftBlock, Posterior
from pyggml_spec.tree.accept import accept_greedy
from pyggml_spec.tree.draft_tree import DraftTree

N_VOCAB, N_ROUNDS = 50, 4000
CHAIN = DraftTree.chain(5, [7, 8, 9])
STAR = DraftTree.from_parents([5, 7, 8, 9], [-1, 0, 0, 0])


class Target:
    """Always chooses token 7."""

    n_ctx = 99

    def verify(self, tree: DraftTree, **options: Any) -> Posterior:
        return Posterior(np.full(tree.n_nodes, 7, np.int32))


class Drafter:
    """Two places, three equally likely candidates."""

    kind = "fake"

    def draft(self, anchor_id: int, *, n_draft: int, top_k: int) -> DraftBlock:
        ids = np.array([[1, 2, 3], [4, 5, 6]], np.int32)[:n_draft, :top_k]
        return DraftBlock(ids, np.full(ids.shape, -9, np.float32))


def walks(rates: list[float], tree: DraftTree) -> list[list[int]]:
    """Accepted paths of many rounds."""
    target = ImposedTarget(Target(), rates, N_VOCAB, [1, 2])
    return [accept_greedy(tree, target.verify(tree).argmax_ids).path for _ in range(N_ROUNDS)]


def test_rates_are_conditional_on_the_depth_before():
    """Three standard errors; the last rate goes on."""
    lengths = np.array([len(path) - 1 for path in walks([0.8, 0.5], CHAIN)])
    for depth, rate in enumerate((0.8, 0.5, 0.5)):
        reached = lengths >= depth
        error = np.sqrt(rate * (1 - rate) / reached.sum())

        assert abs((lengths[reached] > depth).mean() - rate) < 3 * error


def test_siblings_take_what_is_left():
    """Each next one is right in half of the rounds in which no better one was."""
    accepted = np.array([path[-1] for path in walks([0.6], STAR)])
    found = [(accepted == node).mean() for node in (1, 2, 3, 0)]

    assert np.allclose(found, [0.6, 0.2, 0.1, 0.1], atol=0.03)
    assert SIBLING_SHARE == 0.5 and shares(0.6, 3) == pytest.approx([0.6, 0.2, 0.1])


@pytest.mark.parametrize("tree", [CHAIN, STAR])
def test_never_and_always(tree: DraftTree):
    """A token that is refused is replaced by one that is no sibling."""
    assert {len(path) for path in walks([0.0], CHAIN)} == {1}
    assert {path[1] for path in walks([1.0], tree)} == {1}


def test_the_same_in_every_repeat():
    """Repeats differ in time only."""
    assert walks([0.7], CHAIN) == walks([0.7], CHAIN)


def test_a_drafter_looks_as_good_as_it_is_made():
    """Log-probabilities follow the rates; ids and everything else are the drafter's own."""
    drafter = ImposedDrafter(Drafter(), [0.9, 0.5])
    block = drafter.draft(0, n_draft=2, top_k=3)

    assert drafter.kind == "fake" and block.ids.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert np.allclose(np.exp(block.logprobs), [[0.9, 0.05, 0.025], [0.5, 0.25, 0.125]])
    assert drafter.draft(0, n_draft=1, top_k=1).logprobs.shape == (1, 1)
    assert ImposedTarget(Target(), [0.5], N_VOCAB, []).n_ctx == 99


def test_it_is_said_that_nothing_is_real():
    """In the head of the table."""
    names = {"model": "m", "drafter": "d", "device": "CPU", "device_kind": "cpu", "n_threads": 1, "load": None}
    head = {**names, "versions": {}, "method": "greedy", "excluded": "loading"}

    shown = render_head({**head, "imposed": [0.8, 0.75]})
    assert "acceptance by depth 0.8, 0.75; in trees" in shown and "THE TEXT IS NOT REAL" in shown
    assert "REAL" not in render_head({**head, "imposed": []})


def test_the_assumption_on_siblings_is_said():
    """By --help and by the head of the table, with the number that is computed with."""
    help_text = CliRunner().invoke(main, ["bench", "--help"], terminal_width=110).output
    names = {"model": "m", "drafter": "d", "device": "CPU", "device_kind": "cpu", "n_threads": 1, "load": None}
    head = render_head({**names, "versions": {}, "method": "greedy", "excluded": "loading", "imposed": [0.5]})

    assert SIBLING_SHARE == 0.5
    for text in (help_text, head):
        assert "half of the remaining times" in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--impose", "0.9,1.5"], "1.5 is not in the range"),
        (["--impose", "0.9,high"], "'high' is not a valid float"),
        (["--impose", ""], "'' is not a valid float"),
        (["-m", "t.gguf", "--impose", "0.9"], "--impose needs a drafter"),
        (["--parity", "--impose", "0.9"], "--impose is about speed"),
    ],
)
def test_usage(arguments: list[str], text: str):
    """Refused before anything is loaded."""
    result = CliRunner().invoke(main, ["bench", *arguments])

    assert result.exit_code == 2 and text in result.output, result.output
