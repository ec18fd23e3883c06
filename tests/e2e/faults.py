"""Faults on purpose: a device that stops in the middle of a graph, and interrupts at any line of ours."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pyggml_spec
from pyggml_spec import Engine
from pyggml_spec._native import ffi, lib

PACKAGE = str(Path(pyggml_spec.__file__).parent)


class FailingDevice:
    """Stops the CPU at chosen graph nodes, counted over all graphs of the engine; those before have been computed."""

    def __init__(self, engine: Engine) -> None:
        self.backend = engine.target.backend
        self.n_nodes = 0
        self.fails_at: set[int] = set()
        self.always = False
        self._callback = ffi.callback("bool(void *)", self._poll)

    def _poll(self, _: Any) -> bool:
        self.n_nodes += 1
        return self.always or self.n_nodes in self.fails_at

    @contextmanager
    def connected(self) -> Iterator[FailingDevice]:
        """Let the CPU ask after every node."""
        lib.ggml_backend_cpu_set_abort_callback(self.backend.ptr, self._callback, ffi.NULL)
        try:
            yield self
        finally:
            lib.ggml_backend_cpu_set_abort_callback(self.backend.ptr, ffi.NULL, ffi.NULL)


class Interrupter:
    """Raises KeyboardInterrupt at the n-th line that the package runs (0 = never, counting all the same)."""

    def __init__(self, at_line: int = 0) -> None:
        self.at_line = at_line
        self.n_lines = 0

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.n_lines += 1
            if self.n_lines == self.at_line:
                raise KeyboardInterrupt
        return self._trace

    def __enter__(self) -> Interrupter:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)
