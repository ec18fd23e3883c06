"""Options that commands share, spelled like llama.cpp's where it has them; values are checked before work starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ..records import KV_TYPES, MAX_VERIFY_WIDTH

Command = TypeVar("Command", bound=Callable[..., Any])
MAX_TREE = MAX_VERIFY_WIDTH - 1  # most drafted nodes: the root, which is the anchor, takes one place of a verify


class Number(click.FloatRange):
    """A float inside a range; `nan`, which passes every comparison, is refused, and infinity where it means nothing."""

    name = "number"

    def __init__(
        self, low: float, high: float | None = None, *, min_open: bool = False, allow_infinity: bool = False
    ) -> None:
        super().__init__(low, high, min_open=min_open)
        self.allow_infinity = allow_infinity

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the float, or fail with a sentence that names the value."""
        number = click.FLOAT.convert(value, param, ctx)
        if math.isnan(number) or (math.isinf(number) and not self.allow_infinity):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return super().convert(number, param, ctx)


class OutputFile(click.Path):
    """A file to write. One that cannot be written is no wrong usage: the file is what is wrong."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or fail: with exit code 2 for what is no name of a file, else with 1."""
        if value in ("", "-"):
            self.fail(f"{value!r} is no name of a file; give one.", param, ctx)
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            raise click.ClickException(error.message) from error


OUTPUT_FILE = OutputFile()


def _refuse_empty(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    if "" in texts:
        raise click.BadParameter("an empty text would stop before the first token; leave the option out.")
    return texts


def _apply(options: list[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    """One decorator out of several, in reading order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _cache_type(short: str, long: str, name: str, what: str) -> Callable[[Command], Command]:
    """An option that names the type of cached keys or values."""
    return click.option(
        short, long, name, type=click.Choice(KV_TYPES), default="f16", show_default=True, help=what
    )


tau_option = click.option(
    "--tau",
    type=Number(0, allow_infinity=True),
    default=6.0,
    show_default=True,
    metavar="X",
    help="Leave out branches more than X nats less probable than the best.",
)

model_options = _apply(
    [
        click.option(
            "-m", "--model", "target", metavar="FILE", help="Target model (GGUF). Default: the embedded pair."
        ),
        click.option("-md", "--model-draft", "drafter", metavar="FILE", help="Drafter for the target (GGUF)."),
        click.option(
            "--device",
            default="auto",
            show_default=True,
            metavar="NAME",
            help="Device to compute on; `pyggml-spec devices` lists them.",
        ),
        click.option(
            "-c",
            "--ctx-size",
            "n_ctx",
            type=click.IntRange(0),
            default=0,
            metavar="N",
            help="Context size in tokens; 0 = what the model was trained with, at most 8192.  [default: 0]",
        ),
        click.option(
            "-t",
            "--threads",
            "n_threads",
            type=click.IntRange(1),
            metavar="N",
            help="CPU threads.  [default: one per core]",
        ),
        _cache_type("-ctk", "--cache-type-k", "kv_type_k", "Type of cached keys."),
        _cache_type("-ctv", "--cache-type-v", "kv_type_v", "Type of cached values."),
        _cache_type(
            "-ctkd", "--cache-type-k-draft", "kv_type_draft_k", "Type of keys in the drafter's own cache."
        ),
        _cache_type(
            "-ctvd", "--cache-type-v-draft", "kv_type_draft_v", "Type of values in the drafter's own cache."
        ),
        click.option(
            "--rotate-keys",
            is_flag=True,
            help="Spread the values of the target's keys before they are stored, so that 4- and 8-bit keys lose less.",
        ),
        click.option(
            "--rotate-draft-keys",
            is_flag=True,
            help="Spread the values of the drafter's keys before they are stored, so that 8-bit keys lose less.",
        ),
        click.option(
            "--exact",
            is_flag=True,
            help="The same tokens with and without speculation, bit for bit, whatever the type of the weights: every "
            "call is padded to a width at which this device's results agree, found by a short trial at loading. "
            "Prompts are read a quarter slower. On a CPU f32, f16, q8_0, q6_k, q5_k and q4_k weights agree at every "
            "width, with or without this option, so that decoding costs the same; with q3_k and q2_k plain decoding "
            "takes 4 times as long, drafting the same.",
        ),
    ]
)

prompt_options = _apply(
    [
        click.option("-p", "--prompt", metavar="TEXT", help="The prompt, taken literally but for control tokens."),
        click.option(
            "-f",
            "--file",
            "prompt_file",
            metavar="FILE",
            help="Read the prompt from a file, - = stdin; one final newline is dropped.",
        ),
        click.option(
            "--chat",
            is_flag=True,
            help="Wrap the prompt as a user message in the model's chat template. All of it is text then; in a plain "
            "prompt the spelling of a control token, such as <|im_end|>, becomes that token.",
        ),
        click.option(
            "-sys", "--system", "--system-prompt", "system", metavar="TEXT", help="System message; needs --chat."
        ),
    ]
)

sampling_options = _apply(
    [
        click.option(
            "-n",
            "--predict",
            "max_tokens",
            type=click.IntRange(-1),
            default=128,
            show_default=True,
            metavar="N",
            help="Most tokens to generate; -1 = until a stop or a full context.",
        ),
        click.option(
            "--temp",
            "temperature",
            type=Number(0, 100),
            default=0.0,
            show_default=True,
            metavar="T",
            help="Temperature; 0 = greedy: always the most probable token.",
        ),
        click.option(
            "--top-k",
            type=click.IntRange(0),
            default=0,
            show_default=True,
            metavar="N",
            help="Sample among the N most probable tokens; 0 = all.",
        ),
        click.option(
            "--top-p",
            type=Number(0, 1, min_open=True),
            default=1.0,
            show_default=True,
            metavar="P",
            help="Sample among the most probable tokens that together reach P; 1 = all.",
        ),
        click.option(
            "--min-p",
            type=Number(0, 1),
            default=0.0,
            show_default=True,
            metavar="P",
            help="Drop tokens less probable than P times the best one; 0 = none.",
        ),
        click.option(
            "--repeat-penalty",
            type=Number(0, 100, min_open=True),
            default=1.0,
            show_default=True,
            metavar="X",
            help="Divide the score of recent tokens by X; 1 = off.",
        ),
        click.option(
            "--presence-penalty",
            type=Number(-100, 100),
            default=0.0,
            show_default=True,
            metavar="X",
            help="Subtract X from the score of recent tokens.",
        ),
        click.option(
            "--frequency-penalty",
            type=Number(-100, 100),
            default=0.0,
            show_default=True,
            metavar="X",
            help="Subtract X for every recent occurrence of a token.",
        ),
        click.option(
            "--repeat-last-n",
            "penalty_last_n",
            type=click.IntRange(-1),
            default=64,
            show_default=True,
            metavar="N",
            help="How many tokens back the penalties look; -1 = all, 0 = none.",
        ),
        click.option(
            "-s",
            "--seed",
            type=click.IntRange(-1, 2**64 - 1),
            default=-1,
            show_default=True,
            metavar="N",
            help="Seed for sampling; -1 = a fresh one each time.",
        ),
        click.option(
            "--stop",
            multiple=True,
            callback=_refuse_empty,
            metavar="TEXT",
            help="Stop before this text; may be given several times.",
        ),
        click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-text token."),
    ]
)

speculation_options = _apply(
    [
        click.option(
            "--spec",
            type=click.Choice(["auto", "off", "chain", "tree"]),
            default="auto",
            show_default=True,
            help="off = decode plainly; chain, tree = draft that way; auto = draft chains if there is a drafter.",
        ),
        click.option(
            "--policy",
            type=click.Choice(["fixed", "ema", "cost"]),
            help="How much is drafted: fixed = always all; cost = what pays, by measured times and acceptance; "
            "ema = all, or nothing for a while when few tokens were accepted.  [default: cost for auto, else fixed]",
        ),
        click.option(
            "--draft-max",
            "--draft",
            "draft_max",
            type=click.IntRange(1, 64),
            metavar="N",
            help="Most tokens drafted in sequence.  [default: what the drafter was trained for]",
        ),
        click.option(
            "--budget",
            type=click.IntRange(1, MAX_TREE),
            metavar="N",
            help="Most drafted tokens in a tree; needs --spec tree.  [default: 22]",
        ),
        click.option(
            "--tree-top-k",
            type=click.IntRange(1, 16),
            metavar="N",
            help="Candidates for each place in a tree; needs --spec tree.  [default: 4]",
        ),
        click.option(
            "--tau",
            type=Number(0, allow_infinity=True),
            metavar="X",
            help="Leave out branches more than X nats less probable than the best; needs --spec tree.  [default: 6]",
        ),
        click.option(
            "--confidence",
            type=Number(0, 1),
            default=0.0,
            show_default=True,
            metavar="P",
            help="End chains before a token that a DSpark drafter's confidence head trusts less than P; 0 = off.",
        ),
    ]
)

output_options = _apply(
    [
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and only that."),
        click.option(
            "--logprobs",
            type=click.IntRange(0, 20),
            default=0,
            metavar="N",
            help="Report each token's log-probability and the N best alternatives; needs --json.",
        ),
        click.option("--stats", "show_stats", is_flag=True, help="Print a table of what happened on stderr."),
        click.option(
            "--display-prompt/--no-display-prompt",
            "display_prompt",
            default=None,
            help="Print the prompt before the text.  [default: only on a terminal]",
        ),
    ]
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and only that.")
