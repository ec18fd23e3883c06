"""The heads of block drafters in float64: dynamic convolutions, Markov chain, confidence, candidate selector."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def conv_weights(x: np.ndarray, projection: np.ndarray, base: np.ndarray, group_size: int) -> np.ndarray:
    """x (n, n_embd), projection (2 * taps * groups, n_embd), base (2, taps, n_embd) -> (n, 2, taps, n_embd)."""
    n_sides, n_taps, n_embd = base.shape
    computed = (x.astype(np.float64) @ projection.T).reshape(len(x), n_sides, n_taps, n_embd // group_size)
    return computed[..., np.arange(n_embd) // group_size] + base


def convolve(x: np.ndarray, weights: np.ndarray, side: int) -> np.ndarray:
    """y[slot] = sum over taps t <= slot of x[slot - t] * weights[slot, side, t]; x (n, n_embd)."""
    y = np.zeros(x.shape)
    for slot in range(len(x)):
        for tap in range(min(weights.shape[2], slot + 1)):
            y[slot] += x[slot - tap] * weights[slot, side, tap]
    return y


def markov_chain(
    logits: np.ndarray,
    w1: np.ndarray,
    w2: np.ndarray,
    anchor: int,
    draft_to_target: np.ndarray | None = None,
    chain: Sequence[int] | None = None,
) -> tuple[np.ndarray, list[int]]:
    """Biased logits (n, n_rows) along the greedy chain or a given one, and its rows; w1 (n_vocab, r), w2 (rows, r)."""
    previous, biased, chosen = anchor, [], []
    for slot, row in enumerate(logits):
        biased.append(row + w2.astype(np.float64) @ w1[previous])
        chosen.append(int(biased[-1].argmax()) if chain is None else int(chain[slot]))
        previous = chosen[-1] if draft_to_target is None else int(draft_to_target[chosen[-1]])
    return np.array(biased), chosen


def confidence(hidden: np.ndarray, w1_rows: np.ndarray, weight: np.ndarray, bias: float) -> np.ndarray:
    """Logits (n,) of the confidence head; hidden (n, n_embd), w1_rows (n, r), weight (n_embd + r,)."""
    return np.concatenate([hidden, w1_rows], axis=1).astype(np.float64) @ weight + bias


def selector_scores(
    hidden: np.ndarray,
    candidates: np.ndarray,
    predecessor: np.ndarray,
    successor: np.ndarray,
    projection: np.ndarray,
    anchor: int,
) -> np.ndarray:
    """<successor[c], predecessor[p] * (projection h)>: (n, k, k) by slot, p, c; the first slot's p are all the anchor.

    candidates (n, k) are ids of the codebooks (n_vocab, r); projection (r, n_embd).
    """
    n, k = candidates.shape
    before = np.concatenate([np.full((1, k), anchor), candidates[:-1]])
    scores = np.empty((n, k, k))
    for slot in range(n):
        gate = projection.astype(np.float64) @ hidden[slot]
        for p in range(k):
            scores[slot, p] = successor[candidates[slot]].astype(np.float64) @ (predecessor[before[slot, p]] * gate)
    return scores


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def check_best(ids: np.ndarray, values: np.ndarray, logits: np.ndarray, bound: float) -> None:
    """ids and values (n, k) are the best of each row of logits (n, n_vocab) and their log-probabilities, in order.

    Values closer than the bound may have changed places.
    """
    wanted = log_softmax(logits)
    at, best = np.take_along_axis(wanted, ids, axis=1), -np.sort(-wanted, axis=1)[:, : ids.shape[1]]

    assert all(len(set(row)) == len(row) for row in ids.tolist())
    assert np.abs(at - best).max() < bound
    assert np.abs(values - at).max() < bound


def greedy_path(scores: np.ndarray) -> list[int]:
    """The candidate index of every slot on the path that takes the best successor each time; scores (n, k, k)."""
    path: list[int] = []
    for slot in scores:
        path.append(int(slot[path[-1] if path else 0].argmax()))
    return path


def best_path(scores: np.ndarray) -> tuple[list[int], float]:
    """By enumeration: the path whose scores add up to most, and that sum; for small scores (n, k, k) only."""

    def extend(path: Sequence[int], total: float) -> tuple[list[int], float]:
        if len(path) == len(scores):
            return list(path), total
        row = scores[len(path)][path[-1] if path else 0]
        return max((extend([*path, c], total + row[c]) for c in range(len(row))), key=lambda found: found[1])

    return extend([], 0.0)
