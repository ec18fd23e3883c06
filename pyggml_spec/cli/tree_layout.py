"""Where the boxes of a tree go: one column per depth, left to right; no two boxes touch and no two edges cross.

The first child stands in its parent's row, so the path that always goes to the first child is a straight line; the
other subtrees follow below, as high as the columns they need are free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

ROW_HEIGHT = 44.0  # pixels from row to row
BOX_HEIGHT = 34.0
COLUMN_GAP = 40.0  # where the edges run


@dataclass(frozen=True)
class Box:
    """A placed node; x and y are its upper left corner, in pixels."""

    x: float
    y: float
    width: float
    height: float
    column_end: float  # right border of the widest box in this column

    @property
    def middle(self) -> float:
        """y of the centre, where edges arrive and leave."""
        return self.y + self.height / 2


@dataclass(frozen=True)
class Layout:
    """All boxes, in the order of the nodes, and the area they need."""

    boxes: tuple[Box, ...]
    width: float
    height: float


def place_tree(
    parents: Sequence[int], widths: Sequence[float], children: Callable[[int], Sequence[int]] | None = None
) -> Layout:
    """Place a tree whose parents stand before their children.

    Args:
        parents: per node; -1 for node 0, the root.
        widths: of the boxes, in pixels.
        children: children of a node in the order wanted, first one straight ahead; None = in the order of the nodes.
    """
    depths = _depths(parents)
    rows = _rows(len(parents), depths, children or (lambda node: [i for i, p in enumerate(parents) if p == node]))
    columns = [max(w for w, d in zip(widths, depths, strict=True) if d == depth) for depth in range(max(depths) + 1)]
    starts = [sum(columns[:depth]) + COLUMN_GAP * depth for depth in range(len(columns))]
    boxes = tuple(
        Box(starts[depth], row * ROW_HEIGHT, width, BOX_HEIGHT, starts[depth] + columns[depth])
        for width, depth, row in zip(widths, depths, rows, strict=True)
    )
    return Layout(boxes, starts[-1] + columns[-1], max(rows) * ROW_HEIGHT + BOX_HEIGHT)


def _depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def _rows(n_nodes: int, depths: Sequence[int], children: Callable[[int], Sequence[int]]) -> list[int]:
    """Rows by straight lines: a line is a node with its first child, that one's first child, and so on.

    Lines are placed in depth-first order from the leaf end of their parent line, each in the first row that is free in
    all of its columns and in the column where its edge begins.
    """
    rows, free = [0] * n_nodes, [0] * (max(depths) + 2)

    def place(line_start: int, above: int) -> None:
        line = [line_start]
        while rest := children(line[-1]):
            line.append(rest[0])
        row = max([above, *(free[depths[node]] for node in line)])
        for node in line:
            rows[node] = row
            free[depths[node]] = row + 1
        for node in reversed(line):
            for child in children(node)[1:]:
                place(child, row + 1)

    place(0, 0)
    return rows
