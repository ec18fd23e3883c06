"""Build and install the extension again after a source changed, for an editable install: python tools/rebuild.py.

Seconds instead of a whole `pip install -e .`. The running interpreter must be the one that the package is installed in.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Exit status of the build."""
    folders = sorted((ROOT / "build").glob("editable-*/CMakeCache.txt"))
    if len(folders) != 1:
        print(f"{len(folders)} editable builds in {ROOT / 'build'}, not one: run pip install -e .", file=sys.stderr)
        return 1
    folder = str(folders[0].parent)
    target = sysconfig.get_path("platlib")
    build = ["cmake", "--build", folder, *sys.argv[1:]]
    install = ["cmake", "--install", folder, "--prefix", target, "--component", "pyggml_spec"]
    return subprocess.call(build) or subprocess.call(install, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    raise SystemExit(main())
