"""Blocks read from what a drafter's graph computed: chains, paths, and sources that know the parent token."""

from __future__ import annotations

import numpy as np
import pytest
from reference import heads

from pyggml_spec.decode.draft_block import PairSource, best_successors, read_block, shorten
from pyggml_spec.decode.protocols import DraftBlock

N, K, TOP = 5, 6, 3  # slots, candidates, best tokens of a chain
ANCHOR = 90


def top(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """A device top-k (n, 2k) of logits (n, n_vocab), and its ids."""
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :k].astype(np.int32)
    values = np.take_along_axis(heads.log_softmax(logits), ids, axis=1).astype(np.float32)
    return np.concatenate([ids, values.view(np.int32)], axis=1), ids


def markov_results(rng: np.random.Generator, n_vocab: int, k: int, bias: float) -> tuple[dict, np.ndarray, np.ndarray]:
    """Results of a DSpark graph, base logits (n, n_vocab) and the bias table (previous, next)."""
    logits, table = rng.normal(size=(N, n_vocab)) * 2, rng.normal(size=(100, n_vocab)) * bias
    biased, _ = heads.markov_chain(logits, np.eye(100), table.T, ANCHOR)
    (chain, chained), (candidates, ids) = top(biased, TOP), top(logits, k)
    before = np.concatenate([ids, chained], axis=1)[:-1]
    pairs = np.take_along_axis(table[before], ids[1:, None], axis=2)
    confidence = np.linspace(-3, 3, N, dtype=np.float32)[None]
    results = {"chain": chain, "top": candidates, "confidence": confidence}
    return results | {"pairs": pairs.reshape(-1, k).astype(np.float32)}, logits, table


def selector_results(rng: np.random.Generator, n_vocab: int, k: int) -> tuple[dict, np.ndarray, np.ndarray]:
    """Results of a DFlash2 graph, its candidates (n, k) and unnormalised scores (n, k, k)."""
    logits = rng.normal(size=(N, n_vocab)) * 2
    candidates, ids = top(logits, k)
    pairs = rng.normal(size=(N, k, k)).astype(np.float32)
    pairs[0] = pairs[0, 0]
    scores = np.take_along_axis(logits, ids, axis=1)[:, None] + pairs
    return {"top": candidates, "pairs": np.concatenate([pairs[0, :1], pairs[1:].reshape(-1, k)])}, ids, scores


def off_chain(slot: int, parent: int) -> list[int]:
    """A prefix of the right length that is not the chain's, for slots from the third on."""
    return [ANCHOR, *[99] * (slot - 1), parent]


def test_plain_block() -> None:
    """Ids and log-probabilities side by side; nothing else is known."""
    words, ids = top(np.random.default_rng(0).normal(size=(N, 40)), TOP)
    block = read_block({"top": words}, ANCHOR, TOP, None)

    assert block.ids.tolist() == ids.tolist()
    assert block.logprobs.dtype == np.float32 and block.source is None and block.confidence is None


def test_ids_of_a_reduced_vocabulary() -> None:
    """Every id that leaves the drafter is a target id, in sources too."""
    rng, mapping = np.random.default_rng(1), np.arange(1000, 1080, dtype=np.int32)
    markov = read_block(markov_results(rng, 80, K, 1.0)[0], ANCHOR, TOP, mapping)
    selector = read_block(selector_results(rng, 80, K)[0], ANCHOR, TOP, mapping)

    for block in (markov, selector):
        assert block.ids.min() >= 1000
        ids, _ = block.source([ANCHOR, int(block.ids[0, 1])], 2)
        assert len(ids) == K and min(ids) >= 1000


def test_markov_chain_is_exact_along_itself() -> None:
    """On the chain the source answers with what is known over the whole vocabulary."""
    results, _, _ = markov_results(np.random.default_rng(2), 80, K, 1.0)
    block = read_block(results, ANCHOR, TOP, None)
    for slot in range(N):
        ids, logprobs = block.source([ANCHOR, *block.ids[:slot, 0].tolist()], slot + 1)

        assert ids == block.ids[slot].tolist() and logprobs == block.logprobs[slot].tolist()
    assert np.allclose(block.confidence, 1 / (1 + np.exp(-results["confidence"][0])), atol=1e-7)


def test_markov_source_knows_every_other_parent() -> None:
    """With all tokens as candidates the distribution after any parent is exact: nothing lies outside."""
    results, logits, table = markov_results(np.random.default_rng(3), 16, 16, 1.5)
    block = read_block(results, ANCHOR, TOP, None)
    for slot in range(2, N):
        for parent in range(16):
            ids, logprobs = block.source(off_chain(slot, parent), slot + 1)
            wanted = heads.log_softmax(logits[slot] + table[parent])

            assert sorted(ids) == list(range(16))
            assert np.abs(np.array(logprobs) - wanted[ids]).max() < 1e-5


def test_markov_source_counts_what_is_no_candidate() -> None:
    """Candidates that hold half the mass are not made sure: after the chain's parent they weigh what they weigh."""
    for seed in range(20):
        results, logits, table = markov_results(np.random.default_rng(seed), 80, K, 0.5)
        block = read_block(results, ANCHOR, TOP, None)
        for slot in range(2, N):
            parent = int(block.ids[slot - 1, 0])
            ids, logprobs = block.source(off_chain(slot, parent), slot + 1)
            wanted = heads.log_softmax(logits[slot] + table[parent])[ids]
            if set(block.ids[slot].tolist()) & set(ids):
                assert np.abs(np.array(logprobs) - wanted).max() < 1e-4


def test_parents_nobody_scored_have_no_children() -> None:
    """An unknown parent ends its branch instead of borrowing another's distribution."""
    results, ids, _ = selector_results(np.random.default_rng(4), 80, K)
    unknown = next(i for i in range(80) if i not in ids[1])

    assert read_block(results, ANCHOR, TOP, None).source(off_chain(2, unknown), 3) == ([], [])


def test_selector_path_takes_the_best_successor_each_time() -> None:
    for seed in range(20):
        results, ids, scores = selector_results(np.random.default_rng(seed), 80, K)
        block = read_block(results, ANCHOR, TOP, None)
        path = heads.greedy_path(scores)

        assert block.ids[:, 0].tolist() == [int(ids[slot, c]) for slot, c in enumerate(path)]
        assert (np.diff(block.logprobs, axis=1) <= 0).all()


def test_a_selector_chain_is_the_first_column_of_its_tree() -> None:
    """The short way to the path: same tokens, same log-probabilities."""
    for seed in range(20):
        results, _, _ = selector_results(np.random.default_rng(seed), 80, K)
        chain, tree = (read_block(results, ANCHOR, k, np.arange(80, dtype=np.int32) * 3) for k in (1, TOP))

        assert chain.ids.tolist() == tree.ids[:, :1].tolist() and chain.source is None
        assert np.abs(chain.logprobs - tree.logprobs[:, :1]).max() < 1e-6


def test_selector_source_is_conditioned_on_the_parent() -> None:
    """Differences between candidates are those of the scores; the mass is one minus what lies outside."""
    results, ids, scores = selector_results(np.random.default_rng(6), 80, K)
    block = read_block(results, ANCHOR, TOP, None)
    for slot in range(N):
        for p in range(K):
            prefix = [ANCHOR, *[0] * (slot - 1), int(ids[slot - 1, p])] if slot else [ANCHOR]
            found, logprobs = block.source(prefix, slot + 1)

            assert found == ids[slot].tolist()
            assert np.ptp(np.array(logprobs) - scores[slot, p]) < 1e-5
            assert np.exp(logprobs).sum() < 1 + 1e-6


def test_a_path_is_greedy_not_best() -> None:
    """The drafter was trained to choose each token for itself: the best sum is another path."""
    scores = np.zeros((2, 2, 2), np.float32)
    scores[0, :] = [1.0, 0.9]
    scores[1] = [[0.0, 0.1], [0.0, 5.0]]

    assert best_successors(scores) == [0, 0]
    assert heads.best_path(scores)[0] == [1, 1]


def test_one_slot() -> None:
    """A block of two slots proposes one token: there are no pairs."""
    rng = np.random.default_rng(7)
    words, ids = top(rng.normal(size=(1, 40)), K)
    selector = read_block({"top": words, "pairs": np.zeros((1, K), np.float32)}, ANCHOR, 1, None)
    markov = read_block({"chain": words[:, [0, K]]}, ANCHOR, 1, None)

    assert selector.ids.tolist() == markov.ids.tolist() == [[ids[0, 0]]]


def test_huge_scores_stay_finite() -> None:
    """Scores in the hundreds are still log-probabilities."""
    results, ids, _ = selector_results(np.random.default_rng(8), 80, K)
    results["pairs"] = results["pairs"] * 500
    _, logprobs = read_block(results, ANCHOR, TOP, None).source([ANCHOR, int(ids[0, 0])], 2)

    assert np.isfinite(logprobs).all() and max(logprobs) <= 1e-5


@pytest.mark.parametrize("n_draft", [1, N - 1, N, N + 1])
def test_shorten(n_draft: int) -> None:
    """Rows are cut, the source stays."""
    source = PairSource(np.zeros((N, 1), np.int32), np.zeros((N, 1), np.int32), np.zeros((N, 1, 1), np.float32))
    ids = np.arange(2 * N, dtype=np.int32).reshape(N, 2)
    block = shorten(DraftBlock(ids, ids.astype(np.float32), ids[:, 0].astype(np.float32), source), n_draft)

    assert block.ids.tolist() == ids[:n_draft].tolist()
    assert len(block.logprobs) == len(block.confidence) == len(block.ids)
    assert block.source is source
