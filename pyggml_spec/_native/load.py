"""Loads one flavour of the native extension."""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

from ..errors import NativeLibraryError
from .flavours import MODULE_PREFIX, list_flavours
from .pin import GGML_COMMIT, GGML_VERSION


def load_best(folders: list[str]) -> tuple[ModuleType, dict[str, str]]:
    """The extension module of the best usable flavour, initialised, and why flavours of this install were passed over.

    `folders` is this package's __path__. Raises NativeLibraryError with one reason per flavour when none can be loaded.
    """
    reasons: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for flavour in list_flavours(folders):
        why_not = flavour.why_not
        if why_not is None:
            try:
                return load_flavour(flavour.name), skipped
            except (ImportError, NativeLibraryError) as error:
                why_not = str(error)
        reasons[flavour.name] = why_not
        if flavour.path is not None:
            skipped[flavour.name] = why_not
    listed = "; ".join(f"{name} {why_not}" for name, why_not in reasons.items())
    raise NativeLibraryError(
        f"no flavour of the native extension in {', '.join(folders)} can be used ({listed}): install the "
        "package on this machine with `pip install .`, or with `pip install -e .` to run it from a source tree"
    )


def load_flavour(name: str) -> ModuleType:
    """The extension module of a flavour, initialised; raises ImportError or NativeLibraryError."""
    extension = _import(f"{__package__}.{MODULE_PREFIX}{name}")
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


def _import(module: str) -> ModuleType:
    """Import an extension; a runtime library that the system lacks is taken from NVIDIA's Python packages."""
    loaded: set[str] = set()
    while True:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            missing = re.match(r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object file", str(error))
            path = find_packaged_library(missing[1]) if missing and missing[1] not in loaded else None
            if missing is None or path is None:
                raise
            loaded.add(missing[1])
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def find_packaged_library(name: str) -> Path | None:
    """A shared library inside an installed package of NVIDIA's (for example nvidia-cublas), or None."""
    folders = (Path(folder) / "nvidia" for folder in sys.path)
    return next((path for folder in folders for path in sorted(folder.glob(f"*/lib/{name}"))), None)
