"""pyggml-spec: speculative decoding of Qwen3.5-family GGUF models, several tokens a pass, on CPUs and GPUs.

Importing the package loads no native code; `Engine` does at its first use.
"""

from __future__ import annotations

from pyggml_spec.errors import (
    ContextLimitError,
    DeviceError,
    FatalDeviceError,
    ModelFileError,
    NativeLibraryError,
    OptionError,
    PyggmlSpecError,
    ShapeError,
)

TYPE_CHECKING = False  # type checkers take it for typing's, whose import would take longer than all the rest
if TYPE_CHECKING:
    from typing import Any

    from pyggml_spec.decode.completion import Completion, Piece, Stream
    from pyggml_spec.decode.engine import Engine

__all__ = [
    "Completion", "ContextLimitError", "DeviceError", "Engine", "FatalDeviceError", "ModelFileError",
    "NativeLibraryError", "OptionError", "Piece", "PyggmlSpecError", "ShapeError", "Stream", "__version__",
]  # fmt: skip

_LAZY = {
    "Completion": "pyggml_spec.decode.completion",
    "Piece": "pyggml_spec.decode.completion",
    "Stream": "pyggml_spec.decode.completion",
    "Engine": "pyggml_spec.decode.engine",
}


def __getattr__(name: str) -> Any:
    """Load what needs native code or metadata only when it is asked for."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("pyggml-spec")
        except PackageNotFoundError:  # run from a source tree on PYTHONPATH
            return "not installed"
    raise AttributeError(f"module 'pyggml_spec' has no attribute {name!r}")
