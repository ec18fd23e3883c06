"""`bench --impose`: the speed that drafts of a given quality would have on these files, whatever the files say.

Everything is computed as always. Then the drafter's log-probabilities are replaced by those of one that is right as
often as was asked for, and the target's choices by ones that make it so. Text and acceptance are therefore made up:
times are real, and so is what they would mean for real models of these shapes that accept as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ..decode.protocols import DraftBlock, DrafterSequence, Posterior, TargetSequence
from .bench_parity import spec_options

if TYPE_CHECKING:
    from ..decode.engine import Engine
    from ..decode.stats import StatsReport
    from ..tree.draft_tree import DraftTree

SIBLING_SHARE = 0.5  # of the times that no better candidate was right, each next one is


@dataclass(frozen=True)
class ImposedRun:
    """What a generation leaves to be measured."""

    tokens: list[int]
    stats: StatsReport


def shares(rate: float, n_candidates: int) -> list[float]:
    """How often each candidate of a place is right, best first, when the best one is at this rate."""
    others = [(1 - rate) * SIBLING_SHARE * (1 - SIBLING_SHARE) ** i for i in range(n_candidates - 1)]
    return [rate, *others]


def rate_at(rates: Sequence[float], place: int) -> float:
    """The rate at a place of the draft; the last one goes on."""
    return rates[min(place, len(rates) - 1)]


class ImposedDrafter:
    """A drafter sequence with its own tokens and imposed log-probabilities; everything else is passed on."""

    def __init__(self, inner: DrafterSequence, rates: Sequence[float]) -> None:
        self._inner = inner
        self._rates = rates
        self._logprobs: dict[tuple[int, ...], NDArray[np.float32]] = {}  # by the shape of a block

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def draft(self, anchor_id: int, *, n_draft: int, top_k: int) -> DraftBlock:
        """The drafter's block; its places no longer depend on what was chosen before them."""
        block = self._inner.draft(anchor_id, n_draft=n_draft, top_k=top_k)
        shape = block.ids.shape
        if shape not in self._logprobs:
            values = np.array([shares(rate_at(self._rates, place), shape[1]) for place in range(shape[0])])
            self._logprobs[shape] = np.log(np.maximum(values, 1e-6)).astype(np.float32).reshape(shape)
        return DraftBlock(block.ids, self._logprobs[shape], block.confidence)


class ImposedTarget:
    """A target sequence that accepts drafted tokens as often as told; everything else is passed on."""

    def __init__(self, inner: TargetSequence, rates: Sequence[float], n_vocab: int, seed: Sequence[int]) -> None:
        self._inner = inner
        self._rates = rates
        self._n_vocab = n_vocab
        self._random = Random(repr(list(seed)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def verify(self, tree: DraftTree, *, top_k: int = 1, logits: bool = False) -> Posterior:
        """The target's verify, and other choices on the path that is accepted."""
        posterior = self._inner.verify(tree, top_k=top_k, logits=logits)
        return Posterior(self._choices(tree, posterior.argmax_ids.copy()), posterior.logits)

    def _choices(self, tree: DraftTree, chosen: NDArray[np.int32]) -> NDArray[np.int32]:
        ids, parents = tree.token_ids.tolist(), tree.parents.tolist()
        node = depth = 0
        while children := [child for child in range(node + 1, len(ids)) if parents[child] == node]:
            right = self._right_one(children, rate_at(self._rates, depth))
            if right is None:
                chosen[node] = self._other_than({ids[child] for child in children}, int(chosen[node]))
                break
            chosen[node] = ids[right]
            node, depth = right, depth + 1
        return chosen

    def _right_one(self, children: list[int], rate: float) -> int | None:
        at = self._random.random()
        for child, share in zip(children, shares(rate, len(children)), strict=True):
            at -= share
            if at < 0:
                return child
        return None

    def _other_than(self, refused: set[int], token_id: int) -> int:
        while token_id in refused:
            token_id = (token_id + 1) % self._n_vocab
        return token_id


def imposed_generation(engine: Engine, rates: Sequence[float]) -> Callable[..., ImposedRun]:
    """Stands in for `Engine.generate`: takes token ids and the options of a way of decoding."""

    def generate(prompt: list[int], *, max_tokens: int, **options: Any) -> ImposedRun:
        session = engine.open_session()
        try:
            session.target = cast(TargetSequence, ImposedTarget(session.target, rates, session.n_vocab, prompt))
            if session.drafter is not None:
                session.drafter = cast(DrafterSequence, ImposedDrafter(session.drafter, rates))
            emissions = session.generate(prompt, spec=spec_options(options), max_tokens=max_tokens)
            tokens = [token_id for emission in emissions for token_id in emission.token_ids]
            return ImposedRun(tokens, session.stats.report())
        finally:
            session.close()

    return generate
