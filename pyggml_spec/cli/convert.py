"""`pyggml-spec convert`: Hugging Face checkpoints to GGUF."""

from __future__ import annotations

from pathlib import Path

import click

from .options import OUTPUT_FILE, json_option
from .plan_report import describe_plan, echo_notes, force_option, prepare_output, render_plan
from .progress import StageBar
from .render import print_json

OUTTYPES = ("f32", "f16", "bf16", "q8_0")


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    "--outfile",
    "output",
    metavar="FILE",
    type=OUTPUT_FILE,
    help="File to write.  [default: DIR-TYPE.gguf, here]",
)
@click.option(
    "--outtype",
    type=click.Choice(OUTTYPES),
    default="q8_0",
    show_default=True,
    help="Type of the matrices; norms and vectors are always f32.",
)
@click.option(
    "--dialect",
    type=click.Choice(["llama.cpp", "lucebox"]),
    default="llama.cpp",
    show_default=True,
    help="Spelling of a drafter's keys and tensors.",
)
@click.option(
    "--target-model-dir",
    "target_path",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="A drafter's target, its directory or GGUF file: the drafter takes over its vocabulary.",
)
@click.option("-t", "--threads", type=click.IntRange(1), metavar="N", help="CPU threads.  [default: one per core]")
@click.option("--dry-run", is_flag=True, help="Check everything and list the tensors, but write nothing.")
@force_option
@json_option
def convert(
    directory: Path,
    output: Path | None,
    outtype: str,
    dialect: str,
    target_path: Path | None,
    threads: int | None,
    dry_run: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Make a GGUF file of a checkpoint in Hugging Face layout.

    DIR holds config.json and safetensors of a drafter (DFlash, DFlash2, DSpark) or of a Qwen3.5 text model. The file
    gets its name when it is complete; before that it is checked to be one that this program can run.
    """
    from ..convert import plan_conversion
    from ..ggml.backend import default_threads

    path = output or Path(f"{directory.resolve().name}-{outtype}.gguf")
    plan = plan_conversion(
        directory,
        outtype=outtype,
        dialect="lucebox" if dialect == "lucebox" else "llama.cpp",
        target_path=target_path,
        n_threads=threads or default_threads(),
    )
    notes = prepare_output(plan, path, dry_run=dry_run, force=force)
    if not dry_run:
        with StageBar() as bar:
            plan.write(path, lambda done, total: bar.update("converting", done, total), replace=force)
    report = describe_plan(plan.file, path, notes, written=not dry_run)
    if as_json:
        print_json({"role": plan.role, "architecture": plan.architecture, **report})
        return
    click.echo(render_plan(report, f"{plan.role} ({plan.architecture})"))
    echo_notes(notes)
