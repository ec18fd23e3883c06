"""Does speculation change the text? Two greedy runs compared, and how close the decision was where they part.

Products that add up in another order at another width move logits by rounding errors. Greedy text can then differ where
the two best tokens are nearly tied; a difference at a wide gap is a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyggml_spec.decode.round import SpecOptions
from pyggml_spec.records import SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from pyggml_spec.decode.engine import Engine


@dataclass(frozen=True)
class Parity:
    """A speculative greedy run beside a plain one; gaps are best minus second-best logit, in nats."""

    n_tokens: int  # compared: up to and without the first difference
    smallest_gap: float  # of the plain run over these: how near its closest decision was; infinite when there is none
    first_divergence: int | None = None  # index of the first generated token that differs
    plain_id: int | None = None  # what either run chose there; None when that run had ended
    speculative_id: int | None = None
    plain_gap: float | None = None  # of either run at this place
    speculative_gap: float | None = None

    @property
    def is_equal(self) -> bool:
        """Whether both runs emitted the same tokens."""
        return self.first_divergence is None

    def is_within(self, gap: float) -> bool:
        """Whether the runs are equal, or part where both saw the two best tokens less than `gap` nats apart."""
        gaps = (self.plain_gap, self.speculative_gap)
        return self.is_equal or all(found is not None and found < gap for found in gaps)


def compare_with_plain(
    engine: Engine, token_ids: Sequence[int], spec: SpecOptions, *, max_tokens: int = 128
) -> Parity:
    """Generate greedily with `spec` and plainly, each from nothing, and compare token by token."""
    plain, speculative = (_greedy(engine, token_ids, options, max_tokens) for options in (SpecOptions("off"), spec))
    return compare_runs(plain, speculative)


def compare_runs(plain: Sequence[TokenLogprob], speculative: Sequence[TokenLogprob]) -> Parity:
    """The same for finished runs: one entry a token, each with the two best log-probabilities at its place."""
    n_both = min(len(plain), len(speculative))
    ids = zip(plain, speculative, strict=False)
    first = next((i for i, (a, b) in enumerate(ids) if a.token_id != b.token_id), n_both)
    smallest = min((_gap(entry) for entry in plain[:first]), default=float("inf"))
    if first == len(plain) == len(speculative):
        return Parity(first, smallest)
    here, there = (run[first] if first < len(run) else None for run in (plain, speculative))
    return Parity(
        first,
        smallest,
        first,
        None if here is None else here.token_id,
        None if there is None else there.token_id,
        None if here is None else _gap(here),
        None if there is None else _gap(there),
    )


def _greedy(engine: Engine, token_ids: Sequence[int], spec: SpecOptions, max_tokens: int) -> list[TokenLogprob]:
    session = engine.open_session()
    session.caches.prefixes = None  # what another run computed is no evidence
    try:
        emissions = session.generate(token_ids, SamplingParams(logprobs=2), spec=spec, max_tokens=max_tokens)
        return [entry for emission in emissions for entry in emission.logprobs]
    finally:
        session.close()


def _gap(entry: TokenLogprob) -> float:
    (_, best), (_, second) = entry.top[:2]
    return best - second
