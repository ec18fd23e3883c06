"""What a policy sees and answers.

A round asks twice: `plan` before the draft (is a draft worth its time, and how long?) and `choose_width` after it
(how many of the drafted nodes are worth verifying, now that their probabilities are known?). Afterwards `observe`
reports what happened. A policy has no clock and no randomness: times are inputs, so that traces replay exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class DraftLimits:
    """The most the next round can use: 0 < n_draft <= budget, both already within context, max_tokens and width."""

    n_draft: int  # depth: positions of a drafted block
    budget: int  # non-root nodes of a tree; equals n_draft for chains


@dataclass(frozen=True)
class DraftPlan:
    """A policy's answer before the draft; n_draft 0 asks for a plain round, and `why` says for what reason."""

    n_draft: int
    budget: int
    why: str | None = None


@dataclass(frozen=True, eq=False)
class RoundObservation:
    """One finished round.

    A round whose whole draft was accepted is censored: the true acceptance length is only bounded from below. So is
    one that a stop cut short; then `cut` is True and n_accepted counts the tokens that were kept.

    Shapes: logprobs, parents, depths (n_offered + 1,) of the verified tree, node 0 the anchor; path: accepted nodes,
    anchor first.
    """

    logprobs: NDArray[np.float32]
    parents: NDArray[np.int32]
    depths: NDArray[np.int32]
    path: tuple[int, ...]
    n_offered: int
    n_accepted: int
    cut: bool
    drafted: bool  # False for a plain round
    confidence: NDArray[np.float32] | None  # (n_draft,) of a drafter with a confidence head
    draft_ms: float
    verify_ms: float
    host_ms: float


class Policy(Protocol):
    """How much to speculate."""

    def plan(self, limits: DraftLimits) -> DraftPlan:
        """Decide before the draft; the answer must not exceed the limits."""

    def choose_width(
        self, logprobs: NDArray[np.float32], parents: NDArray[np.int32], confidence: NDArray[np.float32] | None
    ) -> int:
        """Decide after it: how many of the tree's first nodes (anchor included) to verify, 1 .. n.

        Shapes: logprobs, parents (n,) in the tree's topological order; confidence (n_draft,) or None.
        """

    def observe(self, observation: RoundObservation) -> None:
        """Learn from a finished round, plain ones included."""
