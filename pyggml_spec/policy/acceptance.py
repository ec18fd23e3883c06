"""How often drafted tokens are accepted: the draft's own probabilities, corrected by what happened to earlier ones."""

from __future__ import annotations

from bisect import bisect

import numpy as np
from numpy.typing import NDArray

from pyggml_spec.policy.protocol import RoundObservation

_EDGES = [0.1, 0.25, 0.45, 0.65, 0.85, 0.95, 0.99]  # of the draft's probability of a token
_CENTRES = [0.05, 0.17, 0.35, 0.55, 0.75, 0.9, 0.97, 0.99]
_LOG_EDGES = np.log(_EDGES).tolist()
_MEMORY, _DEPTH_MEMORY = 0.99, 0.97  # weight that an observation keeps at the next one of its kind
_PRIOR, _DEPTH_PRIOR = 2.0, 4.0  # observations that the first guess counts as
_MOST = 0.995


class AcceptanceModel:
    """The chance that a node is accepted, given that its parent was.

    It is the acceptance rate of nodes with a like probability, times a correction for the depth; both are decayed
    counts. A node whose parent was not accepted says nothing, nor does one that a stop cut away: neither counts.
    """

    def __init__(self) -> None:
        self._trials = [_PRIOR] * len(_CENTRES)
        self._hits = [_PRIOR * centre for centre in _CENTRES]
        self._expected_at: list[float] = []  # entry d - 1: accepted tokens that the rates foretold at depth d
        self._hits_at: list[float] = []

    def expected_tokens(
        self, logprobs: NDArray[np.float32], parents: NDArray[np.int32], confidence: NDArray[np.float32] | None
    ) -> list[float]:
        """Entry i: tokens that a round commits on average when nodes 0 .. i are verified, bonus included.

        Shapes: as for Policy.choose_width.
        """
        chances, depths, total = [1.0], [0], 1.0
        expected = [total]
        kinds, above = _kinds(logprobs, parents, confidence), parents.tolist()
        for node in range(1, len(above)):
            parent = above[node]
            depth = depths[parent] + 1
            chance = chances[parent] * self.chance(kinds[node], depth)
            depths.append(depth)
            chances.append(chance)
            total += chance
            expected.append(total)
        return expected

    def chance(self, kind: int, depth: int) -> float:
        """Of a node with a probability of this kind at this depth, its parent being accepted."""
        rate = self._hits[kind] / self._trials[kind]
        if depth <= len(self._hits_at):
            rate *= self._hits_at[depth - 1] / self._expected_at[depth - 1]
        return rate if rate < _MOST else _MOST

    def observe(self, seen: RoundObservation) -> None:
        """Learn from the nodes whose parents were accepted."""
        path, last = set(seen.path), seen.path[-1]
        kinds = _kinds(seen.logprobs, seen.parents, seen.confidence)
        for node, parent in enumerate(seen.parents.tolist()):
            if parent in path and not (seen.cut and parent == last):
                self._count(kinds[node], int(seen.depths[node]), node in path)

    def forget(self) -> None:
        """Trust what was seen so far half as much: it may not hold for what comes next."""
        self._trials = [_fade(value, _PRIOR) for value in self._trials]
        self._hits = [_fade(value, _PRIOR * centre) for value, centre in zip(self._hits, _CENTRES, strict=True)]
        self._expected_at = [_fade(value, _DEPTH_PRIOR) for value in self._expected_at]
        self._hits_at = [_fade(value, _DEPTH_PRIOR) for value in self._hits_at]

    def _count(self, kind: int, depth: int, is_hit: bool) -> None:
        while depth > len(self._hits_at):
            self._hits_at.append(_DEPTH_PRIOR)
            self._expected_at.append(_DEPTH_PRIOR)
        rate = self._hits[kind] / self._trials[kind]
        self._expected_at[depth - 1] = _DEPTH_MEMORY * self._expected_at[depth - 1] + rate
        self._hits_at[depth - 1] = _DEPTH_MEMORY * self._hits_at[depth - 1] + is_hit
        self._trials[kind] = _MEMORY * self._trials[kind] + 1
        self._hits[kind] = _MEMORY * self._hits[kind] + is_hit


def _fade(value: float, prior: float) -> float:
    return 0.5 * (value + prior)


def _kinds(
    logprobs: NDArray[np.float32], parents: NDArray[np.int32], confidence: NDArray[np.float32] | None
) -> list[int]:
    """Which class of probabilities each node belongs to; a chain's confidences, being trained for it, know better."""
    n = len(logprobs)
    if confidence is not None and len(confidence) >= n - 1 and parents[-1] == n - 2:
        return [0, *(bisect(_EDGES, chance) for chance in confidence[: n - 1].tolist())]
    return [bisect(_LOG_EDGES, value) for value in logprobs.tolist()]
