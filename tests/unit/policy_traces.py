"""Decoding simulated on a synthetic text: how long a policy needs for it, at the times measured on a small pair."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyggml_spec.policy import DraftLimits, Policy, RoundObservation

DRAFT_MS = 0.63
VERIFY_WIDTHS = [1, 2, 4, 5, 6, 8, 12, 16, 23]
VERIFY_MS = [1.16, 1.54, 1.58, 2.05, 2.3, 3.0, 4.65, 5.9, 7.8]
HOST_MS, DRAFT_HOST_MS = 0.06, 0.12
HORIZON = 7
EASY, MEDIUM, HARD = (0.97, 0.9), (0.85, 0.5), (0.3, 0.05)  # chance of a token's draft: of likely and unlikely tokens


@dataclass
class Trace:
    """A text and what its drafts would be: chances (n, HORIZON) that the draft of token i at depth d + 1 is right
    given those before it, said: the drafter's own probabilities of the same, hits: whether it is right."""

    said: np.ndarray
    hits: np.ndarray
    noise: np.ndarray  # factors on times, in turn

    @property
    def n_tokens(self) -> int:
        return len(self.hits) - HORIZON - 1


def make_trace(segments: list[tuple[tuple[float, float], int]], *, seed: int = 0, decay: float = 0.93) -> Trace:
    """A text of segments (kind, tokens); the drafter is overconfident and its chances fall with the depth."""
    rng = np.random.default_rng(seed)
    per_token = np.concatenate([rng.choice(kind, size=n, p=(0.7, 0.3)) for kind, n in segments])
    per_token = np.append(per_token, [0.5] * (HORIZON + 1))
    chances = per_token[:, None] * decay ** np.arange(HORIZON)
    said = np.clip(chances**0.7 + rng.normal(0, 0.08, chances.shape), 0.01, 1)
    noise = np.exp(np.abs(rng.normal(0, 0.04, 4096)))
    noise[rng.random(4096) < 0.01] = 4.0  # a busy machine
    return Trace(said, rng.random(chances.shape) < chances, noise)


class Fixed:
    """Chains of one length, 0 = plain rounds."""

    def __init__(self, n_draft: int) -> None:
        self.n_draft = n_draft

    def replay(self, trace: Trace, build_ms: float = 0.0) -> float:
        return replay(self, trace, build_ms)[0]


def replay(policy: Policy | Fixed, trace: Trace, build_ms: float = 0.0) -> tuple[float, list[int]]:
    """Milliseconds for the whole text, and the width of every round, negative where nothing was drafted."""
    total, at, widths, built = 0.0, 0, [], set()
    while at < trace.n_tokens:
        n_draft, width = _decide(policy, trace, at)
        draft_ms = DRAFT_MS if n_draft else 0.0
        factor = trace.noise[len(widths) % len(trace.noise)]
        verify_ms = float(np.interp(width, VERIFY_WIDTHS, VERIFY_MS)) * factor
        verify_ms += 0.0 if width in built else build_ms
        built.add(width)
        host_ms = DRAFT_HOST_MS if n_draft else HOST_MS
        n_hits = 0
        while n_hits < width - 1 and trace.hits[at + n_hits, n_hits]:
            n_hits += 1
        if not isinstance(policy, Fixed):
            policy.observe(observation(_logprobs(trace, at, width - 1), n_hits, draft_ms, verify_ms, host_ms))
        widths.append(width if n_draft else -width)
        total += draft_ms + verify_ms + host_ms
        at += n_hits + 1
    return total, widths


def _decide(policy: Policy | Fixed, trace: Trace, at: int) -> tuple[int, int]:
    if isinstance(policy, Fixed):
        return policy.n_draft, policy.n_draft + 1
    plan = policy.plan(DraftLimits(HORIZON, HORIZON))
    if not plan.n_draft:
        return 0, 1
    return plan.n_draft, policy.choose_width(_logprobs(trace, at, plan.n_draft), chain(plan.n_draft), None)


def _logprobs(trace: Trace, at: int, n_draft: int) -> np.ndarray:
    depths = np.arange(n_draft)
    return np.append(0, np.log(trace.said[at + depths, depths])).astype(np.float32)


def chain(n_draft: int) -> np.ndarray:
    """Parents of a chain."""
    return np.arange(-1, n_draft, dtype=np.int32)


def observation(
    logprobs: np.ndarray,
    n_accepted: int,
    draft_ms: float = DRAFT_MS,
    verify_ms: float = 2.0,
    host_ms: float = 0.1,
    *,
    cut: bool = False,
) -> RoundObservation:
    """A chain's round; a plain one when it took no time to draft."""
    n_offered = len(logprobs) - 1
    return RoundObservation(
        logprobs=logprobs,
        parents=chain(n_offered),
        depths=np.arange(n_offered + 1, dtype=np.int32),
        path=tuple(range(n_accepted + 1)),
        n_offered=n_offered,
        n_accepted=n_accepted,
        cut=cut,
        drafted=draft_ms > 0,
        confidence=None,
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        host_ms=host_ms,
    )
