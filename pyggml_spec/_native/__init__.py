"""The native extension: `ffi` and `lib` of the best flavour that this machine can run, loaded at first use.

`from pyggml_spec._native import ffi, lib` loads; importing this package or its `flavours` module does not.
`skipped` says why better flavours of this install were passed over: {name: reason}.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ffi", "lib", "skipped"]

ffi: Any
lib: Any
skipped: dict[str, str]


def __getattr__(name: str) -> Any:
    """Loads the extension when one of `__all__` is asked for the first time."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .load import load_best

    extension, skipped = load_best(list(__path__))
    globals().update(ffi=extension.ffi, lib=extension.lib, skipped=skipped)
    return globals()[name]
