"""Measuring: every way of decoding in turn, the same prompts, medians over the repeats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..decode.completion import Completion
    from ..decode.engine import Engine
    from ..decode.stats import StatsReport
    from .bench_impose import ImposedRun

VERIFY_RUNS = 24  # verifies a width is timed with; the first quarter does not count
VERIFY_CONTEXT = 128  # committed tokens behind which they are timed, when the context has room for them
TIMES = ("draft_ms", "verify_ms", "host_ms")
COUNTS = ("rounds", "plain_rounds", "committed", "offered", "accepted")
CURVES = ("accepted_per_depth", "offered_per_depth")


@dataclass
class Contender:
    """One way of decoding, and what its repeats took; counts are those of one repeat, which all repeats share."""

    name: str
    options: dict[str, Any]  # of Engine.stream
    rates: list[float] = field(default_factory=list)  # tokens/s, rounds only: reading prompts is excluded
    round_ms: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in TIMES})
    totals: dict[str, Any] = field(default_factory=dict)
    tokens: list[list[int]] = field(default_factory=list)  # per prompt

    def take(self, completions: Sequence[Completion | ImposedRun], *, counts: bool) -> None:
        """One repeat over all prompts; the warm-up counts for nothing."""
        if not counts:
            return
        total = add_stats([done.stats for done in completions])
        decode_ms = sum(total[name] for name in TIMES)
        self.rates.append(total["committed"] / decode_ms * 1e3 if decode_ms else 0.0)
        for name in TIMES:
            self.round_ms[name].append(total[name] / max(total["rounds"], 1))
        self.totals, self.tokens = total, [done.tokens for done in completions]

    @property
    def rate(self) -> float:
        """Median tokens/s."""
        return statistics.median(self.rates)

    def report(self, plain: Contender, *, is_imposed: bool = False) -> dict[str, Any]:
        """The JSON entry; a ratio is the median of the repeats' own ones, which the machine's pace does not touch.

        An imposed text is not compared with the plain one.
        """
        total = self.totals
        n_drafting = total["rounds"] - total["plain_rounds"]
        drafted = total["committed"] - total["plain_rounds"]
        ratios = [a / b for a, b in zip(self.rates, plain.rates, strict=True) if b]
        return {
            "tok_s": round(self.rate, 2),
            "tok_s_range": [round(min(self.rates), 2), round(max(self.rates), 2)],
            "ratio_to_off": round(statistics.median(ratios), 3) if ratios else None,
            "same_tokens_as_off": None if self is plain or is_imposed else self.tokens == plain.tokens,
            **{name: total[name] for name in COUNTS},
            "acceptance_length": round(drafted / n_drafting, 4) if n_drafting else None,
            **{name: total[name] for name in CURVES},
            **{f"{name}_per_round": round(statistics.median(values), 4) for name, values in self.round_ms.items()},
            "engaged": total["offered"] > 0,
            "why": total["why"],
        }


def add_stats(reports: Sequence[StatsReport]) -> dict[str, Any]:
    """Counts, times and curves of several generations together."""
    rows: list[dict[str, Any]] = [dict(report) for report in reports]
    total: dict[str, Any] = {name: sum(row[name] for row in rows) for name in (*COUNTS, *TIMES)}
    for name in CURVES:
        curves: list[list[int]] = [row[name] for row in rows]
        n_depths = max((len(curve) for curve in curves), default=0)
        total[name] = [sum(curve[d] for curve in curves if d < len(curve)) for d in range(n_depths)]
    total["why"] = next((report["spec"]["why"] for report in reports if report["spec"]["why"]), None)
    return total


def measure(
    engine: Engine,
    contenders: Sequence[Contender],
    prompts: Sequence[list[int]],
    n_tokens: int,
    repeats: int,
    on_progress: Callable[[int, int], None],
    generate: Callable[..., Completion | ImposedRun] | None = None,
) -> None:
    """Run all contenders in turn on all prompts, once to warm up and then `repeats` times.

    `generate` stands in for the engine's own.
    """
    generate = generate or partial(engine.generate, ignore_eos=True)
    n_done, n_all = 0, (repeats + 1) * len(contenders)
    for repeat in range(repeats + 1):
        for contender in contenders:
            done = [generate(prompt, max_tokens=n_tokens, **contender.options) for prompt in prompts]
            contender.take(done, counts=repeat > 0)
            n_done += 1
            on_progress(n_done, n_all)


def verify_context(engine: Engine) -> int:
    """Committed tokens behind which verifies are timed."""
    limits = engine.target.limits
    return max(min(VERIFY_CONTEXT, limits.n_ctx - limits.max_width), 0)


def verify_times(engine: Engine, width: int) -> dict[str, float]:
    """Median milliseconds of a verify of `width` nodes: a chain, and a tree in which every node has two children."""
    from ..tree.draft_tree import DraftTree

    shapes = {
        "chain": DraftTree.chain(5, list(range(width - 1))),
        "tree": DraftTree.from_parents(list(range(width)), [(node + 1) // 2 - 1 for node in range(width)]),
    }
    session = engine.open_session()
    target = session.target
    try:
        target.prefill([token % session.n_vocab for token in range(100, 100 + verify_context(engine))], None)
        return {
            name: round(_median_ms(partial(target.verify, tree), target.discard), 4) for name, tree in shapes.items()
        }
    finally:
        session.close()


def _median_ms(timed: Callable[[], object], after: Callable[[], object]) -> float:
    times = []
    for _ in range(VERIFY_RUNS):
        begin = time.perf_counter()
        timed()
        times.append(time.perf_counter() - begin)
        after()
    return statistics.median(times[VERIFY_RUNS // 4 :]) * 1e3
