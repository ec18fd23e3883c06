"""The files that commands write: whether they may, and what `convert` and `quantize` say of theirs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import OptionError
from .render import align, format_bytes

if TYPE_CHECKING:
    from ..convert.conversion import Conversion
    from ..convert.output_file import OutputFile
    from ..convert.requantise import Requantisation

force_option = click.option("--force", is_flag=True, help="Replace the file to write if it exists already.")


def refuse_to_replace(path: Path, inputs: Iterable[Path], *, force: bool) -> None:
    """Raise unless there is no such file yet, or it may be replaced; those that are read never may."""
    from ..convert.output_file import refuse_input

    refuse_input(path, inputs)
    if path.is_file() and not force:
        raise click.ClickException(f"{str(path)!r} exists already: give --force to replace it, or another name.")


def prepare_output(plan: Conversion | Requantisation, path: Path, *, dry_run: bool, force: bool) -> list[str]:
    """What is worth knowing of the plan. Raise unless it may be written; a dry run checks it and says so in a note."""
    if dry_run:
        plan.check()
        return [*plan.notes, *_note_on_replacing(path, plan.inputs, force=force)]
    refuse_to_replace(path, plan.inputs, force=force)
    return list(plan.notes)


def _note_on_replacing(path: Path, inputs: Iterable[Path], *, force: bool) -> list[str]:
    """What a dry run, which touches no file, has to say of one that the real run would be refused."""
    try:
        refuse_to_replace(path, inputs, force=force)
    except (click.ClickException, OptionError) as error:
        reason = error.message.removesuffix(".") if isinstance(error, click.ClickException) else str(error)
        return [f"without --dry-run this would be refused: {reason}"]
    return []


def describe_plan(file: OutputFile, path: Path, notes: Iterable[str], *, written: bool) -> dict[str, Any]:
    """The plan as a document: sizes, types, tensors, what is worth knowing."""
    types: dict[str, dict[str, int]] = {}
    for tensor in file.tensors:
        row = types.setdefault(tensor.type.name, {"tensors": 0, "parameters": 0, "bytes": 0})
        row["tensors"] += 1
        row["parameters"] += tensor.n_values
        row["bytes"] += tensor.n_bytes
    return {
        "file": str(path),
        "written": written,
        "n_tensors": len(file.tensors),
        "n_parameters": sum(tensor.n_values for tensor in file.tensors),
        "n_bytes": file.n_bytes,
        "types": types,
        "notes": list(notes),
        "tensors": [
            {"name": tensor.name, "ne": list(tensor.ne), "type": tensor.type.name, "bytes": tensor.n_bytes}
            for tensor in file.tensors
        ],
    }


def render_plan(report: dict[str, Any], what: str) -> str:
    """The document for people: one line on the file, one per type; tensors only while nothing is written."""
    verb = "wrote" if report["written"] else "would write"
    head = (
        f"{verb} {report['file']}: {what}, {report['n_parameters']:,} parameters, {report['n_tensors']} tensors, "
        f"{format_bytes(report['n_bytes'])}"
    )
    types = align(
        (f"  {name}", f"{row['tensors']} tensors", f"{row['parameters']:,} parameters", format_bytes(row["bytes"]))
        for name, row in report["types"].items()
    )
    parts = [head, types]
    if not report["written"]:
        parts.append(align((f"  {t['name']}", t["type"], " x ".join(map(str, t["ne"]))) for t in report["tensors"]))
    return "\n".join(parts)


def echo_notes(notes: Iterable[str]) -> None:
    """What is worth knowing goes to stderr, so that a pipe gets the report only."""
    for note in notes:
        click.echo(f"note: {note}", err=True)
