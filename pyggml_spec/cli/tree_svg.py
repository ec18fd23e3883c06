"""Draft trees as a self-contained SVG picture or HTML page: no script, no font, no address outside the file.

Every colour stands on its element, so that office programs draw it too; a style block changes them for readers whose
screen is dark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from rich.cells import cell_len, set_cell_size

from .draft_trees import SPACE, TreeNode, TreeRound, printable_text
from .tree_layout import BOX_HEIGHT, Box, Layout, place_tree

MARGIN = 28.0
CELL = 8.0  # pixels of a character of 13 px in a monospaced font
PADDING = 10.0  # left and right of the text in a box
MIN_BOX = 46.0  # wide enough for a percentage
MAX_TOKEN_CELLS = 18
MIN_WIDTH = 760.0  # room for the legend
TITLE_HEIGHT, HEADING_HEIGHT, ROUND_GAP, LEGEND_HEIGHT = 74.0, 30.0, 30.0, 56.0
SANS = "system-ui, 'Segoe UI', 'Helvetica Neue', 'DejaVu Sans', Arial, sans-serif"
MONO = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"


@dataclass(frozen=True)
class Paint:
    """Colours of a kind of node: box, border, text, edge towards it."""

    fill: str
    stroke: str
    text: str
    edge: str


LIGHT = {
    "anchor": Paint("#2b3440", "#2b3440", "#ffffff", "#2b3440"),
    "accepted": Paint("#d9f2e1", "#1a7f4b", "#0a4a2b", "#1a7f4b"),
    "rejected": Paint("#f5f6f8", "#c5ccd5", "#5a6673", "#c5ccd5"),
    "bonus": Paint("#e4edff", "#2f6fde", "#173f8a", "#2f6fde"),
}
DARK = {
    "anchor": Paint("#dfe5ec", "#dfe5ec", "#14181d", "#dfe5ec"),
    "accepted": Paint("#123d28", "#3fbf7f", "#c9f5dc", "#3fbf7f"),
    "rejected": Paint("#20262d", "#465260", "#9aa7b4", "#465260"),
    "bonus": Paint("#16294d", "#6b9ffa", "#d5e3ff", "#6b9ffa"),
}
PAPER, INK, MUTED = ("#ffffff", "#14181d"), ("#1f2933", "#e8edf2"), ("#66727f", "#93a0ad")  # light, dark
WHAT = {
    "anchor": "newest token of the text",
    "accepted": "drafted and accepted",
    "rejected": "drafted in vain",
    "bonus": "chosen by the target itself",
}
LEGEND = f"line width and percent: the drafter's probability, given the tokens before; {SPACE} stands for a blank"


def draw_svg(rounds: Sequence[TreeRound], title: str, subtitle: str) -> str:
    """The rounds below each other, with title and legend, as one XML document."""
    layouts = [_place(each) for each in rounds]
    width = max([MIN_WIDTH, *(layout.width + 2 * MARGIN for layout in layouts)])
    body: list[str] = []
    y = TITLE_HEIGHT
    for each, layout in zip(rounds, layouts, strict=True):
        body += _draw_round(each, layout, y)
        y += HEADING_HEIGHT + layout.height + ROUND_GAP
    height = y + LEGEND_HEIGHT
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
        f"<title>{_safe(title)}</title>",
        f"<style>{_dark_style()}</style>",
        f'<rect class="paper" width="{width:.0f}" height="{height:.0f}" rx="12" fill="{PAPER[0]}"/>',
        _text(MARGIN, 36, _cut(title, (width - 2 * MARGIN) / 11), "ink", size=20, weight=600),
        _text(MARGIN, 58, _cut(subtitle, (width - 2 * MARGIN) / 7.5), "muted", size=13),
    ]
    return "\n".join([*head, *body, *_draw_legend(y + 4), "</svg>"]) + "\n"


def draw_html(svg: str, title: str) -> str:
    """A page with the picture in it."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_safe(title)}</title>\n"
        "<style>body { margin: 2rem; background: #eceff3; } svg { max-width: 100%; height: auto; }\n"
        "@media (prefers-color-scheme: dark) { body { background: #0b0d10; } }</style>\n"
        f"</head>\n<body>\n{svg}</body>\n</html>\n"
    )


def _place(each: TreeRound) -> Layout:
    widths = [max(MIN_BOX, cell_len(_label(node)) * CELL + 2 * PADDING) for node in each.nodes]
    return place_tree([node.parent for node in each.nodes], widths, each.children)


def _label(node: TreeNode) -> str:
    return _cut(node.text, MAX_TOKEN_CELLS)


def _draw_round(each: TreeRound, layout: Layout, top: float) -> Iterator[str]:
    yield _text(MARGIN, top + 14, each.summary, "ink", size=14, weight=600)
    yield f'<g transform="translate({MARGIN:.0f} {top + HEADING_HEIGHT:.0f})">'
    in_front = sorted(range(1, len(each.nodes)), key=lambda node: (each.is_taken(node), node))
    for node in in_front:
        yield _edge(each.nodes[node], layout.boxes[each.nodes[node].parent], layout.boxes[node])
    for shown, box in zip(each.nodes, layout.boxes, strict=True):
        yield from _draw_node(shown, box)
    yield "</g>"


def _edge(node: TreeNode, start: Box, end: Box) -> str:
    """Horizontal to the end of the column, then a curve; the width is the drafter's probability."""
    begin, bend = start.x + start.width, (start.column_end + end.x) / 2
    path = f"M{begin:.1f} {start.middle:.1f}H{start.column_end:.1f}"
    path += f"C{bend:.1f} {start.middle:.1f} {bend:.1f} {end.middle:.1f} {end.x:.1f} {end.middle:.1f}"
    dashes = ' stroke-dasharray="5 4"' if node.fate == "bonus" else ""
    return (
        f'<path class="edge {node.fate}" d="{path}" fill="none" stroke="{LIGHT[node.fate].edge}" '
        f'stroke-width="{_edge_width(node):.2f}"{dashes}/>'
    )


def _edge_width(node: TreeNode) -> float:
    least = 1.0 if node.fate == "rejected" else 2.5
    return least + 5.0 * (node.probability or 0.0)


def _draw_node(node: TreeNode, box: Box) -> Iterator[str]:
    paint, is_taken = LIGHT[node.fate], node.fate != "rejected"
    middle = box.x + box.width / 2
    note = "anchor" if node.fate == "anchor" else "target" if node.probability is None else _percent(node.probability)
    dashes = ' stroke-dasharray="5 4"' if node.fate == "bonus" else ""
    yield f'<g class="node {node.fate}"><title>{_safe(_describe(node))}</title>'
    yield (
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="7" '
        f'fill="{paint.fill}" stroke="{paint.stroke}" stroke-width="{2 if is_taken else 1}"{dashes}/>'
    )
    weight = 700 if is_taken else 400
    yield _text(middle, box.y + 16, _label(node), paint, font=MONO, size=13, weight=weight, anchor="middle")
    yield _text(middle, box.y + 28.5, note, paint, size=9.5, anchor="middle", opacity=0.85)
    yield "</g>"


def _describe(node: TreeNode) -> str:
    """What a mouse pointer on the node tells."""
    text = f"{node.text}, token {node.token_id}: {WHAT[node.fate]}"
    if node.probability is None or node.joint is None:
        return text
    return f"{text}; drafter's probability {node.probability:.2%}, of the whole path {node.joint:.2%}"


def _draw_legend(top: float) -> Iterator[str]:
    x = MARGIN
    for fate in LIGHT:
        dashes = ' stroke-dasharray="4 3"' if fate == "bonus" else ""
        paint = LIGHT[fate]
        yield (
            f'<g class="node {fate}"><rect x="{x:.0f}" y="{top:.0f}" width="20" height="13" rx="4" '
            f'fill="{paint.fill}" stroke="{paint.stroke}" stroke-width="1.5"{dashes}/></g>'
        )
        yield _text(x + 27, top + 10.5, WHAT[fate], "muted", size=11.5)
        x += 27 + 6.6 * len(WHAT[fate]) + 24
    yield _text(MARGIN, top + 32, LEGEND, "muted", size=11.5)


def _text(
    x: float,
    y: float,
    text: str,
    colour: str | Paint,
    *,
    size: float,
    font: str = SANS,
    weight: int = 400,
    anchor: str = "start",
    opacity: float = 1.0,
) -> str:
    fill = colour.text if isinstance(colour, Paint) else {"ink": INK, "muted": MUTED}[colour][0]
    name = "" if isinstance(colour, Paint) else f'class="{colour}" '
    return (
        f'<text {name}x="{x:.1f}" y="{y:.1f}" font-family="{font}" font-size="{size:g}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{fill}" fill-opacity="{opacity:g}" xml:space="preserve">{_safe(text)}</text>'
    )


def _dark_style() -> str:
    rules = [f".paper{{fill:{PAPER[1]}}}", f".ink{{fill:{INK[1]}}}", f".muted{{fill:{MUTED[1]}}}"]
    for fate, paint in DARK.items():
        rules.append(f".node.{fate} rect{{fill:{paint.fill};stroke:{paint.stroke}}}")
        rules.append(f".node.{fate} text{{fill:{paint.text}}}.edge.{fate}{{stroke:{paint.edge}}}")
    return "@media (prefers-color-scheme: dark){" + "".join(rules) + "}"


def _percent(probability: float) -> str:
    if 0 < probability < 0.01:
        return "< 1 %"
    return "> 99 %" if 0.99 < probability < 1 else f"{probability * 100:.0f} %"


def _cut(text: str, n_cells: float) -> str:
    """At most so many cells of a monospaced font; what is cut off leaves an ellipsis."""
    room = int(n_cells)
    return text if cell_len(text) <= room else set_cell_size(text, room - 1).rstrip() + "\u2026"


def _safe(text: str) -> str:
    return escape(printable_text(text))


assert BOX_HEIGHT >= 30, "two lines of text have to fit"
