#!/usr/bin/env python3
"""Decoding speed on a CPU: this engine plain and with each drafter, beside llama.cpp on the same files and threads.

    python tools/bench_cpu.py [--drafter D.gguf ...] [--repeats 5] [--tokens 128] [--threads 2] [--no-llama-cpp]

Every contender lives in a process of its own, which sleeps while the others run: thread pools of two engines in one
process wait for each other's polling. Every repeat runs all of them once, in turn, on the same prompts; the figures are
medians over the repeats, the ratios medians of the repeats' own ratios. Prompt reading, loading and a first (warm-up)
repeat are excluded. llama.cpp comes from the package xllamacpp. The last line is one JSON document. The parts of a
round are measured by `tools/bench_verify.py`.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from reference.llama_cpp import LlamaCpp  # noqa: E402

from pyggml_spec import Engine, assets  # noqa: E402
from pyggml_spec.gguf_io.drafter import read_drafter_config  # noqa: E402
from pyggml_spec.gguf_io.reader import open_gguf  # noqa: E402

N_CTX = 1024
# How llama.cpp is told to run a drafter of each kind; it knows DFlash2 by the selector in the file.
LLAMA_CPP_TYPES = {"dflash": "DRAFT_DFLASH", "dspark": "DRAFT_DSPARK", "dflash2": "DRAFT_DFLASH"}


@dataclass(frozen=True)
class Contender:
    """One engine with its files and mode; `spec` None is llama.cpp, with its own draft of the drafter's kind."""

    name: str
    target: Path
    drafter: Path | None
    kind: str | None
    spec: str | None
    n_threads: int
    draft_max: int | None = None  # of llama.cpp; None = its default


def serve(contender: Contender, prompts: list[str], n_tokens: int, pipe: Connection) -> None:
    """A contender's process: load, then one run over the prompts for every message; answers with its figures."""
    run = _ours(contender, n_tokens) if contender.spec else _llama_cpp(contender, n_tokens)
    with Engine.load(contender.target, n_ctx=64, n_threads=1) as engine:
        token_ids = [engine.tokenizer.encode(text) for text in prompts]
    pipe.send("ready")
    while pipe.recv() == "run":
        cpu = time.process_time()
        n_done, seconds, n_rounds = run(token_ids)
        pipe.send({
            "tok_s": n_done / seconds,
            "tok_cpu_s": n_done / (time.process_time() - cpu),
            "acceptance_length": n_done / n_rounds if n_rounds else None,
        })  # fmt: skip


Run = Callable[[list[list[int]]], tuple[int, float, int]]


def _ours(contender: Contender, n_tokens: int) -> Run:
    engine = Engine.load(contender.target, contender.drafter, n_threads=contender.n_threads, n_ctx=N_CTX)

    def run(prompts: list[list[int]]) -> tuple[int, float, int]:
        n_done, ms, n_rounds = 0, 0.0, 0
        for prompt in prompts:
            stats = engine.generate(prompt, max_tokens=n_tokens, ignore_eos=True, spec=contender.spec).stats
            n_done += stats["committed"]
            n_rounds += stats["rounds"]
            ms += stats["draft_ms"] + stats["verify_ms"] + stats["host_ms"]
        return n_done, ms / 1e3, n_rounds

    return run


def _llama_cpp(contender: Contender, n_tokens: int) -> Run:
    options = {"n_threads": contender.n_threads, "n_ctx": N_CTX, "kv_type": "f16"}
    draft_type = LLAMA_CPP_TYPES[contender.kind] if contender.kind else ""
    drafting = {"draft_type": draft_type, "draft_max": contender.draft_max}
    llama = LlamaCpp(contender.target, contender.drafter, **drafting, **options)

    def run(prompts: list[list[int]]) -> tuple[int, float, int]:
        ms = sum(llama.generate(prompt, n_tokens, n_probs=0).ms_per_token * n_tokens for prompt in prompts)
        return n_tokens * len(prompts), ms / 1e3, 0

    return run


def measure(contenders: list[Contender], prompts: list[str], n_tokens: int, repeats: int) -> dict[str, list[Any]]:
    """Figures of every contender in every repeat; one more repeat first, which does not count."""
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for contender in contenders:
        pipes[contender.name], other_end = context.Pipe()
        arguments = (contender, prompts, n_tokens, other_end)
        context.Process(target=serve, args=arguments, daemon=True).start()
        other_end.close()  # so that a process that ends early is seen as the end of its pipe
        receive(contender.name, pipes[contender.name])
    figures: dict[str, list[Any]] = {name: [] for name in pipes}
    for repeat in range(repeats + 1):
        for name, pipe in pipes.items():
            pipe.send("run")
            answer = receive(name, pipe)
            if repeat:
                figures[name].append(answer)
    for pipe in pipes.values():
        pipe.send("stop")
    return figures


def receive(name: str, pipe: Connection) -> Any:
    """A process's answer; ClickException when it ended instead."""
    try:
        return pipe.recv()
    except EOFError:
        raise click.ClickException(f"the process of '{name}' ended; its error stands above") from None


def ratio(figures: dict[str, list[Any]], above: str, below: str, key: str) -> float:
    """Median of the repeats' ratios."""
    return statistics.median(a[key] / b[key] for a, b in zip(figures[above], figures[below], strict=True))


def choose_prompts(n: int) -> list[str]:
    """So many of the tests' prompts, spread evenly."""
    texts = (ROOT / "tests" / "e2e" / "prompts.txt").read_text().split("\n---\n")
    return texts[:: max(1, len(texts) // n)][:n]


def commit() -> str:
    """What was measured."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


@click.command()
@click.option("--target", type=click.Path(exists=True, path_type=Path), default=assets.embedded_target_path)
@click.option(
    "--drafter", "drafters", multiple=True, type=click.Path(exists=True, path_type=Path), help="Default: the embedded."
)
@click.option("--spec", "specs", multiple=True, default=("auto", "chain"), show_default=True, help="Modes of ours.")
@click.option("--repeats", default=5, show_default=True)
@click.option("--tokens", default=128, show_default=True, help="Tokens per prompt.")
@click.option("--threads", default=2, show_default=True)
@click.option("--prompts", "n_prompts", default=8, show_default=True, help="Prompts, of the 40 the tests use.")
@click.option("--llama-cpp/--no-llama-cpp", "with_llama", default=True, show_default=True)
@click.option("--llama-draft-max", type=int, help="Tokens a draft of llama.cpp. Default: its own, 3 in 2026.")
def main(
    target: Path,
    drafters: tuple[Path, ...],
    specs: tuple[str, ...],
    repeats: int,
    tokens: int,
    threads: int,
    n_prompts: int,
    with_llama: bool,
    llama_draft_max: int | None,
) -> None:
    """Print decode rates and their ratios."""
    prompts = choose_prompts(n_prompts)
    contenders = [Contender("plain", target, None, None, "off", threads)]
    if with_llama:
        contenders.append(Contender("llama.cpp plain", target, None, None, None, threads))
    kinds = []
    for drafter in drafters or (assets.embedded_drafter_path(),):
        kind = kind_of(drafter)
        kinds.append(kind)
        contenders += [Contender(f"{kind} {spec}", target, drafter, kind, spec, threads) for spec in specs]
        if with_llama:
            contenders.append(Contender(f"llama.cpp {kind}", target, drafter, kind, None, threads, llama_draft_max))
    figures = measure(contenders, prompts, tokens, repeats)
    pairs = [(name, "plain") for name in figures if name != "plain" and not name.startswith("llama.cpp")]
    if with_llama:
        pairs.append(("plain", "llama.cpp plain"))
        pairs += [(f"{kind} {spec}", "llama.cpp plain") for kind in kinds for spec in specs]
        pairs += [(f"{kind} {spec}", f"llama.cpp {other}") for kind in kinds for spec in specs for other in kinds]
    report = {
        "commit": commit(),
        "machine": f"{platform.machine()}, {threads} threads",
        "figures": figures,
        "ratios": {f"{a} / {b}": {k: ratio(figures, a, b, k) for k in ("tok_s", "tok_cpu_s")} for a, b in pairs},
    }
    print_report(report)


def kind_of(drafter: Path) -> str:
    """dflash, dspark or dflash2."""
    with open_gguf(drafter) as file:
        return read_drafter_config(file).kind


def print_report(report: dict[str, Any]) -> None:
    """Tables for people, then the document."""
    click.echo(f"{'':18}{'tokens/s':>10}  {'(min .. max)':16}{'tokens/CPU s':>14}{'tokens a round':>16}")
    for name, rows in report["figures"].items():
        rates = [row["tok_s"] for row in rows]
        spread = f"({min(rates):.0f} .. {max(rates):.0f})"
        cpu = statistics.median(row["tok_cpu_s"] for row in rows)
        length = rows[-1]["acceptance_length"]
        last = f"{length:16.2f}" if length else ""
        click.echo(f"{name:18}{statistics.median(rates):10.0f}  {spread:16}{cpu:14.0f}{last}")
    for name, by_key in report["ratios"].items():
        click.echo(f"{name:36}{by_key['tok_s']:6.2f} x   (processor time: {by_key['tok_cpu_s']:.2f} x)")
    click.echo(json.dumps(report))


if __name__ == "__main__":
    main()
