"""The `pyggml-spec` program: one module per verb; the only part of the package that prints or reads the environment.

Exit codes: 0 done, 1 an error of this package (one sentence on stderr), 2 wrong usage, 130 stopped by Ctrl-C,
143 by SIGTERM, 141 the reader of stdout went away. Nothing heavy is imported before a command runs, so that `--help` is
instant.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

import click

from ..errors import PyggmlSpecError
from .bench import bench
from .convert import convert
from .devices import devices
from .doctor import doctor
from .inspect import inspect
from .interrupt import EXIT_INTERRUPTED
from .quantize import quantize
from .run import run
from .tree import tree

EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


class Program(click.Group):
    """The command group; turns the package's errors into one sentence and an exit code."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options before the command's name; what would be written to a closed stdout is lost: an error."""
        if sys.stdout is None:
            raise click.ClickException("stdout is closed, so there is nowhere to write; send it to /dev/null instead.")
        try:
            return super().parse_args(ctx, args)
        except BrokenPipeError:
            _silence_stdout()
            ctx.exit(EXIT_BROKEN_PIPE)
        except OSError as error:  # --help onto a full disk
            raise _as_exception(error) from error
        except KeyboardInterrupt:  # click itself would say "Aborted!"
            ctx.exit(EXIT_INTERRUPTED)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command; no user mistake leaves here as a traceback."""
        _tolerate_narrow_encodings()
        try:
            return super().invoke(ctx)
        except PyggmlSpecError as error:
            raise click.ClickException(error.spelled(self._flags(ctx))) from error
        except BrokenPipeError:
            _silence_stdout()
            ctx.exit(EXIT_BROKEN_PIPE)
        except OSError as error:  # a full disk, say: what we open ourselves has its own sentences
            raise _as_exception(error) from error
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)

    def _flags(self, ctx: click.Context) -> dict[str, str]:
        """The chosen command's flags by the arguments of the package that they set: a value has its argument's name,
        or its flag is spelled like it."""
        flags: dict[str, str] = {}
        for option in self.commands[ctx.invoked_subcommand].params if ctx.invoked_subcommand else ():
            long = [flag[2:].replace("-", "_") for flag in option.opts if flag.startswith("--")]
            flags |= dict.fromkeys([*long, option.name or ""], option.opts[0])
        return flags


def _as_exception(error: OSError) -> click.ClickException:
    _silence_stdout()
    return click.ClickException(f"The operating system reports: {error}.")


def _silence_stdout() -> None:
    """Point stdout at nothing: the interpreter flushes it once more while it shuts down."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tolerate_narrow_encodings() -> None:
    """Text that the terminal's encoding lacks becomes question marks; it must not end the run."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from .. import __version__

        click.echo(f"pyggml-spec {__version__}")
        ctx.exit()


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version, help="Show the version."
)
def main() -> None:
    """Generate text from Qwen3.5-family GGUF models, several tokens at a time.

    A small drafter proposes tokens and the target model checks them in one pass; greedy text is the same as without
    a drafter. Without -m a small embedded model pair is used:

        pyggml-spec run -p "def fibonacci(n):"
    """


for _command in (run, bench, tree, inspect, convert, quantize, devices, doctor):
    main.add_command(_command)

__all__ = ["main"]
