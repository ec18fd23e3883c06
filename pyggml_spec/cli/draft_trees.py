"""A round's draft tree as people look at it: readable tokens, probabilities, and what became of every node."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ..decode.round import RoundResult

Fate = Literal["anchor", "accepted", "rejected", "bonus"]
SPACE = "\u2423"  # open box
_LONG_BLANK = re.compile(f"{SPACE}{{4,}}")


@dataclass(frozen=True)
class TreeNode:
    """One token of a tree; the bonus token, which the target chose itself, is a node too, without a probability."""

    token_id: int
    text: str  # printable
    parent: int  # index of an earlier node; -1 for the anchor
    depth: int
    fate: Fate
    probability: float | None = None  # the drafter's, given the parent
    joint: float | None = None  # product of these along the path


@dataclass(frozen=True)
class TreeRound:
    """One round; a parent stands before its children."""

    number: int  # from 1
    nodes: tuple[TreeNode, ...]
    n_offered: int
    n_accepted: int
    n_gained: int  # tokens committed: accepted ones and the bonus
    why_plain: str | None = None  # reason when nothing was offered

    def children(self, node: int) -> list[int]:
        """Children of a node: what the text went on with first, then the likeliest."""
        found = [i for i, child in enumerate(self.nodes) if child.parent == node]
        return sorted(found, key=lambda i: (not self.is_taken(i), -(self.nodes[i].probability or 0.0), i))

    def is_taken(self, node: int) -> bool:
        """Whether the text goes through this node."""
        return self.nodes[node].fate != "rejected"

    @property
    def summary(self) -> str:
        """One line on the round."""
        if not self.n_offered:
            return f"round {self.number}: nothing drafted ({self.why_plain})"
        gained = f"{self.n_gained} token{'s' if self.n_gained != 1 else ''} gained"
        return f"round {self.number}: {self.n_accepted} of {self.n_offered} drafted tokens accepted, {gained}"


def describe_round(result: RoundResult, number: int, bytes_of: Callable[[int], bytes]) -> TreeRound:
    """The tree of a committed round, the bonus token as its last node unless a stop or limit cut it away."""
    tree, taken = result.tree, _taken_nodes(result)
    logprobs = [min(value, 0.0) for value in tree.logprobs.tolist()]
    sums: list[float] = []
    nodes: list[TreeNode] = []
    for node, (token_id, parent) in enumerate(zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True)):
        sums.append(logprobs[node] + (sums[parent] if node else 0.0))
        fate: Fate = "accepted" if node in taken else "rejected"
        text, depth = printable_token(bytes_of(token_id)), int(tree.depths[node])
        nodes.append(TreeNode(token_id, text, parent, depth, fate, math.exp(logprobs[node]), math.exp(sums[node])))
    nodes[0] = TreeNode(tree.anchor_id, nodes[0].text, -1, 0, "anchor")
    if len(result.token_ids) > result.n_accepted:
        bonus, parent = result.token_ids[-1], taken[-1]
        nodes.append(TreeNode(bonus, printable_token(bytes_of(bonus)), parent, nodes[parent].depth + 1, "bonus"))
    counts = tree.n_drafted, result.n_accepted, len(result.token_ids)
    return TreeRound(number, tuple(nodes), *counts, result.why_plain)


def printable_token(data: bytes) -> str:
    """The bytes of a token in one line: blanks shown, control characters and broken UTF-8 escaped."""
    text = printable_text(data.decode("utf-8", "backslashreplace")).replace(" ", SPACE)
    return _LONG_BLANK.sub(lambda blank: f"{SPACE}\u00d7{len(blank.group())}", text) or "(empty)"


def printable_text(text: str) -> str:
    """Text in one line; what does not print is escaped, so that it cannot steer a terminal or break a file."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _taken_nodes(result: RoundResult) -> list[int]:
    """The anchor and the accepted nodes; a cut leaves the last accepted token out of the committed path."""
    path = list(result.path[: result.n_accepted + 1])
    for token_id in result.token_ids[len(path) - 1 : result.n_accepted]:
        path.append(next(i for i in result.tree.children(path[-1]) if result.tree.token_ids[i] == token_id))
    return path
