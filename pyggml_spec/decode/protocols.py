"""What a round needs of a target and a drafter: duck-typed, so that fakes test decoding without native code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pyggml_spec.tree.draft_tree import DraftTree

CLOSED = "this session was closed: open another one"


@dataclass(frozen=True, eq=False)
class Posterior:
    """The target's answer to one verify.

    Shapes:
        argmax_ids: (n,) int32, the token of the highest logit after each node
        logits:     (n, n_vocab) float32 when asked for, else None
    """

    argmax_ids: NDArray[np.int32]
    logits: NDArray[np.float32] | None = None


@dataclass(frozen=True, eq=False)
class DraftBlock:
    """What a drafter proposes after the anchor; row i belongs to the token at depth i + 1.

    Shapes:
        ids:        (n_draft, k) int32, best first
        logprobs:   (n_draft, k) float32, natural log
        confidence: (n_draft,) float32, chance that a row's best token is accepted given those before it were; or None
        source:     prefix-conditioned top-k `source(prefix_token_ids, depth)` of tree/build.py; None = marginals only
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    confidence: NDArray[np.float32] | None = None
    source: Callable[[Sequence[int], int], tuple[Sequence[int], Sequence[float]]] | None = None


class TargetSequence(Protocol):
    """One sequence on the target: `length` committed tokens are in its caches, the anchor is not among them.

    A target whose last call failed half-way may also say so with `is_void`: only `reset` makes it usable again.
    """

    n_ctx: int  # most committed tokens the caches can hold
    n_ctx_train: int  # most they could hold if loaded with a larger n_ctx: what the model was trained with
    max_width: int  # most nodes of one verify

    @property
    def length(self) -> int:
        """Committed tokens in the caches."""

    def prefill(self, token_ids: Sequence[int], on_chunk: Callable[[int], None] | None) -> None:
        """Append committed tokens; `on_chunk(n_done)` runs between chunks and may raise to stop there."""

    def verify(self, tree: DraftTree, *, top_k: int = 1, logits: bool = False) -> Posterior:
        """Run the target over the tree's nodes, the anchor included."""

    def accept(self, path: Sequence[int]) -> None:
        """Commit these nodes of the last verify, anchor first: length grows by len(path)."""

    def discard(self) -> None:
        """Drop the result of a completed verify: the anchor stays the anchor."""

    def reset(self) -> None:
        """Forget everything: length becomes 0."""

    def snapshot(self) -> Any:
        """The caches as they are, with `length`, `n_bytes` and `release()`; what is pending is folded first."""

    def restore(self, snapshot: Any) -> None:
        """Go on from a snapshot of this or another sequence; OptionError, and no change, when it is outdated."""


class DrafterSequence(Protocol):
    """One sequence on the drafter.

    A drafter with a smaller context than the target's also has an `n_ctx`; one whose blocks always carry confidences
    has `has_confidence_head` set.
    """

    @property
    def kind(self) -> str:
        """Kind of drafter, for statistics."""

    draft_horizon: int  # most tokens one block proposes

    def catch_up(self) -> None:
        """Take in the target features of tokens committed since the last call."""

    def draft(self, anchor_id: int, *, n_draft: int, top_k: int) -> DraftBlock:
        """Propose `n_draft` positions after the anchor (catches up by itself)."""

    def reset(self) -> None:
        """Forget everything."""

    def snapshot(self) -> Any:
        """The context as it is after `catch_up`, with `release()`."""

    def restore(self, snapshot: Any) -> None:
        """Go on from a snapshot taken at the same moment as the target's."""
