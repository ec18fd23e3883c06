"""Which flavour is chosen for which machine, without loading any."""

from __future__ import annotations

import platform
from dataclasses import replace
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from pyggml_spec._native import flavours
from pyggml_spec._native.load import find_packaged_library, load_best
from pyggml_spec.errors import NativeLibraryError

V2 = "fpu sse ssse3 sse4_1 sse4_2 popcnt cx16"
V3 = V2 + " avx avx2 fma f16c bmi1 bmi2 movbe abm"
V4 = V3 + " avx512f avx512bw avx512cd avx512dq avx512vl"
VNNI = V4 + " avx512_vnni avx512vbmi"


@pytest.mark.parametrize(
    ("machine", "flags", "name"),
    [
        ("x86_64", V2, "x86_64_v2"),
        ("x86_64", V3, "x86_64_v3"),
        ("x86_64", V3.replace("fma ", ""), "x86_64_v2"),
        ("x86_64", V4, "x86_64_v4"),
        ("x86_64", V4 + " avx512_vnni", "x86_64_v4"),
        ("x86_64", VNNI, "x86_64_v4_vnni"),
        ("aarch64", "fp asimd", "aarch64"),
        ("aarch64", "fp asimd asimddp", "aarch64_dotprod"),
        ("x86_64", "fpu sse", None),
        ("riscv64", "", None),
    ],
)
def test_best_flavour(machine: str, flags: str, name: str | None) -> None:
    """The highest level whose features are all there."""
    best = flavours.default_flavour(machine, frozenset(flags.split()))

    assert (best.name if best else None) == name


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("processor\t: 0\nflags\t\t: sse avx2\n\nprocessor\t: 1\nflags\t\t: sse\n", {"sse", "avx2"}),
        ("processor\t: 0\nFeatures\t: fp asimd\n", {"fp", "asimd"}),
        ("nothing known\n", set()),
    ],
)
def test_flags_are_read_from_cpuinfo(tmp_path: Path, text: str, flags: set[str]) -> None:
    """x86 and ARM spell the line differently."""
    (tmp_path / "cpuinfo").write_text(text)

    assert flavours.cpu_flags(tmp_path / "cpuinfo") == flags
    assert flavours.cpu_flags(tmp_path / "missing") == frozenset()


def test_every_flavour_needs_what_its_options_enable() -> None:
    """The build enables an instruction set exactly where the choice checks for it."""
    flag_of = {"SSE42": "sse4_2", "AVX": "avx", "AVX2": "avx2", "FMA": "fma", "F16C": "f16c", "BMI2": "bmi2"}
    flag_of |= {"AVX512": "avx512f", "AVX512_VNNI": "avx512_vnni", "AVX512_VBMI": "avx512vbmi"}
    for flavour in flavours.platform_flavours("x86_64"):
        enabled = {option.removesuffix("=ON") for option in flavour.cmake_options}
        used = {flag for option, flag in flag_of.items() if option in enabled}
        assert used == flavour.cpu_flags & set(flag_of.values())
        assert enabled <= set(flag_of)


def test_statuses_name_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Present and usable, present and not usable, not present."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(flavours, "cpu_flags", lambda: frozenset(V3.split()))
    for name in ("x86_64_v3", "x86_64_v4"):
        (tmp_path / f"_ggml_{name}{EXTENSION_SUFFIXES[-1]}").touch()

    statuses = {status.name: status.why_not for status in flavours.list_flavours([str(tmp_path)])}

    assert list(statuses) == ["x86_64_v4_vnni", "x86_64_v4", "x86_64_v3", "x86_64_v2"]
    assert statuses["x86_64_v3"] is None
    assert statuses["x86_64_v2"] == "is not part of this install"
    assert "avx512bw, avx512cd, avx512dq, avx512f, avx512vl" in (statuses["x86_64_v4"] or "")


def put_flavours(folder: Path, *names: str) -> None:
    """Empty files where the extensions of these flavours would be."""
    for name in names:
        (folder / f"_ggml_{name}{EXTENSION_SUFFIXES[-1]}").touch()


def test_cuda_flavour_needs_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listed first where it is present; without a driver it is passed over with the reason kept."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(flavours, "cpu_flags", lambda: frozenset(V3.split()))
    cuda = next(f for f in flavours.GPU_FLAVOURS if f.machine == "x86_64")
    broken = replace(cuda, driver="libno-such-driver.so.1")
    monkeypatch.setattr(flavours, "GPU_FLAVOURS", (broken,))
    put_flavours(tmp_path, "cuda", "x86_64_v3")

    first = flavours.list_flavours([str(tmp_path)])[0]
    monkeypatch.setattr("pyggml_spec._native.load.load_flavour", lambda name: name)
    loaded, skipped = load_best([str(tmp_path)])

    assert first.name == "cuda" and "needs the GPU's driver, which is not installed here" in (first.why_not or "")
    assert (loaded, list(skipped)) == ("x86_64_v3", ["cuda"])
    assert "libno-such-driver.so.1" in skipped["cuda"]


def test_missing_run_time_library_is_passed_over_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An extension that cannot be loaded leaves its reason and the next best flavour serves."""
    names = [f.name for f in flavours.platform_flavours(platform.machine())][-2:]
    put_flavours(tmp_path, *names)
    monkeypatch.setattr(flavours, "cpu_flags", lambda: flavours.platform_flavours(platform.machine())[0].cpu_flags)

    def load(name: str) -> str:
        if name == names[0]:
            raise ImportError("libcublas.so.13: cannot open shared object file: No such file or directory")
        return name

    monkeypatch.setattr("pyggml_spec._native.load.load_flavour", load)

    loaded, skipped = load_best([str(tmp_path)])

    assert loaded == names[1] and "libcublas.so.13" in skipped[names[0]]


def test_libraries_of_python_packages_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's packages keep them in nvidia/<part>/lib of a folder for packages."""
    library = tmp_path / "nvidia/cu13/lib/libcublas.so.13"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.syspath_prepend(tmp_path)

    assert find_packaged_library("libcublas.so.13") == library
    assert find_packaged_library("libcublas.so.12") is None


def test_nothing_to_load_is_one_sentence_with_reasons(tmp_path: Path) -> None:
    """A source tree without a build says so and how to build."""
    with pytest.raises(NativeLibraryError, match=r"is not part of this install.*pip install") as caught:
        load_best([str(tmp_path)])

    assert "\n" not in str(caught.value)


def test_damaged_extension_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is no extension does not hide the reason behind a traceback."""
    best = flavours.default_flavour(platform.machine(), flavours.cpu_flags())
    assert best is not None, "the tests run where the package builds"
    (tmp_path / f"{best.module_name}.abi3.so").write_bytes(b"not a library")
    monkeypatch.setattr("pyggml_spec._native.load.load_flavour", _import_error)

    with pytest.raises(NativeLibraryError, match=f"{best.name} invalid ELF header"):
        load_best([str(tmp_path)])


def _import_error(_: str) -> None:
    raise ImportError("invalid ELF header")
