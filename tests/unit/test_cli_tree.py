"""Draft trees for people: what the nodes say, where the boxes go, what the picture holds. No native code."""

from __future__ import annotations

import math
from itertools import combinations
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pyggml_spec.cli import main
from pyggml_spec.cli.draft_trees import TreeRound, describe_round, printable_token
from pyggml_spec.cli.tree_layout import BOX_HEIGHT, Layout, place_tree
from pyggml_spec.cli.tree_svg import draw_html, draw_svg
from pyggml_spec.decode.round import RoundResult
from pyggml_spec.tree.draft_tree import DraftTree

SVG = "{http://www.w3.org/2000/svg}"
TEXTS = {10: b"def", 11: b" <a>", 12: b"\x1b[31m", 13: b"&\xff", 14: b"      ", 20: b"\n"}


def a_round(path: list[int], token_ids: list[int], n_accepted: int) -> TreeRound:
    """A round over anchor 10 with children 11 and 12, below 11 the tokens 13 and 14."""
    tree = DraftTree.from_parents(
        [10, 11, 12, 13, 14], [-1, 0, 0, 1, 1], np.log([1, 0.5, 0.25, 0.5, 0.004], dtype=np.float32)
    )
    others = {"text": "", "logprobs": [], "stopped": False, "is_drafted": True, "why_plain": None, "confidence": None}
    times = {"draft_ms": 0.0, "verify_ms": 0.0, "host_ms": 0.0}
    result = RoundResult(token_ids=token_ids, tree=tree, path=path, n_accepted=n_accepted, **others, **times)
    return describe_round(result, 1, TEXTS.__getitem__)


def test_nodes():
    """Fates, probabilities given the parent and along the path, and the bonus token below the last accepted one."""
    each = a_round([0, 1, 3], [11, 13, 20], 2)

    assert [node.fate for node in each.nodes] == ["anchor", "accepted", "rejected", "accepted", "rejected", "bonus"]
    assert [node.parent for node in each.nodes] == [-1, 0, 0, 1, 1, 3]
    assert each.nodes[3].probability == pytest.approx(0.5) and each.nodes[3].joint == pytest.approx(0.25)
    assert each.nodes[0].probability is None and each.nodes[5].probability is None
    assert each.summary == "round 1: 2 of 4 drafted tokens accepted, 3 tokens gained"


def test_a_round_that_a_limit_cut():
    """The last token that stays is a draft: it is accepted although its node was not committed, and no bonus."""
    each = a_round([0, 1], [11, 13], 2)

    assert [node.fate for node in each.nodes] == ["anchor", "accepted", "rejected", "accepted", "rejected"]


def test_children_begin_with_what_was_taken():
    """Then the likeliest."""
    assert a_round([0, 2], [12, 20], 1).children(0) == [2, 1]
    assert a_round([0], [20], 0).children(0) == [5, 1, 2]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b" a b", "\u2423a\u2423b"),
        (b"        x", "\u2423\u00d78x"),
        (b"\r\n\t", "\\r\\n\\t"),
        (b"\xe2\x82", "\\xe2\\x82"),
        (b"\x1b[0m", "\\x1b[0m"),
        ("\u202e\u4e2d".encode(), "\\u202e\u4e2d"),
        (b"", "(empty)"),
    ],
)
def test_printable_tokens(data: bytes, text: str):
    """One line, nothing invisible, nothing that steers a terminal."""
    assert printable_token(data) == text


trees = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.floats(1, 200)), min_size=1, max_size=40)


def parents_of(drawn: list[tuple[float, float]]) -> list[int]:
    return [int(share * node) if node else -1 for node, (share, _) in enumerate(drawn)]


def heights_at(layout: Layout, parents: list[int], share: float) -> dict[int, list[tuple[float, int]]]:
    """Per gap between columns: y of every edge a share of the way down its curve, and the edge's node."""
    found: dict[int, list[tuple[float, int]]] = {}
    for node, parent in enumerate(parents[1:], 1):
        start, end = layout.boxes[parent].middle, layout.boxes[node].middle
        found.setdefault(round(layout.boxes[node].x), []).append((start + (end - start) * share, node))
    return found


@given(trees)
def test_boxes_do_not_touch_and_edges_do_not_cross(drawn: list[tuple[float, float]]):
    """For any tree; the first children make a straight line, and everything lies in the area told."""
    parents, widths = parents_of(drawn), [width for _, width in drawn]
    layout = place_tree(parents, widths)

    for a, b in combinations(layout.boxes, 2):
        apart = a.x + a.width < b.x or b.x + b.width < a.x or abs(a.y - b.y) > BOX_HEIGHT
        assert apart
    for node, parent in enumerate(parents[1:], 1):
        assert layout.boxes[node].x > layout.boxes[parent].column_end
        assert layout.boxes[node].y >= layout.boxes[parent].y
        if parent not in parents[1:node]:
            assert layout.boxes[node].y == layout.boxes[parent].y
    near_start, near_end = (heights_at(layout, parents, share) for share in (0.001, 0.999))
    for gap in near_start:
        assert [node for _, node in sorted(near_start[gap])] == [node for _, node in sorted(near_end[gap])]
    assert all(box.x + box.width <= layout.width and box.y + box.height <= layout.height for box in layout.boxes)


def test_picture_is_well_formed_and_complete():
    """Every node with its text and probability, nothing loaded from elsewhere, nothing unescaped."""
    each = a_round([0, 1, 3], [11, 13, 20], 2)
    svg = draw_svg([each, each], "a <b> & c", "prompt: \x00'\"")
    root = ElementTree.fromstring(svg)
    groups = [group for group in root.iter(f"{SVG}g") if group.find(f"{SVG}title") is not None]
    words = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]

    assert len(groups) == 2 * len(each.nodes) == 12
    assert len([p for p in root.iter(f"{SVG}path")]) == 2 * (len(each.nodes) - 1)
    assert {"def", "\u2423<a>", "\\x1b[31m", "&\\xff", "\u2423\u00d76", "\\n", "50 %", "< 1 %"} <= set(words)
    assert "a <b> & c" in words and svg.count("http") == 1 and "<script" not in svg


def test_edges_are_as_wide_as_tokens_are_likely():
    """The likelier, the wider; accepted edges carry their own class and come last, in front."""
    root = ElementTree.fromstring(draw_svg([a_round([0, 2], [12, 20], 1)], "t", "s"))
    edges = [(p.get("class"), float(p.get("stroke-width"))) for p in root.iter(f"{SVG}path")]

    assert [name for name, _ in edges] == ["edge rejected"] * 3 + ["edge accepted", "edge bonus"]
    assert math.isclose(edges[0][1], edges[1][1]) and edges[0][1] > edges[2][1]
    assert edges[3][1] > edges[2][1] + 1


def test_page_holds_the_picture():
    """And its title, escaped."""
    page = draw_html("<svg></svg>", "<&>")
    assert "<title>&lt;&amp;&gt;</title>" in page and "<svg></svg>" in page and "http" not in page


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-p", "x", "-m", "target.gguf"], "give -md FILE too"),
        (["-p", "x", "-md", "drafter.gguf"], "give -m FILE too"),
        (["-p", "x", "--system", "s"], "give --chat too"),
        (["-p", "x", "--budget", "128"], "128 is not in the range"),
        (["-p", "x", "--rounds", "0"], "0 is not in the range"),
        (["-p", "x", "--tau", "nan"], "'nan' is not a finite number"),
        (["-p", "x", "-f", "y"], "leave one out"),
    ],
)
def test_wrong_usage(arguments: list[str], text: str):
    """One sentence, exit code 2, before anything is loaded."""
    result = CliRunner().invoke(main, ["tree", *arguments])
    assert result.exit_code == 2 and text in result.output
