"""Compile our GPU kernels for AMD cards, without a card: python tools/check_hip.py [FILE.cu ...].

Every kernel becomes machine code for every target, the host's side is checked once a file, and what kernels use of a
card is printed. Needs clang with AMD's target, HIP headers and the device library: ROCm (/opt/rocm or ROCM_PATH) has
all three. Without it, Debian's clang and what a wheel of triton carries will do (later wheels lack headers):

    apt install clang-22 && pip install --no-deps triton==3.5.1
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HINT = "install ROCm (ROCM_PATH says where), or: apt install clang-22 && pip install --no-deps triton==3.5.1"
CLANGS = ["amdclang++", *(f"clang++-{version}" for version in range(29, 18, -1)), "clang++"]  # 19 brought gfx1201
WARP_LANES = 32  # cards from gfx10 on

# The device library asks these constants how to compute; ROCm keeps a small file for each answer.
CONTROLS = """
#define CONTROL(type, name, value) __constant const unsigned type __oclc_##name = value;
CONTROL(char, finite_only_opt, 0) CONTROL(char, unsafe_math_opt, 0) CONTROL(char, daz_opt, 0)
CONTROL(char, correctly_rounded_sqrt32, 1) CONTROL(char, wavefrontsize64, 0)
CONTROL(int, ISA_version, {isa}) CONTROL(int, ABI_version, 600)
"""


class ToolchainError(Exception):
    """One sentence about what is missing, and how to get it."""


@dataclass(frozen=True)
class Toolchain:
    """A compiler and where the parts of HIP lie."""

    clang: str
    include: Path
    bitcode: Path

    def flags(self, upstream: Path) -> list[str]:
        """What every compilation of ours gets."""
        folders = [ROOT / "vendor/ggml-spec/include", upstream / "ggml/include"]
        return [
            *("-x", "hip", "-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror"),
            *("-nogpuinc", "-nogpulib", "-include", "__clang_hip_runtime_wrapper.h", "-isystem", str(self.include)),
            # Newer compilers no longer define the latter, older headers ask for it; older compilers have one for hosts.
            *("-D__HIP_PLATFORM_AMD__", f"-D__AMDGCN_WAVEFRONT_SIZE={WARP_LANES}", "-Wno-macro-redefined"),
            *(f"-I{folder}" for folder in folders),
        ]


@dataclass(frozen=True)
class Kernel:
    """What the compiler says about one kernel."""

    name: str
    vgprs: int
    sgprs: int
    lds: int  # bytes of shared memory known when compiling
    scratch: int  # bytes a thread in device memory: spilled registers, arrays with run-time indices


def hip_folders() -> Iterator[tuple[Path, Path]]:
    """Candidates for headers and device library."""
    rocm = Path(os.environ.get("ROCM_PATH", "/opt/rocm"))
    yield rocm / "include", rocm / "amdgcn/bitcode"
    triton = importlib.util.find_spec("triton")
    for package in (triton.submodule_search_locations or []) if triton else []:
        yield Path(package) / "backends/amd/include", Path(package) / "backends/amd/lib"


def find_clang(named: str | None) -> str:
    """A clang++ that knows AMD's cards."""
    rocm = os.environ.get("ROCM_PATH", "/opt/rocm")
    for name in [named] if named else [f"{rocm}/llvm/bin/clang++", *CLANGS]:
        clang = shutil.which(name)
        if clang and "amdgcn" in subprocess.run([clang, "--print-targets"], capture_output=True, text=True).stdout:
            return clang
    raise ToolchainError(f"{named or 'A clang++'} with AMD's target (amdgcn) was not found: {HINT}.")


def find_toolchain(clang: str | None) -> Toolchain:
    """ROCm's, or the parts of it that are there; raises ToolchainError."""
    found = find_clang(clang)
    for include, bitcode in hip_folders():
        if (include / "hip/hip_fp16.h").exists() and (bitcode / "ocml.bc").exists():
            return Toolchain(found, include, bitcode)
    raise ToolchainError(f"HIP headers (hip/hip_fp16.h) and the device library (ocml.bc) were not found: {HINT}.")


def run(command: list[str]) -> str:
    """The complaint of a command that failed, else nothing."""
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr or f"{command[0]} failed with status {done.returncode}"


def make_controls(toolchain: Toolchain, target: str, folder: Path) -> Path:
    """The device library's constants for one target, as bitcode."""
    source, bitcode = folder / f"{target}.cl", folder / f"{target}.bc"
    major, minor, step = int(target[3:-2]), int(target[-2], 16), int(target[-1], 16)
    source.write_text(CONTROLS.replace("{isa}", str(major * 1000 + minor * 100 + step)))
    amd = ["--target=amdgcn-amd-amdhsa", f"-mcpu={target}", "-nogpulib"]
    complaint = run([toolchain.clang, "-x", "cl", *amd, "-c", "-emit-llvm", str(source), "-o", str(bitcode)])
    if complaint:
        raise ToolchainError(f"{toolchain.clang} cannot compile for {target}: {complaint.strip().splitlines()[0]}")
    return bitcode


def read_kernels(assembly: str) -> list[Kernel]:
    """The kernels of an assembly file, from the metadata at its end."""
    kernels = []
    section = assembly.partition("\namdhsa.kernels:")[2].partition("\namdhsa.")[0]
    for entry in section.split("\n  - ")[1:]:
        words = dict(re.findall(r"^ +\.(\w+): +(\S+)$", entry, re.MULTILINE))
        numbers = ("vgpr_count", "sgpr_count", "group_segment_fixed_size", "private_segment_fixed_size")
        kernels.append(Kernel(words["name"], *(int(words[number]) for number in numbers)))
    return kernels


def compile_device(
    toolchain: Toolchain, flags: list[str], source: Path, target: str, controls: Path
) -> list[Kernel] | str:
    """The kernels of one file as machine code for one target, or the compiler's complaint."""
    libraries = [toolchain.bitcode / "ocml.bc", toolchain.bitcode / "ockl.bc", controls]
    linked = [word for file in libraries for word in ("-Xclang", "-mlink-builtin-bitcode", "-Xclang", str(file))]
    assembly = controls.with_name(f"{source.stem}-{target}.s")
    device = ["--cuda-device-only", f"--offload-arch={target}", "-S", *linked, str(source), "-o", str(assembly)]
    if complaint := run([toolchain.clang, *flags, *device]):
        return complaint
    text = assembly.read_text()
    if missing := sorted(set(re.findall(r"\b__o(?:cml|ckl|clc)_\w+", text))):
        return f"the device library lacks {', '.join(missing)}"
    return read_kernels(text)


def short_name(kernel: str) -> str:
    """A mangled name as people read it, without its parameters."""
    demangler = shutil.which("c++filt")
    name = subprocess.check_output([demangler, kernel], text=True).strip() if demangler else kernel
    return re.sub(r"\(anonymous namespace\)::|ggml_spec_cuda::|^void |\(ggml.*|\([^()]*\)$", "", name)


def usage(kernels: list[Kernel]) -> str:
    """The most that any of some kernels uses."""
    most = [max(getattr(kernel, field) for kernel in kernels) for field in ("vgprs", "sgprs", "lds", "scratch")]
    return "{:3} VGPRs, {:3} SGPRs, {:3} B LDS (static), {} B scratch".format(*most)


def print_device(result: list[Kernel] | str, *, each: bool) -> None:
    """What became of a file for one target, after a line's beginning."""
    if isinstance(result, str):
        print(f"FAILED\n{result}", flush=True)
        return
    print(f"ok, kernels: {len(result)}" + (f", at most {usage(result)}" if result else ""), flush=True)
    for kernel in result if each else []:
        print(f"    {usage([kernel])}  {short_name(kernel.name)}")


def check_file(toolchain: Toolchain, flags: list[str], source: Path, controls: dict[str, Path], *, each: bool) -> bool:
    """Prints the results of one file; false: something was refused."""
    complaint = run([toolchain.clang, *flags, "--cuda-host-only", "-fsyntax-only", str(source)])
    print(f"{source.name:22} host     {'FAILED' if complaint else 'ok'}\n{complaint}", end="", flush=True)
    passed = not complaint
    for target, constants in controls.items():
        result = compile_device(toolchain, flags, source, target, constants)
        print(f"{source.name:22} {target:8} ", end="")
        print_device(result, each=each)
        passed &= not isinstance(result, str)
    return passed


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="default: vendor/ggml-spec/cuda/*.cu")
    parser.add_argument("--targets", default="gfx1100,gfx1201", help="default: %(default)s")
    parser.add_argument("--clang", help="the compiler, instead of the newest on PATH")
    parser.add_argument("--kernels", action="store_true", help="a line for each kernel")
    return parser.parse_args()


def main() -> int:
    """Exit status: 0 all compiled, 1 something was refused, 2 the toolchain is missing."""
    arguments = read_arguments()
    sources = arguments.files or sorted((ROOT / "vendor/ggml-spec/cuda").glob("*.cu"))
    with tempfile.TemporaryDirectory() as folder:
        upstream = Path(folder) / "upstream"
        try:
            toolchain = find_toolchain(arguments.clang)
            targets = arguments.targets.split(",")
            controls = {target: make_controls(toolchain, target, Path(folder)) for target in targets}
        except ToolchainError as error:
            print(error, file=sys.stderr)
            return 2
        subprocess.check_call([sys.executable, str(ROOT / "vendor/prepare_upstream.py"), "sync", str(upstream)])
        print(f"{toolchain.clang}, headers in {toolchain.include}")
        flags = toolchain.flags(upstream)
        passed = [check_file(toolchain, flags, file, controls, each=arguments.kernels) for file in sources]
        return 0 if all(passed) else 1


if __name__ == "__main__":
    raise SystemExit(main())
