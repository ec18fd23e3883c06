"""Best-first draft trees over a per-node top-k source (DDTree; conditional when the source looks at the prefix).

A candidate's score is the sum of the draft's log-probabilities along its path. Candidates enter the tree best first,
equal scores by lower token id, until the budget is spent or none is left within `tau` of the best first token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyggml_spec.errors import OptionError, ShapeError
from pyggml_spec.tree.draft_tree import DraftTree

TOP_K_MAX = 16  # what the device-side top-k returns at most
_ROUNDING = 1e-3  # nats by which a float16 or float32 log-softmax may end up above 0

# (token ids from the anchor to the node that is extended, depth of the candidates) -> (ids, log-probabilities)
TopKSource = Callable[[Sequence[int], int], tuple[ArrayLike, ArrayLike]]
Row = list[tuple[float, int]]  # (cost, token id), best first


@dataclass(frozen=True)
class TreeOptions:
    """How draft trees are built."""

    budget: int = 22  # most non-root nodes
    top_k: int = 4  # candidates per node
    tau: float = 6.0  # nats a node may score below the best first token; inf = no limit
    chain_seed: bool = True  # the greedy chain enters first, and tau does not shorten it
    temperature: float = 1.0  # divides the draft's log-probabilities

    def __post_init__(self) -> None:
        check_tree_options(self)


def check_tree_options(options: TreeOptions) -> None:
    """Refuse options that would build a degenerate tree.

    Raises:
        OptionError: naming the option, its value and the rule.
    """
    if not _is_int(options.budget) or options.budget < 1:
        rule = "an integer of at least 1 (use `spec` off for none)"
        raise OptionError(f"`budget` is {options.budget!r}: it must be {rule}")
    if not _is_int(options.top_k) or not 1 <= options.top_k <= TOP_K_MAX:
        raise OptionError(f"`tree_top_k` is {options.top_k!r}: it must be an integer from 1 to {TOP_K_MAX}")
    if not _is_number(options.tau) or not options.tau >= 0:
        raise OptionError(f"`tau` is {options.tau!r}: it must be a number of at least 0, or inf for no limit")
    if not isinstance(options.chain_seed, bool):
        raise OptionError(f"`chain_seed` is {options.chain_seed!r}: it must be True or False")
    if not _is_number(options.temperature) or not 0 < options.temperature < math.inf:
        raise OptionError(f"`tree_temperature` is {options.temperature!r}: it must be a finite number above 0")


class MarginalSource:
    """Top-k of a drafted block that does not depend on the prefix (plain DDTree).

    Shapes: ids (n_draft, k) int32, logprobs (n_draft, k) float32; row d - 1 belongs to depth d.
    """

    def __init__(self, ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        if ids.shape != logprobs.shape or ids.ndim != 2:
            raise ShapeError(
                f"a drafted block has ids {ids.shape} and logprobs {logprobs.shape}: both must be (n_draft, k)"
            )
        self.n_draft = len(ids)
        self._ids: list[list[int]] = ids.tolist()
        self._logprobs: list[list[float]] = logprobs.tolist()

    def __call__(self, prefix_token_ids: Sequence[int], depth: int) -> tuple[list[int], list[float]]:
        """Candidates at `depth`, whatever the prefix."""
        return self._ids[depth - 1], self._logprobs[depth - 1]


def build_draft_tree(
    source: TopKSource,
    anchor_id: int,
    *,
    horizon: int,
    budget: int = 22,
    top_k: int = 4,
    tau: float = 6.0,
    chain_seed: bool = True,
    temperature: float = 1.0,
) -> DraftTree:
    """Build the tree that the source's probabilities make most worth verifying.

    `source(prefix_token_ids, depth)` returns candidates for one node: the prefix starts with the anchor and ends with
    the node to extend, and depth = len(prefix) is that of the candidates. `horizon` is the most depth the drafter was
    trained for. With `chain_seed` the greedy chain comes first (nodes 1, 2, ..), so that the tree accepts whatever the
    chain would have; every other node scores at least the best first token's score minus `tau`.

    Raises:
        OptionError: an option is out of range, or the horizon is negative.
    """
    options = TreeOptions(budget, top_k, tau, chain_seed, temperature)
    if not _is_int(horizon) or horizon < 0:
        raise OptionError(f"horizon is {horizon!r}: it must be an integer of at least 0")
    return _Growth(source, anchor_id, horizon, options).grow()


class _Growth:
    """A tree while it grows: its nodes so far, and a heap of the candidates next to them.

    A cost is a negated, temperature-scaled log-probability, summed along a path for a heap entry. An entry stands for
    one candidate and, behind it, its worse siblings: only the best candidate not yet taken of each parent is in the
    heap, so the heap stays small. Entry: (cost of the path, token id, path, parent node, rank among its siblings).
    """

    def __init__(self, source: TopKSource, anchor_id: int, horizon: int, options: TreeOptions) -> None:
        self.source = source
        self.horizon = horizon
        self.options = options
        self.max_nodes = options.budget + 1
        self.max_cost = math.inf
        self.token_ids, self.parents, self.depths, self.costs = [anchor_id], [-1], [0], [0.0]
        self.path_costs: list[float] = [0.0]
        self.rows: list[Row] = []  # per node: its candidates
        self.row_at_depth: dict[int, Row] | None = {} if isinstance(source, MarginalSource) else None
        self.heap: list[tuple[float, int, tuple[int, ...], int, int]] = []

    def grow(self) -> DraftTree:
        root = (self.token_ids[0],)
        first = self.open_newest(root)
        if first:
            self.max_cost = first[0][0] + self.options.tau
        if self.options.chain_seed:
            self.seed_chain(root)
        else:
            self.push(0, 0, root)
        while self.heap and len(self.token_ids) < self.max_nodes:
            self.take(heappop(self.heap))
        return self.finish()

    def seed_chain(self, path: tuple[int, ...]) -> None:
        """Take the best child of the newest node while there is one."""
        while len(self.token_ids) < self.max_nodes and self.rows[-1]:
            parent = len(self.token_ids) - 1
            self.push(parent, 1, path)
            path = self.add(parent, 0, path)
            self.open_newest(path)

    def take(self, entry: tuple[float, int, tuple[int, ...], int, int]) -> None:
        _, _, path, parent, rank = entry
        self.add(parent, rank, path[:-1])
        self.push(parent, rank + 1, path[:-1])
        if self.open_newest(path):
            self.push(len(self.token_ids) - 1, 0, path)

    def add(self, parent: int, rank: int, prefix: tuple[int, ...]) -> tuple[int, ...]:
        cost, token_id = self.rows[parent][rank]
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.depths.append(len(prefix))
        self.costs.append(cost)
        self.path_costs.append(self.path_costs[parent] + cost)
        return (*prefix, token_id)

    def push(self, parent: int, rank: int, prefix: tuple[int, ...]) -> None:
        row = self.rows[parent]
        if rank < len(row):
            cost, token_id = row[rank]
            cost += self.path_costs[parent]
            if cost <= self.max_cost:
                heappush(self.heap, (cost, token_id, (*prefix, token_id), parent, rank))

    def open_newest(self, path: tuple[int, ...]) -> Row:
        """Ask the source for the newest node's candidates, unless it cannot have children any more."""
        depth = len(path)  # the path holds the anchor too, so this is the depth of the candidates
        has_room = depth <= self.horizon and len(self.token_ids) < self.max_nodes
        row = self.candidates(path, depth) if has_room else []
        self.rows.append(row)
        return row

    def candidates(self, path: tuple[int, ...], depth: int) -> Row:
        if self.row_at_depth is None:
            return _rank(*self.source(path, depth), self.options)
        row = self.row_at_depth.get(depth)
        if row is None:
            row = self.row_at_depth[depth] = _rank(*self.source(path, depth), self.options)
        return row

    def finish(self) -> DraftTree:
        return DraftTree(
            np.array(self.token_ids, dtype=np.int32),
            np.array(self.parents, dtype=np.int32),
            np.array(self.depths, dtype=np.int32),
            -np.array(self.costs, dtype=np.float32),
        )


def _rank(ids: ArrayLike, logprobs: ArrayLike, options: TreeOptions) -> Row:
    """The top_k possible candidates as (cost, id), best first, ties by lower id."""
    values = logprobs if isinstance(logprobs, list) else np.asarray(logprobs).tolist()
    tokens = ids if isinstance(ids, list) else np.asarray(ids).tolist()
    if len(values) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ShapeError(
            f"the top-k source gave ids {tokens} and {len(values)} log-probabilities: ids must differ, one value each"
        )
    scale = -1.0 / options.temperature
    row = [(value * scale, token_id) for value, token_id in zip(values, tokens, strict=True) if value > -math.inf]
    row.sort()
    if row and row[0][0] < scale * _ROUNDING:
        raise OptionError(f"the top-k source gave {max(values):.4g} as a log-probability: it must not be above 0")
    del row[options.top_k :]
    return row


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
