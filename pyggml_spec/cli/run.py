"""`pyggml-spec run`: generate text from a prompt."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from ..records import SamplingParams
from .interrupt import EXIT_INTERRUPTED, soft_interrupt
from .machine import explain_unused_gpus
from .options import model_options, output_options, prompt_options, sampling_options, speculation_options
from .progress import StageBar
from .prompt import read_prompt
from .render import completion_document, is_terminal, print_json, stats_table

if TYPE_CHECKING:
    from ..decode.completion import Completion
    from ..decode.engine import Engine

LOADING = (
    *("target", "drafter", "device", "n_ctx", "n_threads", "exact"),
    *("kv_type_k", "kv_type_v", "kv_type_draft_k", "kv_type_draft_v", "rotate_keys", "rotate_draft_keys"),
)
GENERATING = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty"),
    *("frequency_penalty", "penalty_last_n", "seed", "stop", "ignore_eos", "spec", "draft_max", "logprobs"),
    *("confidence", "policy"),
)
DEFAULT_MAX_WIDTH = 32
TREES = ("budget", "tree_top_k", "tau")


@click.command()
@model_options
@prompt_options
@sampling_options
@speculation_options
@output_options
@click.pass_context
def run(ctx: click.Context, /, **given: Any) -> None:
    """Generate text from a prompt.

    The text goes to stdout as it comes, everything else to stderr. Ctrl-C ends it between two rounds: the text so
    far is kept (with --json it is in the document, finish_reason "cancelled") and the exit code is 130.
    """
    _refuse_contradictions(given)
    text = read_prompt(given["prompt"], given["prompt_file"])
    with StageBar() as bar, load_engine(given, bar) as engine:
        bar.hide()
        _warn_of_unused_gpu(engine, given)
        completion = _generate(engine, text, given, bar)
        _report(engine, completion, given)
    if completion.finish_reason == "cancelled":
        ctx.exit(EXIT_INTERRUPTED)


def load_engine(given: dict[str, Any], bar: StageBar, **others: Any) -> Engine:
    """The engine the options describe; without a target file it is the embedded pair."""
    from ..decode.engine import Engine

    options = {name: given[name] for name in LOADING}
    options["n_ctx"] = options["n_ctx"] or None
    widest_tree = (given.get("budget") or 0) + 1
    return Engine.load(
        **{**options, "max_width": max(DEFAULT_MAX_WIDTH, widest_tree), **others},
        prefix_cache_mib=0,  # a command asks once
        on_progress=lambda done, total: bar.update("loading", done, total),
    )


def _refuse_contradictions(given: dict[str, Any]) -> None:
    """Combinations in which one of the options would be ignored."""
    sampling = [f"--{name.replace('_', '-')}" for name in _law(given).ignored]
    has_penalties = given["repeat_penalty"] != 1 or given["presence_penalty"] or given["frequency_penalty"]
    rules = [
        *model_rules(given),
        (
            sampling,
            f"--temp 0 is greedy and samples nothing: give another --temp, or leave {' and '.join(sampling)} out.",
        ),
        (given["logprobs"] and not given["as_json"], "--logprobs are part of the JSON document: give --json too."),
        (given["as_json"] and given["display_prompt"], "--json prints its document only: leave --display-prompt out."),
        (given["draft_max"] and given["spec"] == "off", "--spec off makes no drafts: leave --draft-max out."),
        (given["policy"] and given["spec"] == "off", "--spec off makes no drafts: leave --policy out."),
        (given["draft_max"] and has_no_drafter(given), "--draft-max needs a drafter: give -md FILE."),
        (given["policy"] and has_no_drafter(given), "--policy needs a drafter: give -md FILE."),
        (
            given["penalty_last_n"] == 0 and has_penalties,
            "--repeat-last-n 0 turns penalties off: leave it out, or the penalties.",
        ),
        (
            given["penalty_last_n"] not in (0, SamplingParams.penalty_last_n) and not has_penalties,
            "--repeat-last-n is how far penalties look back: give one, or leave it out.",
        ),
        (
            _tree_options(given) and given["spec"] != "tree",
            "--budget, --tree-top-k and --tau shape trees: give --spec tree.",
        ),
    ]
    refuse(rules)


def _law(given: dict[str, Any]) -> SamplingParams:
    """What shapes the draw of a token; nothing of it may be set when decoding is greedy."""
    return SamplingParams(given["temperature"], given["top_k"], given["top_p"], given["min_p"], seed=_seed(given))


def _seed(given: dict[str, Any]) -> int | None:
    return None if given["seed"] < 0 else given["seed"]


def has_no_drafter(given: dict[str, Any]) -> bool:
    """Whether a target is loaded by itself: the embedded one brings its drafter."""
    return bool(given["target"] and not given["drafter"])


def model_rules(given: dict[str, Any]) -> list[tuple[bool, str]]:
    """The rules of every command that loads models: (is broken, sentence)."""
    has_lone_drafter = bool(given["drafter"] and not given["target"])
    of_drafter = {
        "-ctkd": given["kv_type_draft_k"] != "f16",
        "-ctvd": given["kv_type_draft_v"] != "f16",
        "--rotate-draft-keys": given["rotate_draft_keys"],
    }
    unused = [flag for flag, is_set in of_drafter.items() if is_set and has_no_drafter(given)]
    return [
        (bool(unused), f"Only a drafter's cache has {' and '.join(unused)}: give -md FILE too."),
        (has_lone_drafter, "-md names a drafter, but its target is missing: give -m FILE too."),
        (given["system"] is not None and not given["chat"], "--system is a chat message: give --chat too."),
    ]


def refuse(rules: Iterable[tuple[Any, str]]) -> None:
    """Wrong usage when a rule is broken."""
    for is_broken, sentence in rules:
        if is_broken:
            raise click.UsageError(sentence)


def as_prompt(engine: Engine, text: str, given: dict[str, Any]) -> list[int]:
    """The tokens of the text as it is, or with --chat of a conversation in the model's template."""
    if given["chat"]:
        return engine.chat_prompt(_messages(text, given["system"]))
    return engine.tokenizer.encode(text)


def _generate(engine: Engine, text: str, given: dict[str, Any], bar: StageBar) -> Completion:
    """Stream the text to stdout (with --json only collect it) until it ends or Ctrl-C is pressed."""
    options = {name: given[name] for name in GENERATING} | _tree_options(given)
    options["seed"] = _seed(given)
    prompt = as_prompt(engine, text, given)
    stream = engine.stream(prompt, **options, on_prefill=lambda done, total: bar.update("reading", done, total))
    shown = _prompt_to_show(text, given)
    with soft_interrupt(stream.cancel):
        for piece in stream:
            bar.hide()
            if not given["as_json"]:
                click.echo(shown + piece.text, nl=False)
                shown = ""
    return stream.completion


def _tree_options(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in TREES if given[name] is not None}


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": text}]


def _prompt_to_show(text: str, given: dict[str, Any]) -> str:
    """On a terminal a continuation is read with its beginning; a file or pipe gets the new text alone."""
    wanted = given["display_prompt"]
    if wanted is None:
        wanted = is_terminal(sys.stdout) and not given["chat"]
    return click.style(text, dim=True) if wanted else ""


def _report(engine: Engine, completion: Completion, given: dict[str, Any]) -> None:
    if given["as_json"]:
        print_json(completion_document(completion, engine.describe(), with_logprobs=given["logprobs"] > 0))
    elif is_terminal(sys.stdout):
        click.echo()
    if given["show_stats"]:
        click.echo("\n" + stats_table(completion.stats, completion.prompt_tokens), err=True)
    elif given["target"] and given["drafter"] and given["spec"] != "off" and not completion.stats["spec"]["engaged"]:
        click.echo(f"Note: the drafter was not used: {completion.stats['spec']['why']}.", err=True)


def _warn_of_unused_gpu(engine: Engine, given: dict[str, Any]) -> None:
    """A GPU that idles unnoticed is reported; who asks for a device by name knows."""
    if given["device"] == "auto":
        for row in explain_unused_gpus({engine.describe()["device_kind"]}):
            click.echo(f"Warning: {row['device']} is here but not used: {row['why_not']}.", err=True)
