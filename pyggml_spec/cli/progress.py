"""A progress bar on stderr for the two slow starts, loading and prefilling; it stays away where nobody would see it."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from .render import is_terminal

if TYPE_CHECKING:
    from rich.progress import Progress

QUIET_SECONDS = 0.4  # work that ends sooner shows no bar: a flash is only noise


class StageBar:
    """One transient bar, fed with (stage, done, total); silent unless stderr is a terminal."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._stage = ""
        self._started = time.monotonic()
        self._wanted = is_terminal(sys.stderr)

    def __enter__(self) -> StageBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hide()

    def update(self, stage: str, done: int, total: int) -> None:
        """Show `done` of `total` (any unit) of a stage; a new stage replaces the one before."""
        if not self._wanted:
            return
        if stage != self._stage:
            self.hide()
            self._stage, self._started = stage, time.monotonic()
        if self._bar is None and time.monotonic() - self._started >= QUIET_SECONDS:
            self._bar = _new_bar(stage)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)

    def disable(self) -> None:
        """Show nothing from now on."""
        self.hide()
        self._wanted = False

    def hide(self) -> None:
        """Take the bar off the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _new_bar(stage: str) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(stage)
    bar.start()
    return bar
