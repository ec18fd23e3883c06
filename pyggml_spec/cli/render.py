"""Text for people and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

import click

if TYPE_CHECKING:
    from ..decode.completion import Completion
    from ..decode.stats import SpecReport, StatsReport


def print_json(document: dict[str, Any]) -> None:
    """One JSON document on stdout: strict JSON, one line per key, so that long lists stay readable."""
    lines = (f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in document.items())
    click.echo("{\n" + ",\n".join(lines) + "\n}")


def print_json_line(document: dict[str, Any]) -> None:
    """The same in a line, to come last after text for people."""
    click.echo(json.dumps(document, allow_nan=False))


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person watches this stream; a closed one is None."""
    return stream is not None and stream.isatty()


def align(rows: Iterable[Sequence[str]]) -> str:
    """Rows as columns two spaces apart; the last column is not padded."""
    table = [tuple(row) for row in rows]
    n_columns = max((len(row) for row in table), default=0)
    widths = [max((len(row[i]) for row in table if i < len(row) - 1), default=0) for i in range(n_columns)]
    return "\n".join("  ".join(_padded(row, widths)).rstrip() for row in table)


def _padded(row: tuple[str, ...], widths: list[int]) -> list[str]:
    return [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)] + [row[-1]]


def format_bytes(n_bytes: int) -> str:
    """A size in decimal units, as disks and downloads are measured."""
    size, units = float(n_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def completion_document(completion: Completion, names: dict[str, Any], *, with_logprobs: bool) -> dict[str, Any]:
    """What `run --json` prints; `names` is the engine's description of itself."""
    document = {
        "text": completion.text,
        "tokens": completion.tokens,
        "prompt_tokens": completion.prompt_tokens,
        "finish_reason": completion.finish_reason,
        "model": names["model"],
        "drafter": names["drafter"],
        "device": names["device"],
        "stats": completion.stats,
    }
    return {**document, "logprobs": [asdict(row) for row in completion.logprobs]} if with_logprobs else document


def stats_table(stats: StatsReport, prompt_tokens: int) -> str:
    """The statistics of one generation for people; per-round times are means."""
    spec = stats["spec"]
    n_rounds = max(stats["rounds"], 1)
    times = {"draft": stats["draft_ms"], "verify": stats["verify_ms"], "host": stats["host_ms"]}
    rows = [
        ("prompt", f"{prompt_tokens} tokens{_speed(', read at', stats['prefill_tok_s'])}"),
        ("text", f"{stats['committed']} tokens{_speed(', written at', stats['decode_tok_s'])}"),
        ("speculation", _speculation(spec)),
        ("rounds", f"{stats['rounds']}, {stats['plain_rounds']} of them plain"),
        ("a round", " + ".join(f"{ms / n_rounds:.2f} ms {name}" for name, ms in times.items())),
    ]
    if spec["engaged"]:
        rows += _acceptance_rows(stats)
    return align(rows)


def _speed(verb: str, tokens_per_s: float) -> str:
    """Empty when nothing was measured: the last token of a prompt is read by the first round."""
    return f"{verb} {tokens_per_s:.0f} tokens/s" if tokens_per_s else ""


def _speculation(spec: SpecReport) -> str:
    state = f"{spec['mode']} with a {spec['drafter_kind']} drafter" if spec["engaged"] else "not used"
    return f"{state} ({spec['why']})" if spec["why"] else state


def _acceptance_rows(stats: StatsReport) -> list[tuple[str, str]]:
    n_rounds = stats["rounds"] - stats["plain_rounds"]
    depths = _by_depth([count / n_rounds for count in stats["accepted_per_depth"]])
    return [
        ("accepted", f"{stats['accepted']} of {stats['offered']} drafted tokens ({stats['accept_rate']:.0%})"),
        ("acceptance length", f"{stats['acceptance_length']:.2f} tokens a round, the target's own included"),
        ("accepted at depth", depths),
        *([("confidence at depth", _by_depth(stats["confidence_per_depth"]))] if stats["confidence_per_depth"] else []),
    ]


def _by_depth(shares: Sequence[float]) -> str:
    return "  ".join(f"{depth}: {share:.0%}" for depth, share in enumerate(shares, 1))
