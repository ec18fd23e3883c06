"""The parts of `bench` that need no model: prompts, sums, tables, usage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from click.testing import CliRunner

from pyggml_spec.cli import main
from pyggml_spec.cli.bench_measure import Contender, add_stats
from pyggml_spec.cli.bench_prompts import BUILT_IN, split_prompts
from pyggml_spec.cli.bench_report import render_bench, render_parity
from pyggml_spec.decode.stats import Stats


@dataclass
class Done:
    """What a generation returns, as far as it is looked at."""

    stats: dict[str, Any]
    tokens: list[int] = field(default_factory=lambda: [1, 2])


def stats(**changes: Any) -> dict[str, Any]:
    """A report of one generation."""
    return {**Stats("chain", "dflash").report(), **changes}


def contender(name: str, rates: list[tuple[int, float]], **changes: Any) -> Contender:
    """One that had these (tokens, milliseconds) in its repeats."""
    made = Contender(name, {})
    made.take([Done(stats(committed=99, verify_ms=1.0))], counts=False)
    for committed, ms in rates:
        made.take([Done(stats(committed=committed, rounds=committed, verify_ms=ms, **changes))], counts=True)
    return made


HEAD = {
    **{"model": "m", "drafter": "d", "device": "CPU", "device_kind": "cpu", "n_threads": 1, "load": "0.1 on 2 cores"},
    **{"versions": {"ggml": "1"}, "method": "greedy", "excluded": "loading"},
}


def test_prompts_of_a_file():
    """Separated by lines of dashes; a blank prompt is none; dashes inside a line separate nothing."""
    assert split_prompts("a\nb\n---\n\n---  \nc --- d\n") == ["a\nb", "c --- d\n"]
    assert all(text.strip() for text in BUILT_IN) and len(set(BUILT_IN)) == len(BUILT_IN)


def test_sums():
    """Counts and curves of generations that differ in depth; the first reason counts."""
    total = add_stats(
        [
            stats(rounds=2, accepted_per_depth=[2, 1], offered_per_depth=[2, 2], verify_ms=1.5),
            stats(rounds=3, accepted_per_depth=[1], offered_per_depth=[3], verify_ms=2.5),
        ]
    )
    assert (total["rounds"], total["verify_ms"]) == (5, 4.0)
    assert (total["accepted_per_depth"], total["offered_per_depth"]) == ([3, 1], [5, 2])
    assert total["why"] == "nothing was generated"


def test_medians_and_ratios():
    """The warm-up is left out; a slow phase that hits both ways of decoding leaves the ratio alone."""
    off = contender("off", [(10, 10.0), (10, 40.0), (10, 20.0)])
    fast = contender("chain", [(10, 5.0), (10, 20.0), (10, 10.0)], offered=30, accepted=4)
    report = fast.report(off)

    assert report["tok_s"] == 1000.0 and report["tok_s_range"] == [500.0, 2000.0]
    assert report["ratio_to_off"] == 2.0 and report["same_tokens_as_off"] is True and report["engaged"]
    assert off.report(off)["same_tokens_as_off"] is None and off.report(off)["ratio_to_off"] == 1.0
    assert report["verify_ms_per_round"] == 1.0


def test_table():
    """Other text and idle drafters are said aloud."""
    off, chain = contender("off", [(4, 4.0)]), contender("chain", [(4, 2.0)], plain_rounds=4)
    chain.tokens = [[7]]
    text = render_bench(
        {
            **HEAD,
            "contenders": {each.name: each.report(off) for each in (off, chain)},
            "verify_context": 128,
            "verify_ms": {"1": {"chain": 1.0, "tree": 1.0}, "8": {"chain": 3.25, "tree": 4.0}},
            "memory": {"weights": 2_000_000},
        }
    )
    assert "2000.0 tokens/s" in text and "2.00 x" in text and "3.25" in text and "2.0 MB" in text
    assert "OTHER TEXT than off: see --parity; nothing was generated" in text


def parity_row(**changes: Any) -> dict[str, Any]:
    """One comparison."""
    same = {"n_tokens": 9, "smallest_gap": 0.5, "first_divergence": None, "is_near_tie": False}
    return {"prompt": "a\nb", "mode": "chain", **same, **changes}


def test_parity_table():
    """Near-ties and faults are told apart, and a run that ended early has no token."""
    parted = {"first_divergence": 9, "plain_text": "x", "plain_gap": 0.01, "is_near_tie": True}
    tie = parity_row(**parted, speculative_text="\n", speculative_gap=0.02)
    fault = parity_row(**{**parted, "is_near_tie": False}, speculative_text=None, speculative_gap=None)
    counts = {"n_equal": 1, "n_near_ties": 1, "n_faults": 1, "near_tie": 0.1}
    text = render_parity({**HEAD, **counts, "prompts": [parity_row(), tie, fault]})

    assert "a\\nb" in text and "closest decision 0.500 nats" in text
    assert "parts at token 9: '\\n' instead of 'x'; gaps 0.020 and 0.010 nats: near-tie" in text
    assert "gaps no token and 0.010 nats: NO NEAR-TIE" in text and "that is a fault" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-md", "d.gguf"], "give -m too"),
        (["-m", "t.gguf", "--draft-max", "3"], "give -md"),
        (["-m", "t.gguf", "--parity"], "give -md"),
        (["--parity", "--widths", "3"], "--widths is about speed"),
        (["--parity", "--repeats", "3"], "--repeats is about speed"),
        (["--parity", "--drafter-check"], "leave one out"),
        (["--drafter-check", "--draft-max", "2"], "no --draft-max"),
        (["--drafter-check", "--widths", "2"], "--widths is about speed"),
        (["-m", "t.gguf", "--drafter-check"], "--drafter-check needs a drafter"),
        (["--near-tie", "0.2"], "give that"),
        (["--widths", "3,x"], "'x' is not a valid integer"),
        (["--widths", "129"], "129 is not in the range"),
        (["--budget", "0"], "0 is not in the range"),
        (["--repeats", "0"], "0 is not in the range"),
        (["-n", "1"], "1 is not in the range"),
        (["-p", ""], "There is no prompt"),
    ],
)
def test_wrong_usage(arguments: list[str], text: str):
    """One sentence, exit code 2, before anything is loaded."""
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert result.exit_code == 2 and text in " ".join(result.output.split())
