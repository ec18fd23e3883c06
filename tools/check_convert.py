"""Convert a family of checkpoints and compare with reference files: `python tools/check_convert.py MODELS`.

MODELS holds `minnow/` and `minnow-{dflash,dspark,dflash2}/` in Hugging Face layout, and the GGUF files that
llama.cpp's converter and quantiser made of them. Prints one line a file; exits with 1 when any differs.
The tests do the same with what the repository carries (the target's checkpoint is derived there, not the original).
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from pyggml_spec.convert import plan_conversion, plan_requantisation
from pyggml_spec.gguf_io import open_gguf

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from reference.compare import differences

CONVERSIONS = (
    ("minnow", "f16", "minnow-f16.gguf"),
    ("minnow", "q8_0", "minnow-q8_0.gguf"),
    ("minnow-dflash", "q8_0", "minnow-dflash-q8_0.gguf"),
    ("minnow-dspark", "q8_0", "minnow-dspark-q8_0.gguf"),
    ("minnow-dflash2", "q8_0", "minnow-dflash2-q8_0.gguf"),
)
REQUANTISATIONS = (("minnow-f16.gguf", "q8_0", "minnow-q8_0.gguf"), ("minnow-f16.gguf", "q4_k_m", "minnow-q4_k_m.gguf"))


def report(what: str, seconds: float, found: set[str]) -> bool:
    """Print a line; True when nothing differs."""
    verdict = "equal" if not found else f"{len(found)} differ: {', '.join(sorted(found)[:5])}"
    print(f"{what:48} {seconds:6.2f} s  {verdict}")
    return not found


def check(models: Path, out: Path) -> bool:
    """Convert and requantise everything; True when every file equals its reference."""
    results = []
    for name, outtype, reference in CONVERSIONS:
        start = time.perf_counter()
        target = None if name == "minnow" else models / "minnow"
        plan_conversion(models / name, outtype=outtype, target_path=target).write(out)
        seconds = time.perf_counter() - start
        results.append(report(f"convert {name} {outtype}", seconds, differences(out, models / reference)))
    for source, recipe, reference in REQUANTISATIONS:
        start = time.perf_counter()
        with open_gguf(models / source) as file:
            plan_requantisation(file, recipe).write(out)
        seconds = time.perf_counter() - start
        results.append(report(f"quantize {source} {recipe}", seconds, differences(out, models / reference)))
    return all(results)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        sys.exit(0 if check(Path(sys.argv[1]), Path(directory) / "out.gguf") else 1)
