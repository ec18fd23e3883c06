#!/usr/bin/env python3
"""Time of the target's calls by width on one device, the host's share of them, prefill, drafts and decode rates.

    python tools/bench_gpu.py [--target T.gguf --drafter D.gguf] [--device CUDA0] [--context 2048] [--generate 128]

A verify is timed as a round has it: input upload, the fold of the rows accepted last (at most five), result download.
Every width begins behind the same context. Medians; the first calls of a width, which build, record and warm up, are
left out. The host's share is what remains of a call when the time inside the backend is taken off. The last line is one
JSON document, or --json takes it. tools/bench_gpu_llama.py puts the same numbers of llama.cpp beside these.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
from bench_cpu import choose_prompts, commit

from pyggml_spec import Engine, assets
from pyggml_spec.decode.session import Session
from pyggml_spec.tree.draft_tree import DraftTree

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 22, 24, 32)
LONG_WIDTHS = (1, 8, 16, 22)  # that are timed behind the long context too
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


def verify_table(
    session: Session, widths: Sequence[int], n_runs: int, clock: BackendClock
) -> dict[int, tuple[float, float]]:
    """Wall and host time by width, each from the context that the session has now."""
    target, table = session.target, {}
    context = target.snapshot()
    for width in widths:
        target.restore(context)
        table[width] = verify_ms(session, width, n_runs, clock)
    target.restore(context)
    context.release()
    return table


def plain_ms(session: Session, n_tokens: int, n_repeats: int = 6) -> float:
    """Wall time a token of decoding so many one after the other; the first repeat does not count."""
    target, times = session.target, []
    context = target.snapshot()
    for _ in range(n_repeats):
        target.restore(context)
        token_id = 5
        begin = time.perf_counter()
        for _ in range(n_tokens):
            token_id = int(target.verify(DraftTree.root(token_id)).argmax_ids[0])
            target.accept([0])
        times.append((time.perf_counter() - begin) / n_tokens)
    context.release()
    return statistics.median(times[1:]) * 1e3


def draft_ms(session: Session, n_runs: int, clock: BackendClock) -> tuple[float, float] | None:
    """Wall and host time of one draft block."""
    drafter = session.drafter
    if drafter is None:
        return None
    return timed_ms(lambda: drafter.draft(5, n_draft=drafter.draft_horizon, top_k=4), n_runs, clock)


def prefill_rate(engine: Engine, n_tokens: int, n_repeats: int = 6) -> float:
    """Median tokens per second; the first repeat does not count."""
    rates = []
    for _ in range(n_repeats):
        begin = time.perf_counter()
        with session_after(engine, n_tokens):
            rates.append(n_tokens / (time.perf_counter() - begin))
    return statistics.median(rates[1:])


def generation(engine: Engine, spec: str, n_tokens: int, n_repeats: int = 3) -> dict[str, Any]:
    """Decode rate over some of the tests' prompts, the median of the repeats after one that does not count."""
    prompts = choose_prompts(5)
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


def print_report(report: dict[str, Any]) -> None:
    """Tables for people."""
    print(f"{report['model']} on {report['device']}, {report['context']} tokens of context")
    print_table(report["verify_ms"])
    if report["long_ms"]:
        print(f"behind {report['long']} tokens (prefill and all: {report['long_s']} s)")
        print_table(report["long_ms"])
    for name in ("plain_ms", "draft_ms", "long_draft_ms", "prefill_tok_s", "load_s"):
        print(f"{name}: {report[name]}")
    for spec, numbers in report["generation"].items():
        print(spec, {name: round(value, 3) for name, value in numbers.items()})
    print("memory MB:", {name: round(n / 1e6, 1) for name, n in report["memory"].items()})


def print_table(table: dict[int, tuple[float, float]]) -> None:
    """Wall and host time by width."""
    print("width      " + "".join(f"{width:>8}" for width in table))
    print("verify ms  " + "".join(f"{wall:8.3f}" for wall, _ in table.values()))
    print("host ms    " + "".join(f"{host:8.3f}" for _, host in table.values()))


def integers(text: str) -> tuple[int, ...]:
    """Numbers separated by commas."""
    return tuple(int(part) for part in text.split(","))


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
@click.option("--plain", default=32, show_default=True, help="Tokens decoded one after the other; 0 = none.")
@click.option("--prefill", default=4096, show_default=True, help="Tokens of the timed prompt; 0 = none.")
@click.option("--long", "long", default=0, show_default=True, help="Tokens of a second, long context; 0 = none.")
@click.option("--long-widths", default=",".join(map(str, LONG_WIDTHS)), show_default=True)
@click.option("--generate", default=0, show_default=True, help="Tokens a prompt, for decode rates; 0 = none.")
@click.option("--json", "document", type=click.Path(path_type=Path), help="File for the JSON document.")
def main(target: Path | None, drafter: Path | None, document: Path | None, **given: Any) -> None:
    """Measure and print."""
    if target is None:
        target, drafter = assets.embedded_target_path(), assets.embedded_drafter_path()
    caches = dict.fromkeys(("kv_type_k", "kv_type_v"), given["kv_type"])
    options = {name: given[name] for name in ("device", "exact", "n_ctx")} | caches
    begin = time.perf_counter()
    with Engine.load(target, drafter, **options) as engine:
        load_s = round(time.perf_counter() - begin, 1)
        report = {"commit": commit(), "model": target.name, "drafter": drafter.name if drafter else None}
        report |= {"load_s": load_s, **measure(engine, given)}
    print_report(report)
    if document is None:
        print(json.dumps(report))
    else:
        document.write_text(json.dumps(report))


def measure(engine: Engine, given: dict[str, Any]) -> dict[str, Any]:
    """Everything that was asked for."""
    clock, described, runs = BackendClock(engine), engine.describe(), given["runs"]
    report: dict[str, Any] = {name: described[name] for name in ("device", "memory")}
    report |= {name: given[name] for name in ("exact", "context", "long")}
    report["prefill_tok_s"] = round(prefill_rate(engine, given["prefill"]), 1) if given["prefill"] else None
    with session_after(engine, given["context"]) as session:
        report["draft_ms"] = draft_ms(session, runs, clock)
        report["verify_ms"] = verify_table(session, integers(given["widths"]), runs, clock)
        report["plain_ms"] = plain_ms(session, given["plain"]) if given["plain"] else None
    begin = time.perf_counter()
    report |= {"long_ms": {}, "long_draft_ms": None}
    if given["long"]:
        with session_after(engine, given["long"]) as session:
            report["long_draft_ms"] = draft_ms(session, runs, clock)
            report["long_ms"] = verify_table(session, integers(given["long_widths"]), runs, clock)
    report["long_s"] = round(time.perf_counter() - begin, 1)
    specs = ("off", "chain", "tree") if engine.drafter is not None else ("off",)
    n_tokens = given["generate"]
    report["generation"] = {spec: generation(engine, spec, n_tokens) for spec in specs} if n_tokens else {}
    return report


if __name__ == "__main__":
    main()
