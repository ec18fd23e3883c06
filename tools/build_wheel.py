"""Build the wheel with every CPU flavour of this platform and check it: python tools/build_wheel.py [--out dist].

The check looks into the file, installs it into a fresh environment for each Python given, and computes with every
flavour that this machine can run. The wheel is tagged for plain Linux; a release repairs it in a manylinux image.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD_INPUTS = ("cdef.h", "prologue.h", "names.txt")
MAX_MB = 60  # the embedded models are 25 of them, a flavour is under 3


class WheelError(Exception):
    """One sentence about what is wrong with the wheel."""


def flavour_names() -> list[str]:
    """Every flavour that the wheel must hold."""
    command = [sys.executable, "-I", str(ROOT / "pyggml_spec/_native/flavours.py"), "all"]
    return subprocess.check_output(command, text=True).strip().split(";")


def build(out: Path) -> Path:
    """The new wheel in `out`."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out)]
    # A folder of its own: the choice of flavours would stay in the cache of the usual one.
    settings = ["-C", "cmake.define.PYGGML_SPEC_FLAVOURS=all", "-C", "build-dir=build/all-flavours"]
    subprocess.check_call([*command, *settings, str(ROOT)])
    return max(out.glob("pyggml_spec-*.whl"), key=lambda path: path.stat().st_mtime)


def check_contents(wheel: Path, flavours: list[str]) -> None:
    """Raises WheelError when something is missing, superfluous or too large."""
    names = zipfile.ZipFile(wheel).namelist()
    wanted = [f"pyggml_spec/_native/_ggml_{name}.abi3.so" for name in flavours]
    wanted += ["pyggml_spec/_native/LICENSE.ggml", "pyggml_spec/__init__.py"]
    if missing := [name for name in wanted if name not in names]:
        raise WheelError(f"{wheel.name} lacks {', '.join(missing)}")
    if foreign := [name for name in names if not name.startswith("pyggml_spec") or name.endswith(BUILD_INPUTS)]:
        raise WheelError(f"{wheel.name} holds what it should not: {', '.join(foreign)}")
    if not any(".dist-info/licenses/" in name for name in names):
        raise WheelError(f"{wheel.name} carries no licence of ours")
    if "-cp310-abi3-linux_" not in wheel.name or platform.machine() not in wheel.name:
        raise WheelError(f"{wheel.name} is not tagged for the stable ABI and {platform.machine()}")
    if (size_mb := wheel.stat().st_size / 1e6) > MAX_MB:
        raise WheelError(f"{wheel.name} has {size_mb:.0f} MB, more than {MAX_MB}")


def check_install(wheel: Path, python: str) -> None:
    """Install into a fresh environment of one Python and compute; raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.check_call([python, "-m", "venv", f"{folder}/venv"])
        fresh = f"{folder}/venv/bin/python"
        subprocess.check_call([fresh, "-m", "pip", "install", "-q", str(wheel)])
        # From elsewhere and isolated, so that the source tree cannot stand in for the installed package.
        subprocess.check_call([fresh, "-I", str(ROOT / "tools/check_flavours.py")], cwd=folder)


def main() -> int:
    """Exit status 1 when the wheel fails a check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", nargs="*", default=[sys.executable], help="interpreters to install the wheel with")
    arguments = parser.parse_args()
    flavours, start = flavour_names(), time.monotonic()
    try:
        wheel = build(arguments.out)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB in {time.monotonic() - start:.0f} s", flush=True)
        check_contents(wheel, flavours)
        for python in arguments.python:
            print(f"{python}:", flush=True)
            check_install(wheel, python)
    except (WheelError, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
