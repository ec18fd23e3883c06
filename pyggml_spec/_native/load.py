"""Loads one flavour of the native extension."""

from __future__ import annotations

import importlib
from types import ModuleType

from ..errors import NativeLibraryError
from .flavours import MODULE_PREFIX, list_flavours
from .pin import GGML_COMMIT, GGML_VERSION


def load_best(folders: list[str]) -> ModuleType:
    """The extension module of the best usable flavour, initialised; `folders` is this package's __path__.

    Raises NativeLibraryError with one reason per flavour when none can be loaded.
    """
    reasons = []
    for flavour in list_flavours(folders):
        if flavour.why_not is None:
            try:
                return load_flavour(flavour.name)
            except (ImportError, NativeLibraryError) as error:
                reasons.append(f"{flavour.name} {error}")
        else:
            reasons.append(f"{flavour.name} {flavour.why_not}")
    raise NativeLibraryError(
        f"no flavour of the native extension in {', '.join(folders)} can be used ({'; '.join(reasons)}): install the "
        "package on this machine with `pip install .`, or with `pip install -e .` to run it from a source tree"
    )


def load_flavour(name: str) -> ModuleType:
    """The extension module of a flavour, initialised; raises ImportError or NativeLibraryError."""
    extension = importlib.import_module(f"{__package__}.{MODULE_PREFIX}{name}")
    lib, ffi = extension.lib, extension.ffi
    lib.pyggml_spec_log_install()
    found = ffi.string(lib.ggml_version()).decode(), ffi.string(lib.ggml_commit()).decode()
    if found != (GGML_VERSION, GGML_COMMIT):
        raise NativeLibraryError(
            f"was built from ggml {found[0]} ({found[1]}), this package needs {GGML_VERSION} ({GGML_COMMIT}): "
            "build it again"
        )
    lib.ggml_spec_init()
    return extension
