"""Where the prompt comes from: -p, -f, or what is piped in."""

from __future__ import annotations

import sys

import click


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The prompt text; a file or a pipe loses one final newline, which editors add and models take for content.

    Raises: UsageError for two prompts or none, ClickException for a file that cannot be read or is not UTF-8.
    """
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("-p/--prompt and -f/--file both give a prompt; leave one out.")
    if prompt is not None:
        return prompt
    if prompt_file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise click.UsageError("There is no prompt: give -p TEXT or -f FILE, or pipe a text in.")
    return _decoded(*_read_bytes(prompt_file or "-"))


def _read_bytes(path: str) -> tuple[bytes, str]:
    if path == "-":
        return sys.stdin.buffer.read() if sys.stdin else b"", "stdin"
    try:
        with open(path, "rb") as file:
            return file.read(), path
    except OSError as error:
        raise click.ClickException(f"The prompt file {path!r} cannot be read: {error.strerror}.") from error


def _decoded(data: bytes, source: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"The prompt from {source} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}."
        raise click.ClickException(message) from error
    return text.removesuffix("\n").removesuffix("\r")
