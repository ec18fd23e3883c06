"""Write the C source of one flavour's extension module: python generate_binding.py MODULE NATIVE_FOLDER OUTPUT."""

from __future__ import annotations

import sys
from pathlib import Path

import cffi


def main(module: str, native: Path, output: Path) -> None:
    """`module` is the dotted name that the extension is imported by."""
    ffi = cffi.FFI()
    ffi.cdef((native / "cdef.h").read_text())
    ffi.set_source(module, (native / "prologue.h").read_text())
    ffi.emit_c_code(str(output))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
