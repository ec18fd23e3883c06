"""`pyggml-spec devices`: what this install can compute on, and why not on the rest."""

from __future__ import annotations

from typing import Any

import click

from .machine import explain_unused_gpus, list_device_rows
from .options import json_option
from .render import align, format_bytes, print_json


@click.command()
@json_option
def devices(as_json: bool) -> None:
    """List what this install can compute on, and why not on the rest.

    The name in the first column is what --device takes; the one that "auto" stands for is marked with *.
    """
    usable = list_device_rows()
    unused = explain_unused_gpus({row["kind"] for row in usable})
    if as_json:
        print_json({"devices": usable, "unusable": unused})
        return
    click.echo(render_devices(usable))
    for row in unused:
        click.echo(f"{row['device']} is here but cannot be used: {row['why_not']}.")


def render_devices(rows: list[dict[str, Any]]) -> str:
    """One line per device."""
    return align(
        (
            ("* " if row["is_default"] else "  ") + row["name"],
            row["kind"],
            f"{format_bytes(row['memory_free'])} of {format_bytes(row['memory_total'])} free",
            row["description"],
        )
        for row in rows
    )
