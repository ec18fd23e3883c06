"""The flavours of the native extension: which exist, which this machine can run, and why not the others.

A flavour is one self-contained extension module built for one CPU level, or for a GPU and one CPU level; all have the
same Python face. This module loads none of them, and the build runs it as a script to learn what to build (so it
imports only the standard library):

    python flavours.py default          name of the best flavour for this machine
    python flavours.py all              names of every flavour of this platform
    python flavours.py options NAME     the ggml CMake options that NAME is built with
"""

from __future__ import annotations

import ctypes
import platform
import sys
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

MODULE_PREFIX = "_ggml_"


@dataclass(frozen=True)
class Flavour:
    """One build of the native extension."""

    name: str
    machine: str  # as platform.machine() spells it on Linux
    cpu_flags: frozenset[str]  # what the code may use, as /proc/cpuinfo spells it
    cmake_options: tuple[str, ...]  # NAME=VALUE, prefixed with GGML_ by the build
    driver: str | None = None  # library that the GPU's driver installs

    @property
    def module_name(self) -> str:
        """Name of the extension module inside this package."""
        return MODULE_PREFIX + self.name


@dataclass(frozen=True)
class FlavourStatus:
    """What `doctor` reports of one flavour that this package holds or could hold."""

    name: str
    path: Path | None  # None: not part of this install
    why_not: str | None  # None: usable


def _x86(name: str, cpu_flags: str, options: str, below: Flavour | None = None) -> Flavour:
    flags = frozenset(cpu_flags.split()) | (below.cpu_flags if below else frozenset())
    cmake_options = tuple(f"{option}=ON" for option in options.split())
    return Flavour(name, "x86_64", flags, (below.cmake_options if below else ()) + cmake_options)


_V2 = _x86("x86_64_v2", "ssse3 sse4_1 sse4_2 popcnt cx16", "SSE42")
_V3 = _x86("x86_64_v3", "avx avx2 fma f16c bmi1 bmi2 movbe abm", "AVX AVX2 FMA F16C BMI2", _V2)
_V4 = _x86("x86_64_v4", "avx512f avx512bw avx512cd avx512dq avx512vl", "AVX512", _V3)
_V4_VNNI = _x86("x86_64_v4_vnni", "avx512_vnni avx512vbmi", "AVX512_VNNI AVX512_VBMI", _V4)

# Best first.
FLAVOURS = (
    _V4_VNNI,
    _V4,
    _V3,
    _V2,
    Flavour("aarch64_dotprod", "aarch64", frozenset({"asimd", "asimddp"}), ("CPU_ARM_ARCH=armv8.2-a+dotprod",)),
    Flavour("aarch64", "aarch64", frozenset({"asimd"}), ("CPU_ARM_ARCH=armv8-a",)),
)

_CUDA_OPTIONS = ("CUDA=ON", "CUDA_GRAPHS=ON", "CUDA_NCCL=OFF")
_DOTPROD = FLAVOURS[4]

# Opt-in (PYGGML_SPEC_CUDA=ON). Their CPU half has the level that every machine with such a card reaches.
GPU_FLAVOURS = (
    Flavour("cuda", "x86_64", _V3.cpu_flags, _V3.cmake_options + _CUDA_OPTIONS, "libcuda.so.1"),
    Flavour("cuda", "aarch64", _DOTPROD.cpu_flags, _DOTPROD.cmake_options + _CUDA_OPTIONS, "libcuda.so.1"),
)

# Opt-in (PYGGML_SPEC_FLAVOURS=native): whatever the building machine has, so it must not leave that machine.
NATIVE = Flavour("native", platform.machine(), frozenset(), ("NATIVE=ON",))


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Instruction-set flags of the first processor, empty where the system does not list them."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def why_unusable(flavour: Flavour, machine: str, flags: frozenset[str]) -> str | None:
    """One phrase saying what a machine lacks for a flavour, or None if it can run it."""
    if flavour.machine != machine:
        return f"is built for {flavour.machine}, this machine is {machine}"
    if missing := sorted(flavour.cpu_flags - flags):
        return f"needs CPU features that this machine lacks: {', '.join(missing)}"
    return None


def why_no_driver(flavour: Flavour) -> str | None:
    """One phrase when the library of the GPU's driver cannot be loaded, None when it can or is not needed."""
    if flavour.driver is None:
        return None
    try:
        ctypes.CDLL(flavour.driver)
    except OSError as error:
        return f"needs the GPU's driver, which is not installed here ({error})"
    return None


def platform_flavours(machine: str) -> list[Flavour]:
    """Every flavour that a wheel for this machine type carries, best first."""
    return [flavour for flavour in FLAVOURS if flavour.machine == machine]


def default_flavour(machine: str, flags: frozenset[str]) -> Flavour | None:
    """The best flavour a machine can run."""
    return next((f for f in platform_flavours(machine) if why_unusable(f, machine, flags) is None), None)


def module_path(flavour: Flavour, folders: list[str]) -> Path | None:
    """The extension file of a flavour in the first of some folders that has it."""
    candidates = (Path(folder) / (flavour.module_name + suffix) for folder in folders for suffix in EXTENSION_SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)


def list_flavours(folders: list[str]) -> list[FlavourStatus]:
    """Status of each flavour of this platform, best first, without loading any; `folders` is the package's __path__.

    Those that are built on request only are listed where they are present.
    """
    machine, flags = platform.machine(), cpu_flags()
    optional = (*(f for f in GPU_FLAVOURS if f.machine == machine), NATIVE)
    found = []
    for flavour in (*optional, *platform_flavours(machine)):
        path = module_path(flavour, folders)
        if path is not None:
            why_not = why_unusable(flavour, machine, flags) or why_no_driver(flavour)
            found.append(FlavourStatus(flavour.name, path, why_not))
        elif flavour not in optional:
            found.append(FlavourStatus(flavour.name, None, "is not part of this install"))
    return found


def _answer_build(arguments: list[str]) -> str:
    machine = platform.machine()
    if arguments == ["all"]:
        return ";".join(flavour.name for flavour in platform_flavours(machine))
    if arguments == ["default"]:
        best = default_flavour(machine, cpu_flags())
        return best.name if best else ""
    if len(arguments) == 2 and arguments[0] == "options":
        candidates = (*FLAVOURS, *(f for f in GPU_FLAVOURS if f.machine == machine), NATIVE)
        return ";".join(o for f in candidates if f.name == arguments[1] for o in f.cmake_options)
    raise SystemExit(__doc__)


if __name__ == "__main__":
    print(_answer_build(sys.argv[1:]))
