"""Attention of a draft tree in float64: one node at a time, over an explicit list of what it may see."""

from __future__ import annotations

import numpy as np


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, cells: list[int], scale: float, gate: np.ndarray | None = None
) -> np.ndarray:
    """One node: q (H, D), k and v (n_cells, H_kv, D), the cells it sees in any order, gate (H, D) -> (H, D)."""
    heads_per_kv = q.shape[0] // k.shape[1]
    out = np.empty(q.shape, dtype=np.float64)
    for head, row in enumerate(q.astype(np.float64)):
        keys = k[cells, head // heads_per_kv].astype(np.float64)
        values = v[cells, head // heads_per_kv].astype(np.float64)
        weights = np.exp(scale * (keys @ row) - (scale * (keys @ row)).max())
        out[head] = weights @ values / weights.sum()
    return out if gate is None else out / (1.0 + np.exp(-gate.astype(np.float64)))


def visible_cells(
    node: int, node_cells: list[int], parents: list[int], committed: list[int], window: int, visibility: str
) -> list[int]:
    """Cells that `node` sees: visibility "ancestors", "block" or "prefix" (see ggml-spec-attention.h)."""
    if visibility == "prefix":
        seen, position = committed[: len(committed) - len(node_cells) + node + 1], None
    elif visibility == "block":
        seen, position = committed + node_cells, len(committed) + node
    else:
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        seen, position = committed + [node_cells[i] for i in path], None
    position = len(seen) - 1 if position is None else position
    return [cell for i, cell in enumerate(seen) if not window or i > position - window]
