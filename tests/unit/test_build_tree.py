"""The tree builder against a brute-force oracle, its invariants, and its options."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml_spec.errors import OptionError, ShapeError
from pyggml_spec.tree.build import MarginalSource, TreeOptions, build_draft_tree
from pyggml_spec.tree.draft_tree import DraftTree

ANCHOR = 99


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """Token path of every non-root node, in the tree's order."""
    return [tuple(tree.token_ids[tree.path_to(node)[1:]].tolist()) for node in range(1, tree.n_nodes)]


def scores_of(tree: DraftTree) -> list[float]:
    """Sum of log-probabilities from the anchor to each node."""
    return [float(tree.logprobs[tree.path_to(node)].astype(np.float64).sum()) for node in range(tree.n_nodes)]


def brute_force(
    source, *, horizon: int, budget: int, top_k: int, tau: float, chain_seed: bool
) -> list[tuple[int, ...]]:
    """All paths, scored and sorted; needs log-probabilities strictly below 0, so that a prefix sorts before its end."""
    scored: dict[tuple[int, ...], float] = {}

    def extend(path: tuple[int, ...], score: float) -> None:
        if len(path) < horizon:
            for logprob, token_id in ranked(path)[:top_k]:
                scored[(*path, token_id)] = score + logprob
                extend((*path, token_id), score + logprob)

    def ranked(path: tuple[int, ...]) -> list[tuple[float, int]]:
        ids, logprobs = source((ANCHOR, *path), len(path) + 1)
        return sorted(zip(logprobs, ids, strict=True), key=lambda pair: (-pair[0], pair[1]))

    extend((), 0.0)
    best_first = max((score for path, score in scored.items() if len(path) == 1), default=0.0)
    chain: list[tuple[int, ...]] = []
    while chain_seed and len(chain) < min(horizon, budget) and ranked(chain[-1] if chain else ()):
        chain.append((*(chain[-1] if chain else ()), ranked(chain[-1] if chain else ())[0][1]))
    rest = [path for path, score in scored.items() if score >= best_first - tau and path not in set(chain)]
    rest.sort(key=lambda path: (-scored[path], path[-1], path))
    return (chain + rest)[:budget]


@st.composite
def blocks(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """A drafted block with many equal scores: log-probabilities are multiples of 1/4."""
    n_draft, k = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    quarters = draw(st.lists(st.integers(1, 12), min_size=n_draft * k, max_size=n_draft * k))
    logprobs = -np.sort(np.array(quarters, dtype=np.float32).reshape(n_draft, k), axis=1) / 4
    ids = [draw(st.permutations(range(6)))[:k] for _ in range(n_draft)]
    return np.array(ids, dtype=np.int32), logprobs


options = st.fixed_dictionaries(
    {
        "budget": st.integers(1, 14),
        "top_k": st.integers(1, 3),
        "tau": st.sampled_from([0.0, 0.25, 1.0, 2.5, math.inf]),
        "chain_seed": st.booleans(),
    }
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(block=blocks(), chosen=options)
def test_equals_brute_force(block, chosen):
    """Best first by score, ties by lower token id, cut by tau and budget: the same nodes in the same order."""
    source = MarginalSource(*block)
    tree = build_draft_tree(source, ANCHOR, horizon=len(block[0]), **chosen)

    assert paths_of(tree) == brute_force(source, horizon=len(block[0]), **chosen)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), horizon=st.integers(0, 9), chosen=options)
def test_invariants(seed, horizon, chosen):
    """Topological, within budget, horizon and tau, siblings distinct, scores never rise along a path."""
    rng = np.random.default_rng(seed)
    logits = -np.sort(-rng.normal(size=(9, 6)) * 3, axis=1)
    logprobs = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)
    ids = np.array([rng.permutation(50)[:6] for _ in range(9)], dtype=np.int32)
    tree = build_draft_tree(MarginalSource(ids, logprobs), ANCHOR, horizon=horizon, **chosen)

    again = DraftTree.from_parents(tree.token_ids, tree.parents.tolist(), tree.logprobs)  # checks order and siblings
    assert again.depths.tolist() == tree.depths.tolist()
    assert tree.n_drafted <= chosen["budget"] and tree.depths.max() <= horizon
    scores = scores_of(tree)
    floor = float(logprobs[0, 0]) - chosen["tau"] - 1e-5
    n_seeded = min(horizon, chosen["budget"]) if chosen["chain_seed"] else 0
    for node in range(1, tree.n_nodes):
        assert scores[node] <= scores[tree.parents[node]] + 1e-6
        assert scores[node] >= floor or node <= n_seeded
        assert len(tree.children(node)) <= chosen["top_k"]
    assert scores[n_seeded + 1 :] == sorted(scores[n_seeded + 1 :], reverse=True)


def test_conditional_source_sees_the_prefix():
    """A source is asked once per node, with the path from the anchor, and its answer conditions the subtree."""
    asked: list[tuple[int, ...]] = []

    def source(prefix, depth):
        asked.append(tuple(prefix))
        assert depth == len(prefix)
        return [prefix[-1] * 2 % 101, prefix[-1] * 2 % 101 + 1], [-0.5, -1.0]

    tree = build_draft_tree(source, 3, horizon=2, budget=6, top_k=2, tau=math.inf)

    assert sorted(paths_of(tree)) == sorted([(6,), (7,), (6, 12), (6, 13), (7, 14), (7, 15)])
    assert len(asked) == len(set(asked)) and (3, 7) in asked


def test_conditional_equals_brute_force():
    """The same builder, with a source that looks at the prefix."""

    def source(prefix, depth):
        rng = np.random.default_rng(list(prefix))
        return rng.permutation(5)[:3].tolist(), (-np.sort(rng.integers(1, 9, size=3)) / 4).tolist()

    for budget, tau, chain_seed in itertools.product([1, 5, 17], [0.5, 2.0, math.inf], [True, False]):
        chosen = {"horizon": 3, "budget": budget, "top_k": 2, "tau": tau, "chain_seed": chain_seed}

        assert paths_of(build_draft_tree(source, ANCHOR, **chosen)) == brute_force(source, **chosen)


@pytest.mark.parametrize("tau", [0.0, 6.0, math.inf])
def test_one_candidate_gives_the_chain(tau: float):
    """A tree that cannot branch is the chain itself, whatever tau: it must not accept less."""
    ids, logprobs = np.arange(8, dtype=np.int32).reshape(8, 1), np.full((8, 1), -5.0, dtype=np.float32)
    tree = build_draft_tree(MarginalSource(ids, logprobs), ANCHOR, horizon=8, top_k=1, tau=tau)

    assert tree.is_chain and tree.token_ids.tolist() == [ANCHOR, *range(8)]


def test_tau_without_seed_prunes_everything_below():
    """Nodes under the window are left out and nothing is padded back."""
    ids, logprobs = (
        np.array([[1, 2], [3, 4]], dtype=np.int32),
        np.log(np.array([[0.9, 0.1], [0.5, 0.5]], dtype=np.float32)),
    )
    tree = build_draft_tree(MarginalSource(ids, logprobs), ANCHOR, horizon=2, tau=0.0, chain_seed=False)

    assert paths_of(tree) == [(1,)]


def test_temperature_rescales():
    """Halving the temperature doubles distances, so the same window keeps fewer nodes."""
    ids, logprobs = np.array([[1, 2]], dtype=np.int32), np.array([[-0.2, -1.0]], dtype=np.float32)
    wide = build_draft_tree(MarginalSource(ids, logprobs), ANCHOR, horizon=1, tau=1.0)
    narrow = build_draft_tree(MarginalSource(ids, logprobs), ANCHOR, horizon=1, tau=1.0, temperature=0.5)

    assert paths_of(wide) == [(1,), (2,)] and paths_of(narrow) == [(1,)]
    assert narrow.logprobs.tolist() == pytest.approx([0.0, -0.4])


def test_impossible_candidates_are_dropped():
    """-inf and NaN never become nodes, not even with an infinite window."""
    ids = np.array([[1, 2, 3]], dtype=np.int32)
    logprobs = np.array([[-0.1, -np.inf, np.nan]], dtype=np.float32)

    assert paths_of(build_draft_tree(MarginalSource(ids, logprobs), ANCHOR, horizon=1, tau=math.inf)) == [(1,)]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("budget", value) for value in (0, -1, 2.5, True, "8", math.nan)],
        *[("top_k", value) for value in (0, 17, -3, 1.0, None)],
        *[("tau", value) for value in (-0.1, math.nan, -math.inf, "6", None)],
        *[("temperature", value) for value in (0.0, -1.0, math.inf, math.nan)],
        ("chain_seed", 1),
    ],
)
def test_options_are_checked(option: str, value: object):
    """No silent default and no degenerate tree: the error names the option and shows the value."""
    with pytest.raises(OptionError, match=f"{option} is {value!r}"):
        TreeOptions(**{option: value})


def test_source_errors():
    """Raw logits, repeated ids and ragged rows are faults of the source, and said so."""
    for row, error, text in [
        (([1, 2], [3.5, 1.0]), OptionError, "must not be above 0"),
        (([1, 1], [-1.0, -2.0]), ShapeError, "ids must differ"),
        (([1, 2], [-1.0]), ShapeError, "one value each"),
    ]:
        with pytest.raises(error, match=text):
            build_draft_tree(lambda prefix, depth, row=row: row, ANCHOR, horizon=1)
    with pytest.raises(ShapeError, match="n_draft, k"):
        MarginalSource(np.zeros((2, 3), dtype=np.int32), np.zeros((2, 2), dtype=np.float32))
    with pytest.raises(OptionError, match="horizon is -1"):
        build_draft_tree(lambda prefix, depth: ([], []), ANCHOR, horizon=-1)
