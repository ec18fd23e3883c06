"""The accept walk: greedy against its definition, sampled against the target's law."""

from __future__ import annotations

import numpy as np
import pytest
from decode_fakes import chi_square_excess

from pyggml_spec.errors import ShapeError
from pyggml_spec.tree.accept import accept_greedy, accept_sampled
from pyggml_spec.tree.draft_tree import DraftTree


@pytest.mark.parametrize(
    ("chosen", "path", "bonus"),
    [
        ([9, 9, 9, 9], [0], 9),  # the first draft token is wrong: a normal case
        ([11, 9, 9, 9], [0, 1], 9),
        ([11, 12, 9, 9], [0, 1, 2], 9),
        ([11, 12, 13, 9], [0, 1, 2, 3], 9),
        ([12, 12, 13, 9], [0], 12),  # a later match does not count
    ],
)
def test_chain(chosen: list[int], path: list[int], bonus: int):
    """The longest run of matches is accepted, and the bonus is the target's choice after it."""
    tree = DraftTree.chain(10, [11, 12, 13])
    result = accept_greedy(tree, np.array(chosen, dtype=np.int32))

    assert (result.path, result.bonus_id, result.n_accepted) == (path, bonus, len(path) - 1)
    assert result.emitted_ids(tree) == [*[11, 12, 13][: len(path) - 1], bonus]


def test_plain_round():
    """A tree of one node yields the bonus alone."""
    result = accept_greedy(DraftTree.root(4), np.array([8], dtype=np.int32))

    assert (result.path, result.bonus_id) == ([0], 8)


def test_tree_without_branches_equals_chain():
    """The tree walk and the chain walk accept the same (on a tree made to miss the chain's fast path)."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        ids = rng.integers(0, 3, size=5)
        chosen = rng.integers(0, 3, size=7).astype(np.int32)
        chain = DraftTree.chain(1, ids)
        twig = DraftTree.from_parents([*chain.token_ids, 77], [*chain.parents.tolist(), 0])

        assert accept_greedy(chain, chosen) == accept_greedy(twig, chosen)


def test_tree_follows_the_target():
    """In a full binary tree the walk follows the target's bits to a leaf, however they fall."""
    parents = [-1, 0, 0, 1, 1, 2, 2]
    tree = DraftTree.from_parents([5, 0, 1, 0, 1, 0, 1], parents)
    for first in (0, 1):
        for second in (0, 1):
            chosen = np.full(7, 9, dtype=np.int32)
            chosen[0], chosen[1 + first] = first, second
            result = accept_greedy(tree, chosen)

            assert result.emitted_ids(tree) == [first, second, 9]
            assert result.path == tree.path_to(result.path[-1])


def test_too_few_choices():
    """One choice per node, else the walk would read past the end."""
    with pytest.raises(ShapeError, match="2 choices for 4 nodes"):
        accept_greedy(DraftTree.chain(0, [1, 2, 3]), np.array([1, 2], dtype=np.int32))


def test_sampled_law_is_the_targets_whatever_the_draft():
    """Joint law of the next two tokens, over good, bad and branching drafts: chi-square against the exact one."""
    rng = np.random.default_rng(7)
    n_vocab, n_runs = 3, 2000
    laws = {prefix: rng.dirichlet(np.ones(n_vocab)) for prefix in [(), (0,), (1,), (2,)]}
    exact = np.concatenate([laws[()][a] * laws[(a,)] for a in range(n_vocab)])
    drafts = [
        DraftTree.chain(0, [0]),
        DraftTree.chain(0, [2]),
        DraftTree.from_parents([0, 0, 1, 2], [-1, 0, 0, 0]),
    ]
    for tree in drafts:
        counts = np.zeros(n_vocab * n_vocab)
        uniforms = iter(rng.random(2 * n_runs).tolist())
        cumulative = {prefix: np.cumsum(law).tolist() for prefix, law in laws.items()}

        def draw(prefix, cumulative=cumulative, uniforms=uniforms):
            u = next(uniforms)
            return sum(u >= edge for edge in cumulative[prefix][:-1])

        for _ in range(n_runs):
            walk = accept_sampled(tree, lambda node, path, tree=tree: draw(tuple(tree.token_ids[path[1:]].tolist())))
            tokens = walk.emitted_ids(tree)
            first = tokens[0]
            second = tokens[1] if len(tokens) > 1 else draw((first,))  # the next round draws it
            counts[first * n_vocab + second] += 1

        assert chi_square_excess(counts, exact * n_runs) < 4.5


def test_law_test_has_power():
    """The statistic of the test above does notice a walk that prefers drafted tokens slightly."""
    law = np.array([0.5, 0.3, 0.2])
    biased = 0.9 * law + 0.1 * np.array([1.0, 0.0, 0.0])

    assert chi_square_excess(biased * 3000, law * 3000) > 4.5
