"""Ctrl-C between model calls: a call that is cut half-way would leave the session's caches void."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


@contextmanager
def soft_interrupt(cancel: Callable[[], None]) -> Iterator[None]:
    """Within the block the first Ctrl-C calls `cancel`, the second one interrupts at once.

    Outside the main thread, where Python delivers no signals, the block changes nothing.
    """
    n_presses = 0

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal n_presses
        n_presses += 1
        if n_presses > 1:
            raise KeyboardInterrupt
        cancel()

    try:
        previous = signal.signal(signal.SIGINT, handle)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
