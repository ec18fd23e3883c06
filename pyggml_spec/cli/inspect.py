"""`pyggml-spec inspect`: what is in a GGUF file, and whether a drafter fits a target."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ModelFileError
from .options import json_option
from .render import align, format_bytes, print_json

if TYPE_CHECKING:
    from ..gguf_io import GgufFile
    from ..gguf_io.metadata import Metadata

MAX_ARRAY_ITEMS = 64  # longer arrays (vocabularies) are summarised
MAX_TEXT = 100  # characters shown of a value


@click.command()
@click.argument("file", required=False, type=click.Path())
@click.argument("other", required=False, type=click.Path())
@click.option("--tensors", "with_tensors", is_flag=True, help="List every tensor.")
@click.option("--metadata", "with_metadata", is_flag=True, help="List every metadata key.")
@json_option
@click.pass_context
def inspect(
    ctx: click.Context, file: str | None, other: str | None, with_tensors: bool, with_metadata: bool, as_json: bool
) -> None:
    """Show what is in a GGUF FILE: configuration, types, sizes.

    With an OTHER file, one of the two is a target and one its drafter, in any order: both are compared, and when they
    do not fit the exit code is 1. Without arguments the embedded pair is shown. A file that this package cannot run is
    shown too, with the reason.
    """
    if "" in (file, other):
        raise click.UsageError("An empty text is no name of a file.")
    paths = [Path(file), *([Path(other)] if other else [])] if file else _embedded_paths()
    reports = [_describe_file(path, with_tensors, with_metadata or as_json) for path in paths]
    fit = _compare(*_target_first(paths, reports)) if len(paths) == 2 else None
    if as_json:
        print_json({"files": reports, "fit": fit})
    else:
        click.echo("\n\n".join([*map(_render_file, reports), *([_render_fit(fit)] if fit else [])]))
    if fit is not None and not fit["fits"]:
        ctx.exit(1)


def _describe_file(path: Path, with_tensors: bool, with_metadata: bool) -> dict[str, Any]:
    from ..gguf_io import open_gguf

    with open_gguf(path) as gguf_file:
        config, why_not = _read_config(gguf_file)
        return {
            "file": str(path),
            "architecture": gguf_file.architecture,
            "role": config.pop("role") if config else None,
            "supported": why_not is None,
            "why_not": why_not,
            "n_tensors": len(gguf_file.tensors),
            "n_parameters": sum(math.prod(tensor.ne) for tensor in gguf_file.tensors.values()),
            "n_bytes": gguf_file.n_bytes,
            "types": _count_types(gguf_file),
            "config": config,
            **({"metadata": _plain_metadata(gguf_file.metadata)} if with_metadata else {}),
            **({"tensors": _list_tensors(gguf_file)} if with_tensors else {}),
        }


def _read_config(gguf_file: GgufFile) -> tuple[dict[str, Any] | None, str | None]:
    """The configuration with its role, or the sentence that says why there is none."""
    from ..gguf_io import read_drafter_config, read_target_config

    is_drafter = _is_drafter(gguf_file.architecture)
    try:
        config = read_drafter_config(gguf_file) if is_drafter else read_target_config(gguf_file)
        return {"role": "drafter" if is_drafter else "target", **asdict(config)}, None
    except ModelFileError as error:
        return None, str(error)


def _is_drafter(architecture: str) -> bool:
    return "dflash" in architecture  # every spelling of drafter architectures has it


def _target_first(paths: list[Path], reports: list[dict[str, Any]]) -> list[Path]:
    """Two files in the order of a pair; two of a kind stay as they were given."""
    are_drafters = [_is_drafter(report["architecture"]) for report in reports]
    return paths[::-1] if are_drafters == [True, False] else paths


def _count_types(gguf_file: GgufFile) -> dict[str, dict[str, int]]:
    """Per tensor type: tensors, parameters, bytes; the largest share first."""
    n_tensors, n_parameters, n_bytes = Counter[str](), Counter[str](), Counter[str]()
    for tensor in gguf_file.tensors.values():
        n_tensors[tensor.type.name] += 1
        n_parameters[tensor.type.name] += math.prod(tensor.ne)
        n_bytes[tensor.type.name] += tensor.n_bytes
    return {
        name: {"tensors": n_tensors[name], "parameters": n_parameters[name], "bytes": size}
        for name, size in n_bytes.most_common()
    }


def _list_tensors(gguf_file: GgufFile) -> list[dict[str, Any]]:
    return [
        {"name": tensor.name, "ne": list(tensor.ne), "type": tensor.type.name, "bytes": tensor.n_bytes}
        for tensor in gguf_file.tensors.values()
    ]


def _plain_metadata(metadata: Metadata) -> dict[str, Any]:
    """Every key with a value JSON knows; long arrays become a sentence."""
    return {key: _plain_value(value) for key, value in metadata.items()}


def _plain_value(value: Any) -> Any:
    n_items = getattr(value, "n_items", None)
    if n_items is None:
        return value if not isinstance(value, float) or math.isfinite(value) else str(value)
    if n_items > MAX_ARRAY_ITEMS:
        return f"array of {n_items} {value.item_type.name.lower()} items"
    if value.holds_strings:
        return [item.decode("utf-8", "replace") for item in value.strings()]
    return [_plain_value(item) for item in value.numbers().tolist()]


def _compare(target_path: Path, drafter_path: Path) -> dict[str, Any]:
    """Whether the drafter fits, one row per comparison; a file that cannot take its part at all is the only row."""
    from ..gguf_io import (
        explain_fit,
        find_vocabulary,
        open_gguf,
        read_drafter_config,
        read_target_config,
        read_vocabulary,
    )

    with open_gguf(target_path) as target, open_gguf(drafter_path) as drafter:
        are_drafters = _is_drafter(target.architecture), _is_drafter(drafter.architecture)
        if are_drafters[0] == are_drafters[1]:
            found = "both files are drafters" if all(are_drafters) else "neither file is a drafter"
            detail = f"{found}: give a target and its drafter"
            return {"fits": False, "checks": [{"check": "files", "ok": False, "detail": detail}]}
        try:
            sides = read_drafter_config(drafter), find_vocabulary(drafter), read_target_config(target)
            rows = explain_fit(*sides, read_vocabulary(target))
        except ModelFileError as error:
            return {"fits": False, "checks": [{"check": "files", "ok": False, "detail": str(error)}]}
    return {"fits": all(row.ok for row in rows), "checks": [asdict(row) for row in rows]}


def _embedded_paths() -> list[Path]:
    from ..assets import embedded_drafter_path, embedded_target_path

    return [embedded_target_path(), embedded_drafter_path()]


def _render_file(report: dict[str, Any]) -> str:
    parts = [_render_head(report), _render_types(report["types"])]
    if report["config"]:
        parts.append("configuration\n" + align((f"  {key}", _shown(value)) for key, value in report["config"].items()))
    if "metadata" in report:
        parts.append("metadata\n" + align((f"  {key}", _shown(value)) for key, value in report["metadata"].items()))
    if "tensors" in report:
        rows = ((f"  {t['name']}", t["type"], f"{t['bytes']:,} B", _shown(t["ne"])) for t in report["tensors"])
        parts.append("tensors (ne: fastest first)\n" + align(rows))
    return "\n\n".join(parts)


def _render_head(report: dict[str, Any]) -> str:
    use = f"{report['role']}, supported" if report["supported"] else f"cannot be used: {report['why_not']}"
    rows = [
        ("architecture", report["architecture"]),
        ("use", use),
        (
            "size",
            f"{report['n_parameters']:,} parameters, {report['n_tensors']} tensors, {format_bytes(report['n_bytes'])}",
        ),
    ]
    return f"{report['file']}\n" + align((f"  {name}", value) for name, value in rows)


def _render_types(types: dict[str, dict[str, int]]) -> str:
    rows = [
        (f"  {name}", f"{row['tensors']} tensors", f"{row['parameters']:,} parameters", format_bytes(row["bytes"]))
        for name, row in types.items()
    ]
    return "types\n" + align(rows)


def _render_fit(fit: dict[str, Any]) -> str:
    lines = align((f"  {row['check']}", "ok" if row["ok"] else "NO", row["detail"]) for row in fit["checks"])
    return f"the drafter {'fits' if fit['fits'] else 'does not fit'} the target\n{lines}"


def _shown(value: Any) -> str:
    """A value in one line; flags of layers, which are many, become + and -."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, bool) for item in value):
        return "".join("+" if item else "-" for item in value)
    if isinstance(value, (list, tuple)):
        return ", ".join(_shown(item) for item in value) or "none"
    text = "none" if value is None else _printable(str(value))
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."


def _printable(text: str) -> str:
    """Control characters escaped: a file must not steer the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
