"""The draft tree: candidate continuations of the anchor, as flat arrays in topological order.

Node 0 is the anchor, the newest committed token, which is in no cache yet. A chain draft is a tree of one path, and a
plain round verifies the tree of one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyggml_spec.errors import OptionError, ShapeError

_N_CACHED = 512
_INDICES = np.arange(-1, _N_CACHED, dtype=np.int32)  # shared by every chain: parents and depths are slices of it
_INDICES.setflags(write=False)


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A tree over candidate tokens; every parent stands before its children.

    Shapes:
        token_ids: (n,) int32; token_ids[0] is the anchor
        parents:   (n,) int32; parents[0] = -1
        depths:    (n,) int32; edges from the anchor, depths[0] = 0
        logprobs:  (n,) float32; the draft's natural log-probability of a node given its parent; 0 for the anchor
    """

    token_ids: NDArray[np.int32]
    parents: NDArray[np.int32]
    depths: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    @classmethod
    def root(cls, anchor_id: int) -> DraftTree:
        """The tree of a plain round: the anchor alone."""
        return cls.chain(anchor_id, ())

    @classmethod
    def chain(cls, anchor_id: int, ids: ArrayLike, logprobs: ArrayLike | None = None) -> DraftTree:
        """The tree of one path.

        Shapes: ids (n_draft,), logprobs (n_draft,) or None when the draft's confidence is not known.
        """
        drafted = np.asarray(ids, dtype=np.int32)
        token_ids = np.empty(len(drafted) + 1, dtype=np.int32)
        token_ids[0] = anchor_id
        token_ids[1:] = drafted
        values = np.zeros(len(token_ids), dtype=np.float32)
        if logprobs is not None:
            values[1:] = logprobs
        indices = _indices(len(token_ids))
        return cls(token_ids, indices[:-1], indices[1:], values)

    @classmethod
    def from_parents(cls, token_ids: ArrayLike, parents: Sequence[int], logprobs: ArrayLike | None = None) -> DraftTree:
        """A checked tree from its nodes: depths follow from the parents.

        Shapes: token_ids (n,), parents (n,), logprobs (n,) or None.

        Raises:
            ShapeError: the arrays differ in length, or a parent does not stand before its child.
            OptionError: two siblings carry the same token.
        """
        depths: list[int] = []
        for node, parent in enumerate(parents):
            if (node == 0) != (parent == -1) or not -1 <= parent < node:
                raise ShapeError(
                    f"parents[{node}] is {parent}: a parent stands before its child, and only node 0 has -1"
                )
            depths.append(depths[parent] + 1 if node else 0)
        ids = np.asarray(token_ids, dtype=np.int32)
        values = np.zeros(len(ids), dtype=np.float32) if logprobs is None else np.asarray(logprobs, dtype=np.float32)
        if not len(ids) == len(depths) == len(values) or not len(ids):
            raise ShapeError(
                f"got {len(ids)} tokens, {len(depths)} parents and {len(values)} log-probabilities: a node has one each"
            )
        _check_siblings(ids.tolist(), parents)
        return cls(ids, np.asarray(parents, dtype=np.int32), np.asarray(depths, dtype=np.int32), values)

    @property
    def n_nodes(self) -> int:
        """Nodes with the anchor: the verify width before padding."""
        return len(self.token_ids)

    @property
    def n_drafted(self) -> int:
        """Draft tokens that this tree offers to the target."""
        return len(self.token_ids) - 1

    @property
    def anchor_id(self) -> int:
        """Token of the root."""
        return int(self.token_ids[0])

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children, so that the nodes are one path in order."""
        return int(self.depths[-1]) == len(self.depths) - 1

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node."""
        return len(self.depths) - 1 if self.is_chain else int(self.depths.max())

    def children(self, node: int) -> list[int]:
        """Nodes whose parent is `node`, in topological order."""
        nodes: list[int] = np.flatnonzero(self.parents == node).tolist()
        return nodes

    def path_to(self, node: int) -> list[int]:
        """Nodes from the anchor to `node`, both included."""
        path = [node]
        while path[-1]:
            path.append(int(self.parents[path[-1]]))
        return path[::-1]

    def prefix(self, n_nodes: int) -> DraftTree:
        """The tree of the first `n_nodes` nodes: closed under ancestors, as parents stand before their children."""
        if n_nodes >= self.n_nodes:
            return self
        keep = slice(max(n_nodes, 1))
        return DraftTree(self.token_ids[keep], self.parents[keep], self.depths[keep], self.logprobs[keep])


def _indices(n: int) -> NDArray[np.int32]:
    """-1, 0, 1 .. n-1; shape (n + 1,)."""
    return _INDICES[: n + 1] if n < _N_CACHED else np.arange(-1, n, dtype=np.int32)


def _check_siblings(token_ids: list[int], parents: Sequence[int]) -> None:
    seen: set[tuple[int, int]] = set()
    for edge in zip(parents, token_ids, strict=True):
        if edge in seen:
            raise OptionError(f"node {edge[0]} has two children with token {edge[1]}: siblings carry different tokens")
        seen.add(edge)
