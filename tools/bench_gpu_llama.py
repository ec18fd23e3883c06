#!/usr/bin/env python3
"""This engine beside llama.cpp's llama-bench on the same file and GPU in the same run, and the bars it has to meet.

    python tools/bench_gpu_llama.py --target T.gguf --llama-bench FILE [--drafter D.gguf] [--rounds 2] [--json OUT.json]

Whole processes alternate, theirs first, as many times as there are rounds: where the rounds of one engine differ, the
machine drifted. Times are medians within a process, without the first calls; ratios are ours over theirs of each round,
then the mean. llama-bench computes the logits of a batch's last column only, this engine the best token of every column
and the commit of five: the ratios of widths above one are unfavourable to it by that.

FILE may be compressed (.xz). Rounds that would not end within --seconds are left out, the long context before others.
"""

from __future__ import annotations

import json
import lzma
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from gpu_bars import LONG_WIDTHS, WIDTHS, Numbers, Plan, Round, table_of

ROOT = Path(__file__).parents[1]
N_WARM = 3  # calls of llama-bench that record and warm up its graphs, after a warm-up of its own
N_CALLS, N_LONG_CALLS = 10, 6
N_PROMPTS = 6


def seconds_left(deadline: float) -> float:
    """Until then, at least one."""
    return max(deadline - time.monotonic(), 1.0)


def run(command: list[str], deadline: float) -> str:
    """Output of a program; what it wrote until then when it fails or is stopped, with the reason on stderr."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds_left(deadline))
    except subprocess.TimeoutExpired as stopped:
        print(f"stopped for lack of time: {' '.join(command)}", file=sys.stderr)
        out = stopped.stdout or b""
        return out.decode() if isinstance(out, bytes) else out
    if done.returncode:
        print(f"exit code {done.returncode}: {' '.join(command)}\n{done.stderr[-2000:]}", file=sys.stderr)
    return done.stdout


def llama_tests(program: Path, plan: Plan, options: str, deadline: float) -> list[dict[str, Any]]:
    """What llama-bench reports of each test: flash attention, everything on one GPU."""
    where = ["-ngl", "99", "-sm", "none", "-fa", "1", "-o", "jsonl"]
    if plan.device == "CPU":
        where += ["-dev", "none"]
    out = run([str(program), "-m", str(plan.target), *where, *options.split()], deadline)
    return [json.loads(line) for line in out.splitlines() if line.startswith("{") and line.endswith("}")]


def median_ms(test: dict[str, Any], n_warm: int) -> float:
    """Median time of a test's repetitions."""
    samples = test["samples_ns"]
    return statistics.median(samples[min(n_warm, len(samples) - 1) :]) / 1e6


def by_width(tests: list[dict[str, Any]]) -> dict[str, float]:
    """Time of one batch of so many tokens."""
    return {str(test["n_prompt"]): median_ms(test, N_WARM) for test in tests if not test["n_gen"]}


def measure_llama(program: Path, plan: Plan, deadline: float) -> Numbers:
    """llama-bench's numbers."""
    options = f"-p {plan.widths} -n {plan.plain} -d {plan.context} -r {N_WARM + N_CALLS}"
    tests = llama_tests(program, plan, options, deadline)
    plain = [median_ms(test, 1) / test["n_gen"] for test in tests if test["n_gen"]]
    found: Numbers = {"verify_ms": by_width(tests), "plain_ms": plain[0] if plain else None, "prefill_tok_s": None}
    if plan.prefill:
        tests = llama_tests(program, plan, f"-p {plan.prefill} -n 0 -d 0 -r {N_PROMPTS}", deadline)
        found["prefill_tok_s"] = plan.prefill / median_ms(tests[0], 1) * 1e3 if tests else None
    begin = time.monotonic()
    if plan.long:
        options = f"-p {plan.long_widths} -n 0 -d {plan.long} -r {N_WARM + N_LONG_CALLS}"
        found["long_ms"] = by_width(llama_tests(program, plan, options, deadline))
    return found | {"long_s": time.monotonic() - begin}


def measure_ours(plan: Plan, deadline: float) -> Numbers:
    """The same from tools/bench_gpu.py, with its whole report under "report"."""
    with tempfile.TemporaryDirectory() as folder:
        document = Path(folder) / "ours.json"
        n_ctx = max(plan.context, plan.prefill, plan.long) + 2048
        options = {
            "target": plan.target, "device": plan.device, "widths": plan.widths, "context": plan.context,
            "plain": plan.plain, "prefill": plan.prefill, "long": plan.long, "long-widths": plan.long_widths,
            "n-ctx": n_ctx, "json": document,
        } | ({"drafter": plan.drafter} if plan.drafter else {})  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        run([sys.executable, str(ROOT / "tools/bench_gpu.py"), *words], deadline)
        report = json.loads(document.read_text()) if document.exists() else {}
    walls = {name: {w: ms[0] for w, ms in report.get(name, {}).items()} for name in ("verify_ms", "long_ms")}
    single = {name: report.get(name) for name in ("plain_ms", "prefill_tok_s")}
    single |= {name: (report.get(name) or [None])[0] for name in ("draft_ms", "long_draft_ms")}
    return walls | single | {"long_s": report.get("long_s", 0.0), "report": report}


def measure_rounds(program: Path | None, plan: Plan, n_rounds: int, deadline: float) -> list[Round]:
    """Both engines in turn, as often as time allows."""
    rounds: list[Round] = []
    needed = needed_long = 0.0
    for n in range(n_rounds):
        if seconds_left(deadline) < needed - needed_long:
            print(f"no time for round {n + 1}", file=sys.stderr)
            break
        chosen = plan if seconds_left(deadline) >= needed else plan.without_long()
        begin = time.monotonic()
        theirs: Numbers = measure_llama(program, chosen, deadline) if program else {}
        ours = measure_ours(chosen, deadline)
        needed = (time.monotonic() - begin) * 1.1
        needed_long = theirs.get("long_s", 0.0) + ours["long_s"]
        rounds.append({"theirs": theirs, "ours": ours})
        print(f"round {n + 1} took {needed / 1.1:.0f} s, {needed_long:.0f} s of it the long context", file=sys.stderr)
    return rounds


def unpacked(program: Path, folder: Path) -> Path:
    """The program, decompressed and executable."""
    if program.suffix != ".xz":
        return program
    path = folder / program.stem
    path.write_bytes(lzma.decompress(program.read_bytes()))
    path.chmod(0o755)
    return path


@click.command()
@click.option("--target", type=click.Path(exists=True, path_type=Path), required=True)
@click.option("--drafter", type=click.Path(exists=True, path_type=Path), help="Loaded beside ours; features captured.")
@click.option("--llama-bench", "program", type=click.Path(exists=True, path_type=Path), help="None: ours alone.")
@click.option("--device", default="auto", show_default=True)
@click.option("--rounds", default=2, show_default=True)
@click.option("--widths", default=WIDTHS, show_default=True)
@click.option("--context", default=2048, show_default=True)
@click.option("--plain", default=32, show_default=True, help="Tokens of plain decoding; 0 = none.")
@click.option("--prefill", default=4096, show_default=True, help="Tokens of the timed prompt; 0 = none.")
@click.option("--long", default=32768, show_default=True, help="Tokens of the long context; 0 = none.")
@click.option("--long-widths", default=LONG_WIDTHS, show_default=True)
@click.option("--seconds", default=500.0, show_default=True)
@click.option("--json", "document", type=click.Path(path_type=Path))
def main(program: Path | None, rounds: int, seconds: float, document: Path | None, **given: Any) -> None:
    """Measure, print the table, write the document."""
    plan = Plan(**given)
    with tempfile.TemporaryDirectory() as folder:
        path = None if program is None else unpacked(program, Path(folder))
        found = measure_rounds(path, plan, rounds, time.monotonic() + seconds)
    rows = table_of(plan)
    print(f"{plan.target.name} behind {plan.context} tokens (long: {plan.long}), drafter: {plan.drafter is not None}")
    print(f"{'':16} | {'llama.cpp by round':>19} | {'ours by round':>19} | {'ratio':>9}")
    print("\n".join(row.text(found) for row in rows))
    if document is not None:
        bars = {row.title: row.verdict(found) for row in rows if row.bar is not None}
        document.write_text(json.dumps({"plan": vars(plan), "rounds": found, "bars": bars}, default=str))


if __name__ == "__main__":
    main()
