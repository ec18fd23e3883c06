"""Draft trees as data: shapes, checks and views."""

from __future__ import annotations

import numpy as np
import pytest

from pyggml_spec.errors import OptionError, ShapeError
from pyggml_spec.tree.draft_tree import DraftTree


def test_chain_is_one_path():
    """A chain's parents and depths follow from its length, and the anchor carries no probability."""
    tree = DraftTree.chain(5, [7, 8, 9], [-0.5, -1.0, -1.5])

    assert tree.token_ids.tolist() == [5, 7, 8, 9]
    assert tree.parents.tolist() == [-1, 0, 1, 2]
    assert tree.depths.tolist() == [0, 1, 2, 3]
    assert tree.logprobs.tolist() == [0.0, -0.5, -1.0, -1.5]
    assert tree.is_chain and tree.n_nodes == 4 and tree.n_drafted == 3 and tree.anchor_id == 5


def test_root_is_a_plain_round():
    """The tree of a plain round is a chain of one node that offers nothing."""
    tree = DraftTree.root(3)

    assert tree.n_nodes == 1 and tree.n_drafted == 0 and tree.is_chain and tree.children(0) == []


@pytest.mark.parametrize("n_drafted", [510, 511, 512, 600])
def test_long_chains(n_drafted: int):
    """Chains longer than the shared index arrays are built all the same (prefill chunks are chains)."""
    tree = DraftTree.chain(0, np.arange(n_drafted))

    assert tree.parents.tolist() == list(range(-1, n_drafted)) and tree.depths[-1] == n_drafted


def test_tree_views():
    """Children, paths and prefixes agree with the parents."""
    tree = DraftTree.from_parents([1, 2, 3, 4, 5, 6], [-1, 0, 0, 1, 1, 3])

    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 3] and not tree.is_chain
    assert tree.children(1) == [3, 4] and tree.children(5) == []
    assert tree.path_to(5) == [0, 1, 3, 5] and tree.path_to(0) == [0]
    assert tree.prefix(3).token_ids.tolist() == [1, 2, 3] and tree.prefix(3).parents.tolist() == [-1, 0, 0]
    assert tree.prefix(99) is tree and tree.prefix(0).n_nodes == 1


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-1, -1], [-1, 0, 3, 0], [-1, -2]])
def test_parents_stand_before_children(parents: list[int]):
    """Anything that is not a topological order of one rooted tree is refused, naming the entry."""
    with pytest.raises(ShapeError, match=r"parents\["):
        DraftTree.from_parents(list(range(len(parents))), parents)


def test_siblings_differ():
    """Two siblings with one token would make the accept walk ambiguous."""
    with pytest.raises(OptionError, match="two children with token 7"):
        DraftTree.from_parents([1, 7, 7], [-1, 0, 0])


def test_lengths_agree():
    """One token, parent and log-probability per node."""
    with pytest.raises(ShapeError, match="2 tokens, 3 parents"):
        DraftTree.from_parents([1, 2], [-1, 0, 1])
