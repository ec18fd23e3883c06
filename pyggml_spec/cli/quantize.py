"""`pyggml-spec quantize`: GGUF to GGUF of another type."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import OptionError
from .options import OUTPUT_FILE, json_option
from .plan_report import describe_plan, echo_notes, force_option, prepare_output, render_plan
from .progress import StageBar
from .render import align, print_json

if TYPE_CHECKING:
    from ..convert import Override, Requantisation, TensorError


def _check_type(ctx: click.Context, param: click.Parameter, name: str) -> str:
    from ..convert.recipes import check_recipe

    try:
        return check_recipe(name)
    except OptionError as error:
        raise click.BadParameter(str(error)) from error


def _parse_overrides(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> list[Override]:
    from ..convert import Override

    try:
        return [Override.parse(text) for text in texts]
    except OptionError as error:
        raise click.BadParameter(str(error)) from error


def _refuse_imatrix(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    if path is not None:
        raise click.BadParameter("importance matrices are not supported; leave the option out.")


@click.command()
@click.argument("source", metavar="IN")
@click.argument("output", metavar="OUT", type=OUTPUT_FILE)
@click.argument("recipe", metavar="TYPE", callback=_check_type)
@click.option(
    "--override",
    "overrides",
    multiple=True,
    callback=_parse_overrides,
    metavar="PATTERN=TYPE",
    help="Type of the matrices whose name matches a regular expression; the last match counts.",
)
@click.option("--verify", is_flag=True, help="Read the file back and report how far every tensor moved.")
@click.option("--imatrix", metavar="FILE", callback=_refuse_imatrix, expose_value=False, help="Not supported.")
@click.option("-t", "--threads", type=click.IntRange(1), metavar="N", help="CPU threads.  [default: one per core]")
@click.option("--dry-run", is_flag=True, help="List what every tensor would become, but write nothing.")
@force_option
@json_option
def quantize(
    source: str,
    output: Path,
    recipe: str,
    overrides: Sequence[Override],
    verify: bool,
    threads: int | None,
    dry_run: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write the GGUF file IN as OUT with its matrices in another type.

    TYPE is a mixture that spends more bits where they count (q4_k_m, q5_k_m, iq4_xs) or one type for all matrices
    (q8_0, q6_k, q5_k, q4_k, q3_k, q2_k, q5_1, q5_0, q4_1, q4_0, iq4_nl, f32, f16, bf16). Everything else is kept:
    keys, norms, vectors, alignment. Of a model in several parts any part's name will do; OUT is one file.
    """
    if dry_run and verify:
        raise click.UsageError("--dry-run writes nothing that could be verified: leave --verify out.")
    from ..convert import plan_requantisation
    from ..ggml.backend import default_threads
    from ..gguf_io import open_gguf

    with open_gguf(source) as file, StageBar() as bar:
        plan = plan_requantisation(file, recipe, overrides, n_threads=threads or default_threads())
        notes = prepare_output(plan, output, dry_run=dry_run, force=force)
        errors = None if dry_run else _run(plan, output, verify, force, bar)
        bar.hide()
        report = describe_plan(plan.file, output, notes, written=not dry_run)
        report |= {"n_bytes_before": file.n_bytes, "errors": None if errors is None else _rows(errors)}
        _print(report, plan, as_json)


def _run(plan: Requantisation, output: Path, verify: bool, force: bool, bar: StageBar) -> list[TensorError] | None:
    from ..convert import verify_requantisation

    plan.write(output, lambda done, total: bar.update("quantising", done, total), replace=force)
    if not verify:
        return None
    return verify_requantisation(plan, output, lambda done, total: bar.update("reading back", done, total))


def _rows(errors: list[TensorError]) -> list[dict[str, Any]]:
    return [
        {"name": e.name, "from": e.old_type.name, "to": e.new_type.name, "relative_error": e.relative_error}
        for e in errors
    ]


def _print(report: dict[str, Any], plan: Requantisation, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    ratio = report["n_bytes"] / report["n_bytes_before"]
    click.echo(render_plan(report, f"{len(plan.changed)} tensors changed, {ratio:.0%} of the size"))
    if report["errors"] is not None:
        click.echo(_render_errors(report["errors"]))
    echo_notes(report["notes"])


def _render_errors(rows: list[dict[str, Any]]) -> str:
    """Every changed tensor, the worst first."""
    if not rows:
        return "read back: every tensor is a copy"
    ordered = sorted(rows, key=lambda row: -row["relative_error"])
    lines = align((f"  {r['name']}", f"{r['from']} -> {r['to']}", f"{r['relative_error']:.3%}") for r in ordered)
    return f"read back, relative error of every changed tensor\n{lines}"
