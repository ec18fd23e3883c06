"""Hypothesis strategies for draft trees, shared by the tiers."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

SHAPES = {
    "chain": lambda draw, i: i - 1,
    "star": lambda draw, i: 0,
    "caterpillar": lambda draw, i: max(0, i - 2 + i % 2),
    "binary": lambda draw, i: (i - 1) // 2,
    "random": lambda draw, i: draw(st.integers(0, i - 1)),
    "recent": lambda draw, i: draw(st.integers(max(0, i - 3), i - 1)),
}


@st.composite
def parent_lists(draw: st.DrawFn, max_nodes: int = 64) -> list[int]:
    """Parents of a tree in topological order: chains, stars, caterpillars, binary and random trees."""
    n_nodes = draw(st.integers(1, max_nodes))
    parent_of = SHAPES[draw(st.sampled_from(sorted(SHAPES)))]
    return [-1] + [parent_of(draw, i) for i in range(1, n_nodes)]


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to `node`, both included."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def shuffled_siblings(parents: list[int], rng: np.random.Generator) -> list[int]:
    """Another topological order of the same tree: new_of[node] is the node's number in it."""
    new_of = [0] * len(parents)
    ready, n_done = [0], 0
    while ready:
        node = ready.pop(int(rng.integers(len(ready))))
        new_of[node] = n_done
        n_done += 1
        ready += [child for child, parent in enumerate(parents) if parent == node]
    return new_of
