"""The native extension: `ffi` and `lib` of the best flavour that this machine can run, loaded at first use.

`from pyggml_spec._native import ffi, lib` loads; importing this package or its `flavours` module does not.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ffi", "lib"]

ffi: Any
lib: Any


def __getattr__(name: str) -> Any:
    """Loads the extension when `ffi` or `lib` is asked for the first time."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .load import load_best

    extension = load_best(list(__path__))
    globals().update(ffi=extension.ffi, lib=extension.lib)
    return globals()[name]
