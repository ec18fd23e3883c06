"""What Python sees of ggml is generated, current, and complete."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_cdef_is_current() -> None:
    """cdef.h is what tools/make_cdef.py makes of the pinned headers, our headers and names.txt."""
    command = [sys.executable, str(ROOT / "tools/make_cdef.py"), "--check"]

    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


def test_every_header_of_ours_is_bound() -> None:
    """A header that prologue.h does not include would silently stay out of reach."""
    prologue = (ROOT / "pyggml_spec/_native/prologue.h").read_text()
    ours = {path.name for path in (ROOT / "vendor/ggml-spec/include").glob("*.h") if not path.stem.endswith("-impl")}

    assert [name for name in sorted(ours) if f'"{name}"' not in prologue] == []
