"""Build and install the extension again after a source changed, for an editable install: python tools/rebuild.py [-j2].

Takes seconds. Needs one `pip install --no-build-isolation -e .` before, in the environment whose Python runs this:
a build in an isolated environment leaves nothing behind that could be called again.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build_folder() -> Path | None:
    """The configured build folder whose CMake still exists."""
    for cache in (ROOT / "build").glob("cp*/CMakeCache.txt"):
        cmake = re.search(r"CMAKE_COMMAND:INTERNAL=(.+)", cache.read_text())
        if cmake and Path(cmake[1]).exists():
            return cache.parent
    return None


def main() -> int:
    """Exit status of the build."""
    folder = build_folder()
    if folder is None:
        print(f"no usable build in {ROOT / 'build'}: run pip install --no-build-isolation -e .", file=sys.stderr)
        return 1
    target = sysconfig.get_path("platlib")
    build = ["cmake", "--build", str(folder), *sys.argv[1:]]
    install = ["cmake", "--install", str(folder), "--prefix", target, "--component", "pyggml_spec"]
    return subprocess.call(build) or subprocess.call(install, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    raise SystemExit(main())
