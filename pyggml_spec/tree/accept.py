"""The accept walk: follow the target's own choices from the root of the draft tree as far as the draft has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pyggml_spec.errors import ShapeError
from pyggml_spec.tree.draft_tree import DraftTree


@dataclass(frozen=True)
class AcceptResult:
    """Where the walk went: the nodes it visited, anchor first, and the target's token after the last of them."""

    path: list[int]
    bonus_id: int

    @property
    def n_accepted(self) -> int:
        """Draft tokens accepted; neither the anchor nor the bonus token counts."""
        return len(self.path) - 1

    def emitted_ids(self, tree: DraftTree) -> list[int]:
        """Tokens gained by the round, bonus token last; emitted_ids[j] was chosen at node path[j]."""
        return [*tree.token_ids[self.path[1:]].tolist(), self.bonus_id]


def accept_greedy(tree: DraftTree, chosen_ids: NDArray[np.int32]) -> AcceptResult:
    """Walk along the target's argmax at each node.

    Shapes: chosen_ids (n,) int32, at least one entry per node.

    Raises:
        ShapeError: fewer choices than nodes.
    """
    if len(chosen_ids) < tree.n_nodes:
        raise ShapeError(
            f"the accept walk got {len(chosen_ids)} choices for {tree.n_nodes} nodes: one per node is needed"
        )
    chosen = chosen_ids.tolist()
    if tree.is_chain:
        return _walk_chain(tree.token_ids.tolist(), chosen)
    return accept_sampled(tree, lambda node, _path: chosen[node])


def accept_sampled(tree: DraftTree, choose: Callable[[int, list[int]], int]) -> AcceptResult:
    """Walk along tokens that `choose(node, path)` draws from the target's law at `node`, the last entry of `path`.

    `choose` is called once per visited node and never sees the draft, so that the emitted tokens follow the target's
    law whatever was drafted: a draft decides only how many of them one round yields.
    """
    child_of = {
        edge: node for node, edge in enumerate(zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True))
    }
    path = [0]
    while True:
        token_id = int(choose(path[-1], path))
        child = child_of.get((path[-1], token_id))
        if child is None:
            return AcceptResult(path, token_id)
        path.append(child)


def _walk_chain(token_ids: list[int], chosen: list[int]) -> AcceptResult:
    n_accepted = 0
    while n_accepted + 1 < len(token_ids) and token_ids[n_accepted + 1] == chosen[n_accepted]:
        n_accepted += 1
    return AcceptResult(list(range(n_accepted + 1)), chosen[n_accepted])
