"""The program `pyggml-spec`, also as `python -m pyggml_spec`.

Ctrl-C while modules are imported would print a traceback, or be lost in one of them: until the program runs, it ends
the process at once. SIGTERM ends it as an exit does, so that unfinished files are removed.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Import the program and run it."""
    may_interrupt = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # whoever starts us may forbid it
    if may_interrupt:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # 128 + SIGINT, as shells report it
    from pyggml_spec.cli import main as program

    if may_interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # 128 + SIGTERM, as shells report it
    program()


if __name__ == "__main__":
    main()
