#!/usr/bin/env python3
"""One verify of a target between the profiler's start and stop, and a table of what a profiler saw.

    ncu --profile-from-start off --csv --page raw --log-file P.csv \\
        --metrics gpu__time_duration.sum,dram__bytes.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed \\
        python tools/profile_gpu.py --target T.gguf --width 16
    python tools/profile_gpu.py --summarise P.csv

Kernels are launched one by one here (no recorded graph), so gaps between them are not part of the times.
"""

from __future__ import annotations

import csv
import ctypes
import os
import re
from collections import defaultdict
from pathlib import Path

import click

N_WARM = 2
MICROSECONDS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "nsecond": 1e-3, "usecond": 1.0, "msecond": 1e3}
MEGABYTES = {"byte": 1e-6, "Kbyte": 1e-3, "Mbyte": 1.0, "Gbyte": 1e3}


def run(target: Path, width: int, context: int, prefill: int) -> None:
    """Warm up, then with the profiler on: one verify and one accept, or so many tokens of prefill."""
    os.environ["GGML_CUDA_DISABLE_GRAPHS"] = "1"  # read by ggml at load
    import numpy as np

    from pyggml_spec import Engine
    from pyggml_spec.tree.draft_tree import DraftTree

    driver = ctypes.CDLL("libcuda.so.1")
    tree = DraftTree.chain(5, np.arange(300, 300 + width - 1))
    with Engine.load(target, n_ctx=max(8192, context + prefill + 1024)) as engine:
        session = engine.open_session()
        session.target.prefill(list(range(300, 300 + context)))
        for i in range(N_WARM + 1):
            if i == N_WARM:
                driver.cuProfilerStart()
            if prefill:
                session.target.prefill(list(range(300, 300 + prefill)))
            else:
                session.target.verify(tree)
                session.target.accept(range(min(width, 5)))
        driver.cuProfilerStop()
        session.close()


def short_name(kernel: str) -> str:
    """A kernel's name without its arguments."""
    return re.sub(r"\(.*", "", kernel.replace("(anonymous namespace)::", "").replace("void ", ""))[:70]


def summarise(path: Path) -> None:
    """Kernels by total time: launches, microseconds, share of the time, megabytes, share of the memory's bandwidth."""
    rows = [line for line in path.read_text(errors="replace").splitlines() if line.startswith('"')]
    reader = csv.DictReader(rows)
    units = next(reader)
    time_key, bytes_key = "gpu__time_duration.sum", "dram__bytes.sum"
    share_key = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    for row in reader:
        entry = totals[short_name(row["Kernel Name"])]
        entry[0] += 1
        us = float(row[time_key].replace(",", "")) * MICROSECONDS[units[time_key]]
        entry[1] += us
        entry[2] += float(row[bytes_key].replace(",", "")) * MEGABYTES[units[bytes_key]]
        entry[3] += us * float(row[share_key].replace(",", "")) / 100
    all_us = sum(entry[1] for entry in totals.values())
    print(f"{'kernel':70} {'n':>5} {'us':>9} {'share':>6} {'MB':>8} {'GB/s':>7} {'of peak':>7}")
    for name, (n, us, megabytes, busy_us) in sorted(totals.items(), key=lambda item: -item[1][1]):
        rates = f"{megabytes / us * 1e3:7.0f} {busy_us / us:7.1%}"
        print(f"{name:70} {n:5.0f} {us:9.1f} {us / all_us:6.1%} {megabytes:8.1f} {rates}")
    busy = sum(entry[3] for entry in totals.values()) / all_us
    print(f"{'all':70} {sum(entry[0] for entry in totals.values()):5.0f} {all_us:9.1f} {'':23} {busy:7.1%}")


@click.command()
@click.option("--target", type=click.Path(exists=True, path_type=Path))
@click.option("--width", default=1, show_default=True)
@click.option("--context", default=2048, show_default=True)
@click.option("--prefill", default=0, help="Profile so many tokens of prefill instead of a verify.")
@click.option("--summarise", "table", type=click.Path(exists=True, path_type=Path))
def main(target: Path | None, width: int, context: int, prefill: int, table: Path | None) -> None:
    """Run under a profiler, or read what it wrote."""
    if table is not None:
        summarise(table)
    elif target is not None:
        run(target, width, context, prefill)


if __name__ == "__main__":
    main()
