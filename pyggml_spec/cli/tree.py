"""`pyggml-spec tree`: the draft trees of a prompt's next rounds, in the terminal or as a picture."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .draft_trees import SPACE, TreeNode, TreeRound, describe_round, printable_text
from .options import MAX_TREE, OUTPUT_FILE, json_option, model_options, prompt_options, tau_option
from .plan_report import force_option, refuse_to_replace
from .progress import StageBar
from .prompt import read_prompt
from .render import is_terminal, print_json
from .run import as_prompt, has_no_drafter, load_engine, model_rules, refuse

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from ..decode.engine import Engine

STYLES = {"anchor": "bold reverse", "accepted": "bold green", "rejected": "dim", "bonus": "bold blue"}
MARKS = {"anchor": "", "accepted": "  accepted", "rejected": "", "bonus": "  chosen by the target itself"}


@click.command()
@model_options
@prompt_options
@click.option(
    "--rounds",
    "n_rounds",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    metavar="N",
    help="Rounds to show.",
)
@click.option(
    "--budget",
    type=click.IntRange(1, MAX_TREE),
    default=22,
    show_default=True,
    metavar="N",
    help="Most drafted tokens in a tree.",
)
@click.option(
    "--tree-top-k",
    "top_k",
    type=click.IntRange(1, 16),
    default=4,
    show_default=True,
    metavar="N",
    help="Candidates for each place in a tree; 1 = a chain.",
)
@tau_option
@click.option("--svg", type=OUTPUT_FILE, metavar="FILE", help="Draw the trees into an SVG file, for a talk or a page.")
@click.option("--html", type=OUTPUT_FILE, metavar="FILE", help="Draw the trees into an HTML page of its own.")
@force_option
@json_option
def tree(**given: Any) -> None:
    """Show the draft trees of the next rounds after a prompt.

    Each node is a token that the drafter proposed, with the drafter's probability given the tokens before it. What the
    target accepted (greedily) is marked, and so is the token it chose itself where the draft ended or went wrong.
    """
    refuse([*model_rules(given), (has_no_drafter(given), "Trees come from a drafter: give -md FILE too.")])
    _refuse_pictures(given)
    text = read_prompt(given["prompt"], given["prompt_file"])
    with StageBar() as bar, load_engine(given, bar) as engine:
        prompt = as_prompt(engine, text, given)
        rounds = list_rounds(engine, prompt, given)
        names = engine.describe()
    if not rounds:
        raise click.ClickException("The context is full after the prompt: there is no next round; give a larger -c.")
    for path, draw in _pictures(rounds, names, text, given):
        _write_picture(path, draw(), given["force"])
        click.echo(f"wrote {path}", err=True)
    if given["as_json"]:
        print_json(_document(rounds, names, text, given))
    elif not (given["svg"] or given["html"]):
        _print_trees(rounds)


def _write_picture(path: Path, text: str, force: bool) -> None:
    """Write it; without `force` never over a file that somebody made meanwhile."""
    try:
        with path.open("w" if force else "x", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise click.ClickException(f"The picture {str(path)!r} cannot be written: {error.strerror}.") from error


def _refuse_pictures(given: dict[str, Any]) -> None:
    """Raise unless both pictures may be written, before anything is computed for them."""
    from ..convert.output_file import is_one_of

    svg, html = given["svg"], given["html"]
    if svg and html and (svg.resolve() == html.resolve() or is_one_of(svg, [html])):
        raise click.UsageError(f"--svg and --html both name {str(svg)!r}: give two names.")
    for path in filter(None, (svg, html)):
        refuse_to_replace(path, _inputs(given), force=given["force"])


def _inputs(given: dict[str, Any]) -> list[Path]:
    """Every file that is read: models with all their parts, and the prompt's."""
    from ..assets import embedded_drafter_path, embedded_target_path
    from ..gguf_io.reader import shard_paths

    pair = embedded_target_path(), embedded_drafter_path()
    models = (given["target"], given["drafter"]) if given["target"] else pair
    prompt_file = given["prompt_file"]
    files = [part for model in models for part in shard_paths(Path(model))]
    return files if prompt_file in (None, "-") else [*files, Path(prompt_file)]


def list_rounds(engine: Engine, prompt: list[int], given: dict[str, Any]) -> list[TreeRound]:
    """Decode greedily with trees until so many rounds are committed or the text ends."""
    from ..decode.round import RoundResult, SpecOptions
    from ..tree.build import TreeOptions

    rounds: list[TreeRound] = []

    def keep(result: RoundResult) -> None:
        rounds.append(describe_round(result, len(rounds) + 1, engine.tokenizer.token_bytes))

    spec = SpecOptions("tree", tree=TreeOptions(given["budget"], given["top_k"], given["tau"]))
    session = engine.open_session()
    try:
        emissions = session.generate(prompt, spec=spec, stop_ids=engine.tokenizer.end_ids, on_round=keep)
        for _ in emissions:
            if len(rounds) >= given["n_rounds"]:
                break
    finally:
        session.close()
    return rounds


def _pictures(
    rounds: list[TreeRound], names: dict[str, Any], text: str, given: dict[str, Any]
) -> list[tuple[Path, Callable[[], str]]]:
    from .tree_svg import draw_html, draw_svg

    title = f"Draft trees: {names['drafter']} drafts for {names['model']}"
    settings = f"budget {given['budget']}, top-k {given['top_k']}, tau {given['tau']:g}"
    svg = draw_svg(rounds, title, f"{settings}; prompt: {_tail(text)}")
    wanted = [(given["svg"], lambda: svg), (given["html"], lambda: draw_html(svg, title))]
    return [(path, draw) for path, draw in wanted if path is not None]


def _tail(text: str, n_characters: int = 90) -> str:
    """The end of the prompt, which the drafts continue."""
    shown = printable_text(text)
    return shown if len(shown) <= n_characters else f"\u2026{shown[-n_characters:]}"


def _document(rounds: list[TreeRound], names: dict[str, Any], text: str, given: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": names["model"],
        "drafter": names["drafter"],
        "device": names["device"],
        "prompt": text,
        "options": {
            "budget": given["budget"],
            "tree_top_k": given["top_k"],
            "tau": given["tau"] if given["tau"] < float("inf") else None,
        },
        "rounds": [asdict(each) for each in rounds],
    }


def _print_trees(rounds: list[TreeRound]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, width=None if is_terminal(sys.stdout) else 200)
    with console.capture() as text:  # click writes it: rich would end a broken pipe with an exit code of its own
        for each in rounds:
            console.print(_rich_tree(each))
        note = "where the drafter knows the tokens before a node, given them, otherwise for its depth alone"
        console.print(f"percent: the drafter's probability, {note}; {SPACE}: a blank", style="dim")
    click.echo(text.get(), nl=False)


def _rich_tree(each: TreeRound) -> Tree:
    """The round for the terminal; the accepted path comes first in every branching."""
    from rich.tree import Tree

    root = Tree(each.summary)
    branches = {-1: root}
    pending = [0]
    while pending:
        index = pending.pop(0)
        branches[index] = branches[each.nodes[index].parent].add(_rich_label(each.nodes[index]))
        pending += each.children(index)
    return root


def _rich_label(node: TreeNode) -> Text:
    from rich.text import Text

    percent = "" if node.probability is None else f"  {node.probability:.1%}"
    return Text.assemble((node.text, STYLES[node.fate]), percent, (MARKS[node.fate], STYLES[node.fate]))
