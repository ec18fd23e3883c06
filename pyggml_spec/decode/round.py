"""One round of decoding: draft, build the tree, verify, walk, cut, commit.

A plain round is the same with a tree of one node, so decoding with and without a drafter is one code path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pyggml_spec.decode.arguments import as_int, is_int
from pyggml_spec.decode.protocols import DraftBlock, DrafterSequence, Posterior, TargetSequence
from pyggml_spec.decode.sampling import Sampler
from pyggml_spec.decode.stops import Cut
from pyggml_spec.errors import DeviceError, OptionError
from pyggml_spec.policy import DraftLimits, DraftPlan, Policy, PolicyName, RoundObservation
from pyggml_spec.records import TokenLogprob
from pyggml_spec.tree.accept import AcceptResult, accept_greedy, accept_sampled
from pyggml_spec.tree.build import MarginalSource, TreeOptions, build_draft_tree
from pyggml_spec.tree.draft_tree import DraftTree

SpecMode = Literal["auto", "off", "chain", "tree"]
SPEC_MODES: tuple[SpecMode, ...] = ("auto", "off", "chain", "tree")


@dataclass(frozen=True)
class SpecOptions:
    """How a generation speculates; `auto` drafts chains when there is a drafter."""

    mode: SpecMode = "auto"
    draft_max: int | None = None  # most draft tokens in sequence; None = the drafter's horizon
    tree: TreeOptions = field(default_factory=TreeOptions)
    confidence: float = 0.0  # a chain ends before the first token whose confidence is lower; 0 = it never does
    policy: PolicyName | None = None  # None = cost for auto, fixed for chain and tree

    @property
    def drafts_trees(self) -> bool:
        """Whether drafts may branch."""
        return self.mode == "tree"


def check_spec(spec: SpecOptions, target: TargetSequence, drafter: DrafterSequence | None) -> None:
    """Refuse speculation options that this pair cannot honour.

    Raises:
        OptionError: naming the option, its value and the limit.
    """
    if spec.mode not in SPEC_MODES:
        raise OptionError(f"`spec` is {spec.mode!r}: it must be one of {', '.join(SPEC_MODES)}")
    if drafter is None and spec.mode in ("chain", "tree"):
        raise OptionError(f"`spec` is {spec.mode!r} but no drafter is loaded: load one, or use auto or off")
    draft_max = as_int(spec.draft_max)
    if draft_max is not None and (not is_int(draft_max) or draft_max < 0):
        raise OptionError(f"`draft_max` is {draft_max!r}: it must be an integer of at least 0 (0 = plain rounds)")
    if drafter is not None and draft_max is not None and draft_max > drafter.draft_horizon:
        raise OptionError(
            f"`draft_max` is {draft_max}: this drafter proposes at most {drafter.draft_horizon} tokens at once"
        )
    if drafter is not None and spec.drafts_trees and spec.tree.budget >= target.max_width:
        raise OptionError(
            f"`budget` is {spec.tree.budget}: this target verifies at most {target.max_width - 1} draft nodes"
        )
    _check_confidence(spec, drafter)


def refuse_ignored(spec: SpecOptions, *, has_drafter: bool) -> None:
    """Raise OptionError for an option that its mode would ignore: whoever set it expects something of it."""
    for name, member in (("budget", "budget"), ("tree_top_k", "top_k"), ("tau", "tau")):
        value = getattr(spec.tree, member)
        if spec.mode != "tree" and value != getattr(TreeOptions, member):
            raise OptionError(f"`{name}` is {value!r}: it shapes trees, so use `spec` tree or leave it out")
    for name in ("draft_max", "policy"):
        value = getattr(spec, name)
        if spec.mode == "off" and value:
            raise OptionError(f"`{name}` is {value!r}, but `spec` off makes no drafts: leave one of them out")
        if not has_drafter and value:
            raise OptionError(f"`{name}` is {value!r}, but no drafter is loaded: load one, or leave it out")


def _check_confidence(spec: SpecOptions, drafter: DrafterSequence | None) -> None:
    value = spec.confidence
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not 0 <= value < 1:
        raise OptionError(f"`confidence` is {value!r}: it must be a number of at least 0 (off) and below 1")
    if not value:
        return
    if drafter is None or spec.mode == "off":
        raise OptionError(f"`confidence` is {value}, but nothing is drafted: load a drafter and do not use `spec` off")
    if spec.drafts_trees:
        raise OptionError(f"`confidence` is {value}: it shortens chains; `budget` and `tau` shape trees instead")
    if not getattr(drafter, "has_confidence_head", False):
        raise OptionError(
            f"`confidence` is {value}, but this {drafter.kind} drafter has no confidence head to judge its tokens: "
            "use a DSpark drafter with one, or leave the option out"
        )


@dataclass(frozen=True, eq=False)
class RoundResult:
    """One committed round; tokens and text after a stop are already cut away."""

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob]  # one per token, empty when not asked for
    stopped: bool
    tree: DraftTree
    path: list[int]  # committed nodes, anchor first
    n_accepted: int  # draft tokens among token_ids; they lie at depths 1 .. n_accepted
    is_drafted: bool  # the drafter was asked, whether or not anything was offered
    why_plain: str | None  # reason when nothing was offered
    confidence: NDArray[np.float32] | None  # (n_draft,) of every drafted position, gated away or not; None = no head
    draft_ms: float
    verify_ms: float
    host_ms: float

    @property
    def n_offered(self) -> int:
        """Draft tokens that were verified."""
        return self.tree.n_drafted


class RoundRunner:
    """Runs rounds for one generation.

    `is_clean` tells, after an exception, whether target and drafter still agree with the committed tokens.
    """

    def __init__(
        self,
        target: TargetSequence,
        drafter: DrafterSequence | None,
        sampler: Sampler,
        spec: SpecOptions,
        policy: Policy,
        clock: Callable[[], float],
    ) -> None:
        check_spec(spec, target, drafter)
        self.target = target
        self.drafter = None if spec.mode == "off" else drafter
        self.sampler = sampler
        self.spec = spec
        self.policy = policy
        self.clock = clock
        self.is_clean = True
        self.mode: SpecMode = "off" if self.drafter is None else "tree" if spec.drafts_trees else "chain"
        self._why_never = "speculation is off" if spec.mode == "off" else "no drafter is loaded"

    def run(self, tokens: Sequence[int], n_wanted: int | None, cut: Callable[[Sequence[int]], Cut]) -> RoundResult:
        """Commit at least one more token after `tokens`, whose last one is the anchor.

        At most `n_wanted` tokens are emitted; `cut` is told the round's tokens before they are committed and says how
        many may stay.
        """
        clock = self.clock
        started = clock()
        plan = self._plan(n_wanted)
        planned = clock()
        self.is_clean = False
        block = self._draft(tokens[-1], plan) if plan.n_draft else None
        drafted = clock()
        tree = self._tree(tokens[-1], plan, block)
        built = clock()
        posterior = self.target.verify(tree, logits=self.sampler.params.needs_logits)
        verified = clock()
        walk, token_ids, kept = self._judge(tokens, tree, posterior, cut)
        path = walk.path[: kept.n_keep]
        self.target.accept(path)
        self.is_clean = True
        draft_ms = (drafted - planned) * 1e3 if block is not None else 0.0
        verify_ms = (verified - built) * 1e3
        result = RoundResult(
            token_ids=token_ids,
            text=kept.text,
            logprobs=self._logprobs(posterior, path, token_ids),
            stopped=kept.stopped,
            tree=tree,
            path=path,
            n_accepted=min(walk.n_accepted, kept.n_keep),
            is_drafted=block is not None,
            why_plain=None if tree.n_drafted else plan.why or self._why_nothing(block),
            confidence=None if block is None else block.confidence,
            draft_ms=draft_ms,
            verify_ms=verify_ms,
            host_ms=max((clock() - started) * 1e3 - draft_ms - verify_ms, 0.0),
        )
        self.policy.observe(_observation(result, block, kept.n_keep < len(walk.path)))
        return result

    def _plan(self, n_wanted: int | None) -> DraftPlan:
        if self.drafter is None:
            return DraftPlan(0, 0, self._why_never)
        limits, why = draft_limits(self.target, self.drafter, self.spec, n_wanted)
        if limits is None:
            return DraftPlan(0, 0, why)
        plan = self.policy.plan(limits)
        if plan.n_draft <= 0:
            return DraftPlan(0, 0, plan.why or "the policy chose a plain round")
        return DraftPlan(min(plan.n_draft, limits.n_draft), min(plan.budget, limits.budget), plan.why)

    def _draft(self, anchor_id: int, plan: DraftPlan) -> DraftBlock:
        assert self.drafter is not None, "a round without a drafter is planned as a plain one"
        top_k = self.spec.tree.top_k if self.spec.drafts_trees else 1
        return self.drafter.draft(int(anchor_id), n_draft=plan.n_draft, top_k=top_k)

    def _tree(self, anchor_id: int, plan: DraftPlan, block: DraftBlock | None) -> DraftTree:
        if block is None:
            return DraftTree.root(anchor_id)
        n_draft = min(plan.n_draft, confident_length(block, self.spec.confidence))
        if self.spec.drafts_trees:
            tree = _branching(anchor_id, block, n_draft, plan.budget, self.spec.tree)
        else:
            tree = DraftTree.chain(anchor_id, block.ids[:n_draft, 0], block.logprobs[:n_draft, 0])
        tree = tree.prefix(self.policy.choose_width(tree.logprobs, tree.parents, block.confidence))
        _check_ids(tree, self.sampler.n_vocab)
        return tree

    def _why_nothing(self, block: DraftBlock | None) -> str:
        if block is not None and len(block.ids) and not confident_length(block, self.spec.confidence):
            return f"the first token drafted was under confidence {self.spec.confidence:g}"
        if block is not None and len(block.ids):
            return "no drafted token was worth verifying"
        return "the drafter proposed nothing"

    def _judge(
        self, tokens: Sequence[int], tree: DraftTree, posterior: Posterior, cut: Callable[[Sequence[int]], Cut]
    ) -> tuple[AcceptResult, list[int], Cut]:
        try:
            walk = self._walk(tokens, tree, posterior)
            emitted = walk.emitted_ids(tree)
            kept = cut(emitted)
            return walk, emitted[: kept.n_keep], kept
        except BaseException:
            self.target.discard()
            self.is_clean = True
            raise

    def _walk(self, tokens: Sequence[int], tree: DraftTree, posterior: Posterior) -> AcceptResult:
        sampler = self.sampler
        if sampler.params.temperature == 0 and not sampler.params.has_penalties:
            return accept_greedy(tree, posterior.argmax_ids)
        n_prefix = sampler.n_prefix
        recent = list(tokens[:-1] if n_prefix is None else tokens[max(len(tokens) - 1 - n_prefix, 0) : -1])
        ids, logits = tree.token_ids.tolist(), posterior.logits
        assert logits is not None, "logits were asked for"

        def choose(node: int, path: list[int]) -> int:
            return sampler.choose(logits[node], recent + [ids[seen] for seen in path])

        return accept_sampled(tree, choose)

    def _logprobs(self, posterior: Posterior, path: list[int], token_ids: list[int]) -> list[TokenLogprob]:
        if not self.sampler.params.logprobs or posterior.logits is None:
            return []
        rows = posterior.logits
        return [self.sampler.logprob(rows[node], token_id) for node, token_id in zip(path, token_ids, strict=True)]


def confident_length(block: DraftBlock, threshold: float) -> int:
    """Positions before the first whose confidence lies under the threshold; all of them when there is none (0)."""
    if not threshold:
        return len(block.ids)
    if block.confidence is None or len(block.confidence) < len(block.ids):
        raise DeviceError("the drafter gave confidences for only a part of its block: the gate needs all of them")
    below = np.flatnonzero(block.confidence < threshold)
    return int(below[0]) if len(below) else len(block.ids)


def draft_limits(
    target: TargetSequence, drafter: DrafterSequence, spec: SpecOptions, n_wanted: int | None
) -> tuple[DraftLimits | None, str | None]:
    """The most a draft can be of use now, or None and the reason for a plain round."""
    length = target.length
    n_ctx_drafter = getattr(drafter, "n_ctx", None) or target.n_ctx
    bounds = [
        (drafter.draft_horizon if spec.draft_max is None else spec.draft_max, "draft_max is 0"),
        (target.max_width - 1, "the target verifies one token at a time"),
        (target.n_ctx - length - 1, "the context is nearly full"),
        (n_ctx_drafter - length - 1, f"the drafter's context of {n_ctx_drafter} tokens is full"),
        (target.n_ctx if n_wanted is None else n_wanted - 1, "one token is left to generate"),
    ]
    n_draft, why = min(bounds, key=lambda bound: bound[0])  # among equals the lasting reason
    if n_draft <= 0:
        return None, why
    if not spec.drafts_trees:
        return DraftLimits(n_draft, n_draft), None
    return DraftLimits(n_draft, min(spec.tree.budget, target.max_width - 1, target.n_ctx - length - 1)), None


def _branching(anchor_id: int, block: DraftBlock, n_draft: int, budget: int, options: TreeOptions) -> DraftTree:
    return build_draft_tree(
        block.source or MarginalSource(block.ids, block.logprobs),
        anchor_id,
        horizon=n_draft,
        budget=budget,
        top_k=options.top_k,
        tau=options.tau,
        chain_seed=options.chain_seed,
        temperature=options.temperature,
    )


def _check_ids(tree: DraftTree, n_vocab: int) -> None:
    if tree.token_ids.min() < 0 or tree.token_ids.max() >= n_vocab:
        raise DeviceError(
            f"the drafter proposed tokens {tree.token_ids[1:].tolist()}: ids must lie in 0 .. {n_vocab - 1}"
        )


def _observation(result: RoundResult, block: DraftBlock | None, cut: bool) -> RoundObservation:
    tree = result.tree
    return RoundObservation(
        logprobs=tree.logprobs,
        parents=tree.parents,
        depths=tree.depths,
        path=tuple(result.path),
        n_offered=tree.n_drafted,
        n_accepted=result.n_accepted,
        cut=cut,
        drafted=result.is_drafted,
        confidence=None if block is None else block.confidence,
        draft_ms=result.draft_ms,
        verify_ms=result.verify_ms,
        host_ms=result.host_ms,
    )
