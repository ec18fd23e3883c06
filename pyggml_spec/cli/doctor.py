"""`pyggml-spec doctor`: what this install can and cannot do here, with a small generation as proof."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib import metadata
from typing import Any

import click

from ..errors import PyggmlSpecError
from .devices import render_devices
from .machine import explain_unused_gpus, list_device_rows, list_flavour_rows
from .options import json_option
from .render import align, format_bytes, print_json

DEPENDENCIES = ("cffi", "numpy", "gguf", "tokenizers", "jinja2", "click", "rich")
CHECK_PROMPT = "def fibonacci(n):"
CHECK_TOKENS = 32


@click.command()
@click.pass_context
@json_option
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check this install: flavours, devices, embedded models, and a small generation.

    The generation runs with and without speculation and must give the same tokens. Exit code 1 when something that has
    to work does not.
    """
    report = examine()
    if as_json:
        print_json(report)
    else:
        click.echo(_render(report))
    if report["problems"]:
        ctx.exit(1)


def examine() -> dict[str, Any]:
    """Every finding; a check that fails becomes a problem, it never ends the examination."""
    problems: list[str] = []
    usable = _checked(list_device_rows, problems) or []
    warnings = _warnings(explain_unused_gpus({row["kind"] for row in usable}))  # the load before our own share of it
    embedded = _checked(lambda: _embedded_models(problems), problems)
    is_sound = bool(usable) and not problems  # a damaged model proves nothing
    return {
        "versions": _versions(),
        "flavours": list_flavour_rows(),
        "devices": usable,
        "embedded": embedded,
        "self_check": _checked(lambda: _self_check(problems), problems) if is_sound else None,
        "warnings": warnings,
        "problems": problems,
    }


def _checked(check: Callable[[], Any], problems: list[str]) -> Any:
    try:
        return check()
    except PyggmlSpecError as error:
        problems.append(str(error))
        return None


def _versions() -> dict[str, str]:
    from .._native.pin import GGML_COMMIT, GGML_VERSION

    return {
        "pyggml-spec": _version("pyggml-spec"),
        "ggml": f"{GGML_VERSION} ({GGML_COMMIT})",
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        **{name: _version(name) for name in DEPENDENCIES},
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _warnings(unused_gpus: list[dict[str, str]]) -> list[str]:
    found = [f"{row['device']} is here but not used: {row['why_not']}" for row in unused_gpus]
    n_cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > n_cores:
        found.append(f"the load is {load:.1f} on {n_cores} cores: other programs slow this one down, use fewer threads")
    return found


def _embedded_models(problems: list[str]) -> dict[str, dict[str, Any]]:
    """Where they are, and whether every byte is what it was published as."""
    from ..assets import embedded_drafter_path, embedded_target_path, explain_damage

    problems += explain_damage()
    paths = {"target": embedded_target_path(), "drafter": embedded_drafter_path()}
    return {role: {"path": str(path), "bytes": path.stat().st_size} for role, path in paths.items()}


def _self_check(problems: list[str]) -> dict[str, Any]:
    """Greedy text with and without the drafter must be the same, token for token."""
    from ..decode.engine import Engine

    with Engine.load() as engine:
        drafted, plain = (engine.generate(CHECK_PROMPT, max_tokens=CHECK_TOKENS, spec=mode) for mode in ("auto", "off"))
    same = drafted.tokens == plain.tokens
    if not same:
        problems.append(f"greedy text with the drafter differs from the text without it after {CHECK_PROMPT!r}")
    if not drafted.stats["spec"]["engaged"]:
        problems.append(f"the embedded drafter was not used: {drafted.stats['spec']['why']}")
    return {
        "prompt": CHECK_PROMPT,
        "n_tokens": len(drafted.tokens),
        "same_text": same,
        "acceptance_length": drafted.stats["acceptance_length"],
        "speculative_tok_s": drafted.stats["decode_tok_s"],
        "plain_tok_s": plain.stats["decode_tok_s"],
    }


def _render(report: dict[str, Any]) -> str:
    sections = {
        "versions": align((f"  {name}", version) for name, version in report["versions"].items()),
        "flavours of the native library": align(
            (f"  {row['name']}", _flavour_state(row)) for row in report["flavours"]
        ),
        "devices": render_devices(report["devices"]) or "  none",
        "embedded models": _render_embedded(report["embedded"]),
        "self check": _render_self_check(report["self_check"]),
    }
    verdict = [f"Warning: {text}." for text in report["warnings"]] + [
        f"Problem: {text}." for text in report["problems"]
    ]
    body = "\n\n".join(f"{title}\n{text}" for title, text in sections.items())
    return f"{body}\n\n" + "\n".join(verdict or ["All is well."])


def _flavour_state(row: dict[str, Any]) -> str:
    if row["why_not"]:
        return str(row["why_not"])
    return "in use" if row["loaded"] else "usable"


def _render_embedded(embedded: dict[str, dict[str, Any]] | None) -> str:
    if embedded is None:
        return "  not present"
    return align((f"  {role}", f"{format_bytes(row['bytes'])}", row["path"]) for role, row in embedded.items())


def _render_self_check(check: dict[str, Any] | None) -> str:
    if check is None:
        return "  not done"
    rows = [
        ("  speculation on", f"{check['n_tokens']} tokens, {check['speculative_tok_s']:.0f} tokens/s"),
        ("  speculation off", f"{'same' if check['same_text'] else 'OTHER'} text, {check['plain_tok_s']:.0f} tokens/s"),
        ("  acceptance length", f"{check['acceptance_length']:.2f} tokens a round"),
    ]
    return align(rows)
