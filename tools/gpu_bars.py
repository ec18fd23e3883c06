"""What is measured beside llama.cpp on a GPU, as lines of a table with the bars that have to be met."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTHS, LONG_WIDTHS = "1,2,3,4,6,8,12,16,22,24,32", "1,8,16,22"
VERIFY_BARS = ("16", "22")
ROUND_WIDTH, ROUND_SLOPE_BAR = "16", 1.10
Numbers = dict[str, Any]  # "verify_ms" and "long_ms": {width: ms}; "plain_ms", "prefill_tok_s", ..; None = not measured
Round = dict[str, Numbers]  # "theirs" and "ours"


@dataclass(frozen=True)
class Plan:
    """What both engines measure."""

    target: Path
    drafter: Path | None
    device: str
    widths: str
    context: int
    plain: int
    prefill: int
    long: int
    long_widths: str

    def without_long(self) -> Plan:
        """The same behind the short context only."""
        return Plan(**{**vars(self), "long": 0})


@dataclass(frozen=True)
class Row:
    """One line of the table: theirs and ours in every round, and the mean of the rounds' ratios."""

    title: str
    pick: Callable[[Numbers], float | None]
    bar: float | None = None  # times at most this ratio, rates at least
    is_rate: bool = False
    is_ours: bool = False  # the bar is for our own numbers

    def ratio(self, rounds: list[Round]) -> float | None:
        """Ours over theirs."""
        pairs = [(self.pick(r["theirs"]), self.pick(r["ours"])) for r in rounds]
        ratios = [ours / theirs for theirs, ours in pairs if theirs and ours]
        return statistics.fmean(ratios) if ratios else None

    def verdict(self, rounds: list[Round]) -> str:
        """Whether the bar is met."""
        if self.bar is None:
            return ""
        own = [ours for r in rounds if (ours := self.pick(r["ours"]))]
        ratio = (statistics.fmean(own) if own else None) if self.is_ours else self.ratio(rounds)
        if ratio is None:
            return "not measured"
        is_met = ratio >= self.bar if self.is_rate else ratio <= self.bar
        return f"{'pass' if is_met else 'MISS'} (bar {'>=' if self.is_rate else '<='} {self.bar:g})"

    def text(self, rounds: list[Round]) -> str:
        """The line."""
        theirs, ours = (" ".join(shown(self.pick(r[side])) for r in rounds) for side in ("theirs", "ours"))
        ratio, verdict = shown(self.ratio(rounds)), self.verdict(rounds)
        return f"{self.title:16} | {theirs:>19} | {ours:>19} | {ratio} {verdict}".rstrip()


def shown(number: float | None) -> str:
    """A number of a column."""
    return f"{'-':>9}" if number is None else f"{number:9.1f}" if number >= 1000 else f"{number:9.3f}"


def table_of(plan: Plan) -> list[Row]:
    """Every line."""
    rows = [Row("plain ms", lambda numbers: numbers.get("plain_ms"), 1.0)] if plan.plain else []
    for width in plan.widths.split(","):
        rows.append(Row(f"verify {width}", at(width, "verify_ms"), 1.0 if width in VERIFY_BARS else None))
    if plan.prefill:
        rows.append(Row("prefill tokens/s", lambda numbers: numbers.get("prefill_tok_s"), 0.95, is_rate=True))
    if plan.long:
        for width in plan.long_widths.split(","):
            rows += [Row(f"long {width}", at(width, "long_ms")), Row(f"slope {width}", slope(width), 1.0)]
        if plan.drafter and all(ROUND_WIDTH in widths.split(",") for widths in (plan.widths, plan.long_widths)):
            rows.append(Row("slope of a round", round_slope, ROUND_SLOPE_BAR, is_ours=True))
    return rows


def at(width: str, name: str) -> Callable[[Numbers], float | None]:
    """Picks the time of a width."""
    return lambda numbers: numbers.get(name, {}).get(width)


def slope(width: str) -> Callable[[Numbers], float | None]:
    """Picks the time behind the long context over that behind the short one."""

    def pick(numbers: Numbers) -> float | None:
        long, short = (at(width, name)(numbers) for name in ("long_ms", "verify_ms"))
        return long / short if long and short else None

    return pick


def round_slope(numbers: Numbers) -> float | None:
    """The same for a draft block and its verify; llama-bench has no drafter."""
    long, short = (
        [numbers.get(draft), at(ROUND_WIDTH, verify)(numbers)]
        for draft, verify in (("long_draft_ms", "long_ms"), ("draft_ms", "verify_ms"))
    )
    return sum(long) / sum(short) if all(long + short) else None
