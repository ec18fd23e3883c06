"""What a generation did and how long it took, as `run --json` reports it.

Times are sums over the generation in milliseconds; rates follow from them. `accepted` counts draft tokens that were
emitted, `offered` those that were really verified (a shortened draft offers less than the horizon, a plain round
nothing), and tokens after a stop count nowhere.
"""

from __future__ import annotations

from collections import Counter
from typing import TypedDict

from pyggml_spec.decode.round import RoundResult


class SpecReport(TypedDict):
    """Whether speculation took place and, if some or all rounds were plain, why."""

    engaged: bool
    mode: str
    drafter_kind: str | None
    why: str | None


class StatsReport(TypedDict):
    """The `stats` object of `run --json`."""

    rounds: int  # plain rounds included
    plain_rounds: int  # rounds that offered nothing
    committed: int  # generated tokens
    offered: int
    accepted: int
    accept_rate: float  # accepted / offered
    acceptance_length: float  # tokens per speculating round, bonus included (per round, when none speculated)
    accepted_per_depth: list[int]  # entry d - 1: how often the token at depth d was accepted
    offered_per_depth: list[int]  # entry d - 1: how often a token was offered at depth d
    confidence_per_depth: list[float]  # entry d - 1: mean confidence of tokens drafted at depth d; [] without a head
    draft_ms: float
    verify_ms: float
    host_ms: float
    prompt_tokens_cached: int  # taken from snapshots of earlier prompts instead of being computed
    rebuilds: int  # times the caches were computed anew because the device had failed half-way
    prefill_tok_s: float
    decode_tok_s: float
    spec: SpecReport


class Stats:
    """Counters of one generation."""

    def __init__(self, mode: str = "off", drafter_kind: str | None = None) -> None:
        self.mode = mode
        self.drafter_kind = drafter_kind
        self.rounds = self.plain_rounds = self.committed = self.committed_in_plain = self.offered = self.accepted = 0
        self.accepted_per_depth: list[int] = []
        self.offered_per_depth: list[int] = []
        self._confidence_per_depth: list[tuple[int, float]] = []  # how many, and their sum
        self.draft_ms = self.verify_ms = self.host_ms = self.prefill_ms = 0.0
        self.prefilled = self.cached = self.rebuilds = 0
        self._why_plain: Counter[str] = Counter()

    def record_prefill(self, n_tokens: int, elapsed_ms: float) -> None:
        """Count prompt tokens that were computed; tokens already cached do not count."""
        self.prefilled += n_tokens
        self.prefill_ms += elapsed_ms

    def record_cached(self, n_tokens: int) -> None:
        """Count tokens that a snapshot spared."""
        self.cached += n_tokens

    def record_rebuild(self) -> None:
        """Count caches lost to a failed call."""
        self.rebuilds += 1

    def record(self, result: RoundResult) -> None:
        """Count one committed round."""
        self.rounds += 1
        self.committed += len(result.token_ids)
        self.offered += result.n_offered
        self.accepted += result.n_accepted
        if not result.n_offered:
            self.plain_rounds += 1
            self.committed_in_plain += len(result.token_ids)
            self._why_plain[result.why_plain or "unknown"] += 1
        _count(self.accepted_per_depth, result.tree.max_depth, result.n_accepted)
        _count(self.offered_per_depth, result.tree.max_depth, result.tree.max_depth)
        self._count_confidence(result)
        self.draft_ms += result.draft_ms
        self.verify_ms += result.verify_ms
        self.host_ms += result.host_ms

    @property
    def decode_ms(self) -> float:
        """Time of all rounds."""
        return self.draft_ms + self.verify_ms + self.host_ms

    def report(self) -> StatsReport:
        """The document, rounded to what the clock can tell."""
        return {
            "rounds": self.rounds,
            "plain_rounds": self.plain_rounds,
            "committed": self.committed,
            "offered": self.offered,
            "accepted": self.accepted,
            "accept_rate": round(_ratio(self.accepted, self.offered), 4),
            "acceptance_length": round(self._acceptance_length(), 4),
            "accepted_per_depth": list(self.accepted_per_depth),
            "offered_per_depth": list(self.offered_per_depth),
            "confidence_per_depth": [round(total / n, 4) for n, total in self._confidence_per_depth],
            "draft_ms": round(self.draft_ms, 3),
            "verify_ms": round(self.verify_ms, 3),
            "host_ms": round(self.host_ms, 3),
            "prompt_tokens_cached": self.cached,
            "rebuilds": self.rebuilds,
            "prefill_tok_s": round(_ratio(self.prefilled * 1e3, self.prefill_ms), 2),
            "decode_tok_s": round(_ratio(self.committed * 1e3, self.decode_ms), 2),
            "spec": {
                "engaged": self.offered > 0,
                "mode": self.mode,
                "drafter_kind": self.drafter_kind,
                "why": self._why(),
            },
        }

    def _acceptance_length(self) -> float:
        speculating = self.rounds - self.plain_rounds
        if speculating:
            return (self.committed - self.committed_in_plain) / speculating
        return _ratio(self.committed, self.rounds)

    def _why(self) -> str | None:
        if not self.rounds:
            return "nothing was generated"
        reasons = [f"{count} of {self.rounds} rounds plain: {why}" for why, count in self._why_plain.most_common()]
        return "; ".join(reasons) or None

    def _count_confidence(self, result: RoundResult) -> None:
        values = [] if result.confidence is None else result.confidence.tolist()
        sums = self._confidence_per_depth
        sums.extend([(0, 0.0)] * (len(values) - len(sums)))
        for depth, value in enumerate(values):
            n, total = sums[depth]
            sums[depth] = (n + 1, total + value)


def _count(counts: list[int], n_depths: int, n_reached: int) -> None:
    """One more for each of the first `n_reached` depths of a list with at least `n_depths` entries."""
    counts.extend([0] * (n_depths - len(counts)))
    for depth in range(n_reached):
        counts[depth] += 1


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else 0.0
