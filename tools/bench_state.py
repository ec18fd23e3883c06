#!/usr/bin/env python3
"""What a session's state costs: factor banks beside a state per node, snapshots, reused prefixes, exact mode.

    python tools/bench_state.py [--repeats 5] [--threads 1]

Runs with and without exact mode, and with and without a cached prefix, take turns in one process; figures are medians.
The 27 B shape is measured on its recurrent state alone. People read the tables; the last line is one JSON document.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

from pyggml_spec import Engine, assets
from pyggml_spec.cli import main as command_line
from pyggml_spec.ggml import Backend
from pyggml_spec.ggml.backend import choose_device
from pyggml_spec.records import TargetConfig
from pyggml_spec.state.recurrent import RecurrentState

ROOT = Path(__file__).parents[1]
PROMPTS = (ROOT / "tests" / "e2e" / "prompts.txt").read_text()


def shape_27b(config: TargetConfig) -> TargetConfig:
    """The recurrent sizes of a Qwen3.5 with 27 B parameters: 64 layers, 48 of them recurrent."""
    layers = tuple(i % 4 != 3 for i in range(64))
    return replace(config, n_layers=64, recurrent_layers=layers, state_size=128, n_heads_k=16, n_heads_v=48)


def milliseconds(call: Callable[[], Any], repeats: int) -> float:
    """Median time of a call."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[1:])


def memory(state: RecurrentState, repeats: int) -> dict[str, float]:
    """MiB of banks, of a state per node instead, and of one snapshot; ms to copy one out and in."""
    copy = state.copy_slot(0)
    return {
        "banks_mib": state.bank_bytes / 2**20,
        "dense_mib": state.dense_bytes / 2**20,
        "ratio": state.dense_bytes / state.bank_bytes,
        "snapshot_mib": state.state_bytes / 2**20,
        "copy_out_first_ms": milliseconds(lambda: state.copy_slot(0), repeats),
        "copy_out_ms": milliseconds(lambda: state.recycle(state.copy_slot(0)), repeats),
        "copy_in_ms": milliseconds(lambda: state.write_slot(0, copy), repeats),
    }


def snapshots(engine: Engine, repeats: int) -> dict[str, float]:
    """ms of a snapshot with rows pending, and of a restore, behind 700 tokens; of a request with a cached prefix."""
    prompt = engine.tokenizer.encode(PROMPTS)[:700]
    session = engine.open_session()
    taken, restored = [], []
    for _ in range(repeats):
        for _ in session.generate(prompt if not session.tokens else [], max_tokens=2):
            pass
        begin = time.perf_counter()
        snapshot = session.snapshot()
        between = time.perf_counter()
        session.restore(snapshot)
        restored.append((time.perf_counter() - between) * 1e3)
        taken.append((between - begin) * 1e3)
        snapshot.release()
    session.close()

    def first_token() -> None:
        engine.generate(prompt, max_tokens=1)

    def from_nothing() -> None:
        engine.prefixes.clear()
        first_token()

    return {
        "snapshot_ms": statistics.median(taken),
        "restore_ms": statistics.median(restored),
        "first_token_ms": milliseconds(from_nothing, repeats),
        "first_token_cached_ms": milliseconds(first_token, repeats),
    }


def exact_cost(target: Path, repeats: int, n_threads: int) -> dict[str, float]:
    """Rate of exact mode over the default's: decoding without and with drafts, reading a prompt."""
    prompts = PROMPTS.split("\n---\n")[:4]
    rates: dict[tuple[bool, str], list[float]] = {}
    options = {"n_threads": n_threads, "n_ctx": 1024, "prefix_cache_mib": 0}
    drafter = assets.embedded_drafter_path()
    with Engine.load(target, drafter, **options) as usual, Engine.load(target, drafter, exact=True, **options) as exact:
        for _ in range(repeats):
            for engine, is_exact in ((usual, False), (exact, True)):
                for spec in ("off", "chain", "tree"):
                    done = [engine.generate(p, max_tokens=48, ignore_eos=True, spec=spec).stats for p in prompts]
                    rates.setdefault((is_exact, spec), []).append(statistics.fmean(s["decode_tok_s"] for s in done))
                read = engine.generate(PROMPTS[:2500], max_tokens=1).stats["prefill_tok_s"]
                rates.setdefault((is_exact, "prompt"), []).append(read)
    names = ("off", "chain", "tree", "prompt")
    return {name: statistics.median(map(float.__truediv__, rates[True, name], rates[False, name])) for name in names}


@click.command()
@click.option("--repeats", default=5, show_default=True)
@click.option("--threads", default=1, show_default=True)
def main(repeats: int, threads: int) -> None:
    """Print the tables."""
    with Engine.load(n_threads=threads, n_ctx=1024) as engine:
        report: dict[str, dict[str, float]] = {"memory, embedded": memory(engine.target.state.recurrent, repeats)}
        with Backend(choose_device("cpu"), threads) as backend:
            n_rows = engine.target.state.recurrent.n_rows
            state = RecurrentState(backend, shape_27b(engine.target.config), n_slots=1, n_rows=n_rows)
            report["memory, 27 B shape"] = memory(state, repeats)
            state.close()
        report["snapshots, embedded"] = snapshots(engine, repeats)
    report["exact / default, q8_0"] = exact_cost(assets.embedded_target_path(), repeats, threads)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "q3_k.gguf"
        source = str(ROOT / "tests" / "data" / "minnow-f16.gguf")
        CliRunner().invoke(command_line, ["quantize", source, str(file), "q3_k"], catch_exceptions=False)
        report["exact / default, q3_k"] = exact_cost(file, repeats, threads)
    for title, rows in report.items():
        click.echo(f"{title:24}" + "  ".join(f"{name} {value:.2f}" for name, value in rows.items()))
    click.echo(json.dumps(report))


if __name__ == "__main__":
    main()
