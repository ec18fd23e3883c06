"""Visiting order of a draft tree for the recurrent kernels, and its encoding as the kernels' schedule tensor.

Children are visited smallest subtree first, the largest (heavy) child last; equal sizes keep topological order. The
first child visited continues from the live state; every later one restores its parent's state from a stack level that
was saved when the parent was computed. A level is free again once the heavy child has restored it, so the stack holds
one state per light edge above the live node and is at most floor(log2 n) + 1 deep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import OptionError, ShapeError

SCHEDULE_VERSION = 1
HEADER_WORDS = 8
NODE_WORDS = 4  # node, parent, restore_level | -1, save_level | -1
NO_LEVEL = -1


@dataclass(frozen=True)
class Schedule:
    """A visiting order; `words` is (n, 4) int32: node, parent, restore level or -1, save level or -1 per visit."""

    words: np.ndarray
    n_levels: int

    @property
    def n_nodes(self) -> int:
        """Nodes visited."""
        return len(self.words)

    @property
    def order(self) -> np.ndarray:
        """Node per visit: (n,) int32."""
        return self.words[:, 0]

    @property
    def restore_levels(self) -> np.ndarray:
        """Stack level to continue from, -1 = the live state: (n,) int32."""
        return self.words[:, 2]

    @property
    def save_levels(self) -> np.ndarray:
        """Stack level to keep the node's state in, -1 = none: (n,) int32."""
        return self.words[:, 3]


def schedule_tree(parents: np.ndarray | Sequence[int]) -> Schedule:
    """Heavy-light schedule of a tree in topological order.

    parents: (n,) parent per node, parents[0] = -1 and 0 <= parents[i] < i. Raises OptionError for anything else.
    """
    parent_list = parents.tolist() if isinstance(parents, np.ndarray) else list(parents)
    _check_parents(parent_list)
    if parent_list == list(range(-1, len(parent_list) - 1)):
        return chain_schedule(len(parent_list))
    return _visit(parent_list, _children_by_size(parent_list))


def chain_schedule(n_nodes: int) -> Schedule:
    """Schedule of a chain of n nodes: every node continues from the one before it."""
    words = np.full((n_nodes, NODE_WORDS), NO_LEVEL, dtype=np.int32)
    words[:, 0] = np.arange(n_nodes)
    words[:, 1] = words[:, 0] - 1
    return Schedule(words, 0)


def _check_parents(parents: list[int]) -> None:
    if not parents or parents[0] != -1:
        raise OptionError(f"parents start with {parents[:1]}, a draft tree starts with its root: parents[0] = -1.")
    for node, parent in enumerate(parents):
        if not -1 < parent < node and node > 0:
            raise OptionError(f"parents[{node}] = {parent}, it must be an earlier node: 0 to {node - 1}.")


def _children_by_size(parents: list[int]) -> list[list[int]]:
    """Children per node, smallest subtree first."""
    n_nodes = len(parents)
    sizes = [1] * n_nodes
    for node in range(n_nodes - 1, 0, -1):
        sizes[parents[node]] += sizes[node]
    children: list[list[int]] = [[] for _ in range(n_nodes)]
    for node in range(1, n_nodes):
        children[parents[node]].append(node)
    for siblings in children:
        if len(siblings) > 1:
            siblings.sort(key=sizes.__getitem__)
    return children


def _visit(parents: list[int], children: list[list[int]]) -> Schedule:
    words: list[int] = []
    n_levels = 0
    todo = [(0, NO_LEVEL, 0)]  # node, level to restore, levels held by its ancestors
    while todo:
        node, restore_level, n_held = todo.pop()
        siblings = children[node]
        branches = len(siblings) > 1
        words += (node, parents[node], restore_level, n_held if branches else NO_LEVEL)
        if not siblings:
            continue
        todo.append((siblings[-1], n_held if branches else NO_LEVEL, n_held))  # the heavy child, visited last
        if branches:
            n_levels = max(n_levels, n_held + 1)
            todo += [(child, n_held, n_held + 1) for child in siblings[-2:0:-1]]
            todo.append((siblings[0], NO_LEVEL, n_held + 1))
    return Schedule(np.array(words, dtype=np.int32).reshape(-1, NODE_WORDS), n_levels)


def check_schedule(schedule: Schedule) -> None:
    """Raises ShapeError unless every visit starts from its parent's state: what the kernels assume."""
    n_nodes = schedule.n_nodes
    saved: dict[int, int] = {}
    seen: set[int] = set()
    live = -1  # the node whose state is live; -1 is the durable state
    for node, parent, restore_level, save_level in schedule.words.tolist():
        if not 0 <= node < n_nodes or node in seen:
            raise ShapeError(f"schedule visits node {node}, each of the nodes 0 to {n_nodes - 1} must come once.")
        if restore_level != NO_LEVEL:
            if restore_level not in saved:
                raise ShapeError(f"schedule restores level {restore_level} for node {node} before anything saved it.")
            live = saved[restore_level]
        if live != parent:
            raise ShapeError(f"schedule starts node {node} from node {live}, its parent is node {parent}.")
        if save_level != NO_LEVEL:
            if not 0 <= save_level < schedule.n_levels:
                raise ShapeError(f"schedule saves to level {save_level} of {schedule.n_levels}.")
            saved[save_level] = node
        seen.add(node)
        live = node
    most = n_nodes.bit_length()  # floor(log2 n) + 1
    if schedule.n_levels > most:
        raise ShapeError(f"schedule has {schedule.n_levels} levels, {n_nodes} nodes need at most {most}.")


def encode_schedule(
    out: np.ndarray,
    *,
    schedule: Schedule | None,
    n_columns: int,
    pending_rows: Sequence[int] | np.ndarray = (),
    pending_bank: int,
    write_bank: int,
    state_slot: int,
    fold: bool = False,
) -> None:
    """Writes the schedule tensor in place: out is (capacity,) int32; schedule=None is a flush (no nodes).

    Raises ShapeError when the tree has more nodes than columns or `out` is too small.
    """
    n_nodes = 0 if schedule is None else schedule.n_nodes
    n_pending = len(pending_rows)
    n_levels = 0 if schedule is None else schedule.n_levels
    first_pending = HEADER_WORDS + NODE_WORDS * n_columns
    if n_nodes > n_columns:
        raise ShapeError(f"schedule has {n_nodes} nodes, the operation has {n_columns} columns.")
    if out.shape[0] < first_pending + n_pending:
        raise ShapeError(f"schedule tensor holds {out.shape[0]} words, it needs {first_pending + n_pending}.")
    header = (SCHEDULE_VERSION, n_nodes, n_pending, pending_bank, write_bank, state_slot, n_levels, int(fold))
    out[:HEADER_WORDS] = header
    if schedule is not None:
        out[HEADER_WORDS : HEADER_WORDS + NODE_WORDS * n_nodes] = schedule.words.reshape(-1)
    if n_pending:
        out[first_pending : first_pending + n_pending] = pending_rows
