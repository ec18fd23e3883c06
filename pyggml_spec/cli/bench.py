"""`pyggml-spec bench`: is speculation faster here, does it keep the text, and if the drafts are poor, why?"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from .. import __version__
from ..records import MAX_VERIFY_WIDTH
from .bench_prompts import BUILT_IN, split_prompts
from .options import MAX_TREE, Number, json_option, model_options, tau_option
from .progress import StageBar
from .prompt import read_prompt
from .render import print_json, print_json_line
from .run import DEFAULT_MAX_WIDTH, as_prompt, has_no_drafter, load_engine, refuse

if TYPE_CHECKING:
    from ..decode.engine import Engine

DEFAULT_WIDTHS = (1, 2, 4, 8, 16, 23, 32)
DEFAULT_REPEATS = 3
EXCLUDED = "loading, reading the prompts, building graphs (one warm-up repeat)"


def _numbers(low: int, high: int) -> Callable[[click.Context, click.Parameter, str | None], tuple[int, ...]]:
    """A callback that reads integers of a range, separated by commas; each counts once."""

    def parse(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[int, ...]:
        each = click.IntRange(low, high)
        parts = text.split(",") if text is not None else []
        return tuple(dict.fromkeys(each(part.strip(), param, ctx) for part in parts))

    return parse


def _shares(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[float, ...]:
    """Numbers from 0 to 1, separated by commas."""
    parts = text.split(",") if text is not None else []
    return tuple(Number(0, 1).convert(part.strip(), param, ctx) for part in parts)


@click.command()
@model_options
@click.option("-p", "--prompt", metavar="TEXT", help="One prompt, taken literally.  [default: six built-in ones]")
@click.option(
    "-f",
    "--file",
    "prompt_file",
    metavar="FILE",
    help="Read prompts from a file, - = stdin; lines of three dashes separate them.",
)
@click.option("--chat", is_flag=True, help="Wrap each prompt as a user message in the model's chat template.")
@click.option(
    "-n",
    "--predict",
    "max_tokens",
    type=click.IntRange(2, 65536),
    default=64,
    show_default=True,
    metavar="N",
    help="Tokens to generate after each prompt; end tokens do not end it.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1, 100),
    metavar="N",
    help=f"Repeats that count; figures are their medians.  [default: {DEFAULT_REPEATS}]",
)
@click.option(
    "--draft-max",
    "lengths",
    callback=_numbers(1, 64),
    metavar="N,N,..",
    help="Measure chains of these lengths too, in tokens.",
)
@click.option(
    "--budget",
    "budgets",
    callback=_numbers(1, MAX_TREE),
    default="22",
    show_default=True,
    metavar="N,N,..",
    help="Most drafted tokens in a tree; several are measured in turn.",
)
@click.option(
    "--tree-top-k",
    type=click.IntRange(1, 16),
    default=4,
    show_default=True,
    metavar="N",
    help="Candidates for each place in a tree.",
)
@tau_option
@click.option(
    "--widths",
    callback=_numbers(1, MAX_VERIFY_WIDTH),
    metavar="N,N,..",
    help=f"Nodes of the verifies to time.  [default: {','.join(map(str, DEFAULT_WIDTHS))}]",
)
@click.option(
    "--impose",
    "imposed",
    callback=_shares,
    metavar="P,P,..",
    help="Measure as if the 1st, 2nd, .. token of a draft were accepted this often, given that those before it were "
    "(the last number goes on): what drafts of that quality gain here, also with random weights. In trees each next "
    "candidate of a place is assumed to be right half of the remaining times. The text is not real.",
)
@click.option(
    "--parity",
    is_flag=True,
    help="Instead of speed: compare the text with plain greedy decoding; exit code 1 when they part at no near-tie.",
)
@click.option(
    "--near-tie",
    type=Number(0, 100),
    metavar="X",
    help="With --parity: the best two tokens are nearly tied when less than X nats apart.  [default: 0.1]",
)
@click.option(
    "--drafter-check",
    is_flag=True,
    help="Instead of speed: find out why few drafted tokens are accepted. Tries other settings of the drafter, one at "
    "a time (the pair is loaded once for each), and says what to change and what was not checked.",
)
@json_option
@click.pass_context
def bench(ctx: click.Context, /, **given: Any) -> None:
    """Measure decoding with and without speculation on the same prompts, in turn, in one run.

    Greedy. Figures are medians over the repeats; the text of every way of decoding is compared with the plain one's.
    After the tables the last line is one JSON document; with --json there is nothing else.
    """
    _refuse_contradictions(ctx, given)
    texts = _texts(given)
    with StageBar() as bar, load_engine(given, bar, max_width=_max_width(given)) as engine:
        report = _head(engine, given, len(texts))
        prompts = [as_prompt(engine, text, {**given, "system": None}) for text in texts]
        engine.refuse_too_long(max(prompts, key=len))
        _refuse_cut_texts(engine, prompts, given["max_tokens"])
        if given["parity"]:
            report |= _check_parity(engine, texts, prompts, given, bar)
        elif given["drafter_check"]:
            from .drafter_check import check_drafter

            report |= check_drafter(engine, prompts, given, bar)
        else:
            report |= _measure(engine, prompts, given, bar)
    _print(report, given)
    if report.get("n_faults"):
        ctx.exit(1)


def _refuse_contradictions(ctx: click.Context, given: dict[str, Any]) -> None:
    needs_drafter = {"--draft-max": given["lengths"], "--parity": given["parity"]}
    needs_drafter |= {"--drafter-check": given["drafter_check"], "--impose": given["imposed"]}
    tree_flags = {"--budget": "budgets", "--tree-top-k": "tree_top_k", "--tau": "tau"}
    are_given = {flag: ctx.get_parameter_source(name) != ParameterSource.DEFAULT for flag, name in tree_flags.items()}
    measures_speed = not (given["parity"] or given["drafter_check"])
    speed_only = {"--widths": given["widths"], "--repeats": given["repeats"], "--impose": given["imposed"]}
    refuse(
        [
            (given["drafter"] and not given["target"], "-md names a drafter, but its target is missing: give -m too."),
            (given["parity"] and given["drafter_check"], "--parity and --drafter-check are two things: leave one out."),
            (given["drafter_check"] and given["lengths"], "--drafter-check drafts the whole horizon: no --draft-max."),
            *(
                (given["drafter_check"] and is_given, f"--drafter-check drafts chains: leave {flag} out.")
                for flag, is_given in are_given.items()
            ),
            *(
                (has_no_drafter(given) and wanted, f"{name} needs a drafter: give -md.")
                for name, wanted in needs_drafter.items()
            ),
            *(
                (wanted and not measures_speed, f"{name} is about speed: leave it out.")
                for name, wanted in speed_only.items()
            ),
            (given["near_tie"] is not None and not given["parity"], "--near-tie is a limit for --parity: give that."),
        ]
    )


def _max_width(given: dict[str, Any]) -> int:
    return max(DEFAULT_MAX_WIDTH, *(given["widths"] or (1,)), *(budget + 1 for budget in given["budgets"]))


def _texts(given: dict[str, Any]) -> list[str]:
    if given["prompt"] is None and given["prompt_file"] is None:
        return list(BUILT_IN)
    text = read_prompt(given["prompt"], given["prompt_file"])
    texts = [text] if given["prompt"] is not None else split_prompts(text)
    if not any(texts):
        raise click.UsageError("There is no prompt: what was given is empty.")
    return texts


def _refuse_cut_texts(engine: Engine, prompts: list[list[int]], n_wanted: int) -> None:
    """Raise unless the context has room for every text: what it cuts short is not what was asked for."""
    n_ctx, n_prompt = engine.target.limits.n_ctx, max(map(len, prompts))
    n_room = n_ctx - n_prompt + 1  # the last token is not read any more
    if n_wanted > n_room:
        longest = "the prompt" if len(prompts) == 1 else "the longest prompt"
        way_out = f"give -n {n_room} at most" if n_room > 1 else "give a shorter one"
        way_out += ", or a larger -c" if n_ctx < engine.target.config.n_ctx_train else ""
        raise click.ClickException(
            f"-n is {n_wanted}, but {longest} has {n_prompt} tokens and the context {n_ctx}: {way_out}."
        )


def _ways(engine: Engine, given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every way of decoding: name -> options of Engine.stream."""
    ways: dict[str, dict[str, Any]] = {"off": {"spec": "off"}}
    if engine.drafter is None:
        return ways
    ways["chain"] = {"spec": "chain"}
    for length in given["lengths"]:
        ways[f"chain of {length}"] = {"spec": "chain", "draft_max": length}
    for budget in given["budgets"]:
        shape = {"budget": budget, "tree_top_k": given["tree_top_k"], "tau": given["tau"]}
        ways[f"tree of {budget}"] = {"spec": "tree", **shape}
    return ways


def _head(engine: Engine, given: dict[str, Any], n_prompts: int) -> dict[str, Any]:
    """What was measured, on what, and how."""
    from .._native.pin import GGML_COMMIT, GGML_VERSION

    names = engine.describe()
    load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores" if hasattr(os, "getloadavg") else None
    measures_speed = not (given["parity"] or given["drafter_check"])
    kind = "chat messages" if given["chat"] else "prompts"
    repeats = "" if not measures_speed else f", {given['repeats'] or DEFAULT_REPEATS} repeats, medians"
    return {
        **{key: names[key] for key in ("model", "drafter", "device", "device_kind", "n_threads", "n_ctx")},
        "load": load,
        "versions": {"pyggml-spec": __version__, "ggml": f"{GGML_VERSION} ({GGML_COMMIT})"},
        "method": f"greedy, {n_prompts} {kind}, {given['max_tokens']} tokens each{repeats}",
        "excluded": EXCLUDED if measures_speed else "nothing is timed",
        "exact": given["exact"],
        "chat": given["chat"],
        "imposed": list(given["imposed"]),
    }


def _measure(engine: Engine, prompts: list[list[int]], given: dict[str, Any], bar: StageBar) -> dict[str, Any]:
    from .bench_impose import imposed_generation
    from .bench_measure import Contender, measure, verify_context, verify_times

    contenders = [Contender(name, options) for name, options in _ways(engine, given).items()]
    repeats, imposed = given["repeats"] or DEFAULT_REPEATS, given["imposed"]
    measure(
        engine,
        contenders,
        prompts,
        given["max_tokens"],
        repeats,
        lambda done, total: bar.update("measuring", done, total),
        imposed_generation(engine, imposed) if imposed else None,
    )
    memory = engine.describe()["memory"]
    return {
        "contenders": {each.name: each.report(contenders[0], is_imposed=bool(imposed)) for each in contenders},
        "verify_context": verify_context(engine),
        "verify_ms": {str(width): verify_times(engine, width) for width in given["widths"] or DEFAULT_WIDTHS},
        "memory": {**memory, "snapshots_instead_of_banks": engine.target.state.recurrent.dense_bytes},
    }


def _check_parity(
    engine: Engine, texts: list[str], prompts: list[list[int]], given: dict[str, Any], bar: StageBar
) -> dict[str, Any]:
    from .bench_parity import compare_texts

    near_tie = 0.1 if given["near_tie"] is None else given["near_tie"]
    rows = compare_texts(engine, texts, prompts, _ways(engine, given), given["max_tokens"], near_tie, bar)
    n_equal = sum(row["first_divergence"] is None for row in rows)
    n_near = sum(row["is_near_tie"] for row in rows)
    counts = {"n_equal": n_equal, "n_near_ties": n_near, "n_faults": len(rows) - n_equal - n_near}
    return {"near_tie": near_tie, **counts, "prompts": rows}


def _print(report: dict[str, Any], given: dict[str, Any]) -> None:
    if given["as_json"]:
        print_json(report)
        return
    click.echo(_render(report, given))
    click.echo()
    print_json_line(report)


def _render(report: dict[str, Any], given: dict[str, Any]) -> str:
    from .bench_report import render_bench, render_head, render_parity
    from .drafter_check import render_check

    if given["drafter_check"]:
        return f"{render_head(report)}\n\n{render_check(report)}"
    return render_parity(report) if given["parity"] else render_bench(report)
