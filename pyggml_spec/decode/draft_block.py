"""What a drafter's graph computed, as a DraftBlock: plain NumPy over arrays that were downloaded.

Log-probabilities of a whole vocabulary stay on the device. Where a head's bias is known for a slot's candidates only,
the mass outside of them is estimated, so that a slot whose candidates are all unlikely does not look sure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pyggml_spec.decode.protocols import DraftBlock

Ids = NDArray[np.int32]
Values = NDArray[np.float32]


def split_top(top: NDArray[np.int32]) -> tuple[Ids, Values]:
    """A device top-k (n, 2k) as ids (n, k) and log-probabilities (n, k), best first."""
    k = top.shape[1] // 2
    return top[:, :k], top[:, k:].view(np.float32)


def read_block(
    results: Mapping[str, NDArray[np.int32]], anchor_id: int, top_k: int, draft_to_target: Ids | None
) -> DraftBlock:
    """The block of any drafter; `results` as DrafterGraph names them, `draft_to_target` (n_rows,) or None."""
    if "chain" in results:
        block = _markov_block(results, draft_to_target)
    elif "pairs" in results and top_k == 1:
        block = _selector_chain(results, draft_to_target)
    elif "pairs" in results:
        block = _selector_block(results, anchor_id, top_k, draft_to_target)
    else:
        ids, logprobs = split_top(results["top"])
        block = DraftBlock(_target_ids(ids, draft_to_target), logprobs)
    return block


def shorten(block: DraftBlock, n_draft: int) -> DraftBlock:
    """The first `n_draft` positions; a source needs no cut, as it is asked for a depth."""
    if n_draft >= len(block.ids):
        return block
    confidence = None if block.confidence is None else block.confidence[:n_draft]
    return DraftBlock(block.ids[:n_draft], block.logprobs[:n_draft], confidence, block.source)


class PairSource:
    """Candidates of each slot scored after each candidate of the slot before: a tree's prefix-conditioned top-k.

    Shapes: ids (n, k) and predecessors (n, p) token ids, logprobs (n, p, k). A prefix that starts with `chain` is
    answered by `exact`, rows (n, k) that are known over the whole vocabulary.
    """

    def __init__(
        self,
        ids: Ids,
        predecessors: Ids,
        logprobs: Values,
        chain: Sequence[int] = (),
        exact: tuple[Ids, Values] | None = None,
    ) -> None:
        self._ids, self._logprobs = ids.tolist(), logprobs
        self._predecessors = predecessors
        self._rows: list[dict[int, int] | None] = [None] * len(ids)
        self._chain = list(chain)
        self._exact = exact

    def __call__(self, prefix_token_ids: Sequence[int], depth: int) -> tuple[list[int], list[float]]:
        """Candidates at `depth` after a prefix that starts with the anchor."""
        slot = depth - 1
        if self._exact is not None and list(prefix_token_ids[1:]) == self._chain[:slot]:
            return self._exact[0][slot].tolist(), self._exact[1][slot].tolist()
        row = self._row_of(slot, prefix_token_ids[-1])
        return ([], []) if row is None else (self._ids[slot], self._logprobs[slot, row].tolist())

    def _row_of(self, slot: int, token_id: int) -> int | None:
        rows = self._rows[slot]
        if rows is None:
            rows = self._rows[slot] = {token: row for row, token in enumerate(self._predecessors[slot].tolist())}
        return rows.get(token_id)


def _markov_block(results: Mapping[str, NDArray[np.int32]], draft_to_target: Ids | None) -> DraftBlock:
    chained, logprobs = split_top(results["chain"])
    ids = _target_ids(chained, draft_to_target)
    confidence = None
    if "confidence" in results:
        confidence = sigmoid(results["confidence"].reshape(-1).astype(np.float32))
    if "pairs" not in results:
        return DraftBlock(ids, logprobs, confidence)
    candidates, unconditioned = split_top(results["top"])
    n, k = candidates.shape
    pairs = results["pairs"].reshape(n - 1, -1, k)
    scores = np.concatenate([np.zeros((1, *pairs.shape[1:]), np.float32), pairs]) + unconditioned[:, None]
    before = np.concatenate([candidates, chained], axis=1)
    before = np.concatenate([before[:1], before[:-1]])  # row 0 is never asked: before the first slot lies the anchor
    source = PairSource(
        _target_ids(candidates, draft_to_target),
        _target_ids(before, draft_to_target),
        _normalised(scores, _mass_outside_chain(scores[:, k], unconditioned, candidates, chained, logprobs)),
        ids[:, 0].tolist(),
        (ids, logprobs),
    )
    return DraftBlock(ids, logprobs, confidence, source)


def _mass_outside_chain(
    scores: Values, unconditioned: Values, candidates: Ids, chained: Ids, logprobs: Values
) -> Values:
    """exp-mass (n,) that candidates' scores (n, k) after the chain lack, where its exact probabilities tell.

    They tell when one of the chain's best tokens is a candidate too; else it is the mass before the bias.
    """
    hits = (chained[:, :, None] == candidates[:, None]).reshape(len(scores), -1)
    totals = (scores[:, None] - logprobs[:, :, None]).reshape(len(scores), -1)
    total = np.exp(totals[np.arange(len(scores)), hits.argmax(axis=1)], dtype=np.float64)
    inside = np.exp(scores, dtype=np.float64).sum(axis=1)
    outside = np.where(hits.any(axis=1), total - inside, _mass_outside(unconditioned))
    return np.maximum(outside, 0).astype(np.float32)


def _mass_outside(logprobs: Values) -> Values:
    """Probability (n,) of what is not among the best (n, k)."""
    return np.maximum(1 - np.exp(logprobs).sum(axis=1), 0)


def _selector_chain(results: Mapping[str, NDArray[np.int32]], draft_to_target: Ids | None) -> DraftBlock:
    """The greedy path alone: only the rows of pair scores that it goes through are looked at."""
    candidates, unconditioned = split_top(results["top"])
    k, pairs, at = candidates.shape[1], results["pairs"], 0
    path, values = [], []
    for slot, logprobs in enumerate(unconditioned.tolist()):  # short rows: Python is faster than array operations
        scores = [logprob + pair for logprob, pair in zip(logprobs, pairs[at].tolist(), strict=True)]
        largest = max(scores)
        path.append(scores.index(largest))
        outside = max(1 - sum(map(math.exp, logprobs)), 0) * math.exp(min(-largest, 700))
        values.append([-math.log(sum(math.exp(score - largest) for score in scores) + outside)])
        at = 1 + slot * k + path[-1]
    ids = np.take_along_axis(candidates, np.array(path)[:, None], axis=1)
    return DraftBlock(_target_ids(ids, draft_to_target), np.array(values, np.float32))


def _selector_block(
    results: Mapping[str, NDArray[np.int32]], anchor_id: int, top_k: int, draft_to_target: Ids | None
) -> DraftBlock:
    candidates, unconditioned = split_top(results["top"])
    n, k = candidates.shape
    first, rest = results["pairs"][:1], results["pairs"][1:].reshape(n - 1, k, k)
    scores = np.concatenate([np.broadcast_to(first, (1, k, k)), rest]) + unconditioned[:, None]
    logprobs = _normalised(scores, _mass_outside(unconditioned))
    ids = _target_ids(candidates, draft_to_target)
    before = np.concatenate([np.full((1, k), anchor_id, np.int32), ids[:-1]])
    rows = best_successors(logprobs)
    order = np.argsort(-logprobs[np.arange(n), rows], axis=1, kind="stable")[:, :top_k]
    path = np.take_along_axis(logprobs[np.arange(n), rows], order, axis=1)
    return DraftBlock(np.take_along_axis(ids, order, axis=1), path, None, PairSource(ids, before, logprobs))


def best_successors(scores: Values) -> list[int]:
    """Per slot, which predecessor row the greedy path goes through; scores (n, k, k) by slot, predecessor, candidate.

    The first slot's rows are all alike: row 0 stands for the anchor.
    """
    best = scores.argmax(axis=2).tolist()
    rows = [0]
    for slot in range(len(best) - 1):
        rows.append(best[slot][rows[-1]])
    return rows


def _normalised(scores: Values, outside: Values) -> Values:
    """Log-probabilities of scores (n, p, k) when candidates outside of them weigh `outside` (n,) together."""
    largest = scores.max(axis=2, keepdims=True)
    total = np.exp(scores - largest).sum(axis=2, keepdims=True) + outside[:, None, None] * np.exp(-largest)
    return scores - largest - np.log(total)


def sigmoid(x: Values) -> Values:
    """Of any shape, without overflow."""
    return (0.5 * (1 + np.tanh(0.5 * x))).astype(np.float32)


def _target_ids(ids: Ids, draft_to_target: Ids | None) -> Ids:
    return ids if draft_to_target is None else draft_to_target[ids]
