#!/usr/bin/env python3
"""Time of the target's calls by width on one device, the host's share of them, prefill, drafts and decode rates.

    python tools/bench_gpu.py [--target T.gguf --drafter D.gguf] [--device CUDA0] [--context 2048] [--generate 128]

A verify is timed as a round has it: input upload, the fold of the rows accepted last (at most five), result download.
Medians; the first calls of a width, which build, record and warm up, are left out. The host's share is what remains of
a call when the time inside the backend is taken off. The last line is one JSON document.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np

from pyggml_spec import Engine, assets
from pyggml_spec.decode.session import Session
from pyggml_spec.tree.draft_tree import DraftTree

ROOT = Path(__file__).parents[1]
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 22, 24, 32)
N_WARM = 4  # calls: run, record, replay, and one more
N_ACCEPTED = 5


class BackendClock:
    """Adds up the time inside a backend's compute calls."""

    def __init__(self, engine: Engine) -> None:
        self.seconds = 0.0
        self._compute = engine.target.backend.compute
        engine.target.backend.compute = self._timed  # type: ignore[method-assign]

    def _timed(self, graph: Any) -> None:
        begin = time.perf_counter()
        self._compute(graph)
        self.seconds += time.perf_counter() - begin


@contextmanager
def session_after(engine: Engine, n_tokens: int) -> Iterator[Session]:
    """A session with a context of so many tokens."""
    session = engine.open_session()
    rng = np.random.default_rng(1)
    session.target.prefill(rng.integers(300, engine.target.config.n_vocab - 300, n_tokens).tolist())
    if session.drafter is not None:
        session.drafter.catch_up()
    yield session
    session.close()


def timed_ms(call: Callable[[], Any], n_runs: int, clock: BackendClock) -> tuple[float, float]:
    """Medians of a call's wall time and of what remains outside the backend."""
    walls, hosts = [], []
    for _ in range(N_WARM + n_runs):
        clock.seconds = 0.0
        begin = time.perf_counter()
        call()
        walls.append(time.perf_counter() - begin)
        hosts.append(walls[-1] - clock.seconds)
    return statistics.median(walls[N_WARM:]) * 1e3, statistics.median(hosts[N_WARM:]) * 1e3


def verify_ms(session: Session, width: int, n_runs: int, clock: BackendClock) -> tuple[float, float]:
    """Wall and host time of verifying a chain of `width` nodes and accepting some of it."""
    target = session.target
    tree = DraftTree.chain(5, np.arange(300, 300 + width - 1))
    path = range(min(width, N_ACCEPTED))

    def round_() -> None:
        target.verify(tree)
        target.accept(path)

    return timed_ms(round_, n_runs, clock)


def draft_ms(session: Session, n_runs: int, clock: BackendClock) -> tuple[float, float] | None:
    """Wall and host time of one draft block."""
    drafter = session.drafter
    if drafter is None:
        return None
    return timed_ms(lambda: drafter.draft(5, n_draft=drafter.draft_horizon, top_k=4), n_runs, clock)


def prefill_rate(engine: Engine, n_tokens: int) -> float:
    """Tokens per second, the better of two after a first that does not count."""
    rates = []
    for _ in range(3):
        begin = time.perf_counter()
        with session_after(engine, n_tokens):
            rates.append(n_tokens / (time.perf_counter() - begin))
    return max(rates[1:])


def generation(engine: Engine, spec: str, n_tokens: int, n_repeats: int = 3) -> dict[str, Any]:
    """Decode rate over some of the tests' prompts, the median of the repeats after one that does not count."""
    prompts = (ROOT / "tests/e2e/prompts.txt").read_text().split("\n---\n")[::8]
    rates, stats = [], {}
    for _ in range(n_repeats + 1):
        n_done, ms = 0, 0.0
        for prompt in prompts:
            stats = engine.generate(prompt, max_tokens=n_tokens, ignore_eos=True, spec=spec).stats
            n_done += stats["committed"]
            ms += stats["draft_ms"] + stats["verify_ms"] + stats["host_ms"]
        rates.append(n_done / ms * 1e3)
    per_round = {name: stats[name] / stats["rounds"] for name in ("draft_ms", "verify_ms", "host_ms")}
    return {"tok_s": statistics.median(rates[1:]), "acceptance_length": stats["acceptance_length"], **per_round}


def commit() -> str:
    """What was measured."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def print_report(report: dict[str, Any]) -> None:
    """Tables for people, then the document."""
    print(f"{report['model']} on {report['device']}, {report['context']} tokens of context")
    print("width      " + "".join(f"{width:>8}" for width in report["verify_ms"]))
    print("verify ms  " + "".join(f"{wall:8.3f}" for wall, _ in report["verify_ms"].values()))
    print("host ms    " + "".join(f"{host:8.3f}" for _, host in report["verify_ms"].values()))
    for name in ("draft_ms", "prefill_tok_s"):
        print(f"{name}: {report[name]}")
    for spec, numbers in report["generation"].items():
        print(spec, {name: round(value, 3) for name, value in numbers.items()})
    print("memory MB:", {name: round(n / 1e6, 1) for name, n in report["memory"].items()})
    print(json.dumps(report))


@click.command()
@click.option("--target", type=click.Path(exists=True, path_type=Path))
@click.option("--drafter", type=click.Path(exists=True, path_type=Path))
@click.option("--device", default="auto", show_default=True)
@click.option("--kv-type", default="f16", show_default=True)
@click.option("--exact", is_flag=True)
@click.option("--context", default=2048, show_default=True, help="Tokens before the timed calls.")
@click.option("--n-ctx", default=8192, show_default=True)
@click.option("--widths", default=",".join(map(str, WIDTHS)), show_default=True)
@click.option("--runs", default=20, show_default=True, help="Timed calls a width.")
@click.option("--prefill", default=4096, show_default=True, help="Tokens of the timed prompt; 0 = none.")
@click.option("--generate", default=0, show_default=True, help="Tokens a prompt, for decode rates; 0 = none.")
def main(
    target: Path | None,
    drafter: Path | None,
    device: str,
    kv_type: str,
    exact: bool,
    context: int,
    n_ctx: int,
    widths: str,
    runs: int,
    prefill: int,
    generate: int,
) -> None:
    """Measure and print."""
    if target is None:
        target, drafter = assets.embedded_target_path(), assets.embedded_drafter_path()
    options = {"device": device, "kv_type_k": kv_type, "kv_type_v": kv_type, "exact": exact, "n_ctx": n_ctx}
    begin = time.perf_counter()
    with Engine.load(target, drafter, **options) as engine:
        load_s = time.perf_counter() - begin
        clock, described = BackendClock(engine), engine.describe()
        report: dict[str, Any] = {
            "commit": commit(),
            "model": target.name,
            "drafter": drafter.name if drafter else None,
            "device": described["device"],
            "exact": exact,
            "context": context,
            "load_s": round(load_s, 1),
            "memory": described["memory"],
            "prefill_tok_s": round(prefill_rate(engine, prefill), 1) if prefill else None,
        }
        with session_after(engine, context) as session:
            report["verify_ms"] = {w: verify_ms(session, w, runs, clock) for w in map(int, widths.split(","))}
            report["draft_ms"] = draft_ms(session, runs, clock)
        specs = ("off", "chain", "tree") if drafter else ("off",)
        report["generation"] = {spec: generation(engine, spec, generate) for spec in specs} if generate else {}
    print_report(report)


if __name__ == "__main__":
    sys.exit(main())
