#!/usr/bin/env python3
"""Decoding speed on a CPU: this engine plain and speculating, beside llama.cpp on the same files with the same threads.

    python tools/bench_cpu.py [--repeats 5] [--tokens 128] [--threads 2] [--no-llama-cpp]

Every repeat runs all contenders once, in turn, on the same prompts; the figures are medians over the repeats, the
ratios medians of the repeats' own ratios. Prompt reading, loading and the first (warm-up) repeat are excluded.
llama.cpp comes from the package xllamacpp. People read the tables; the last line is one JSON document.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from reference.llama_cpp import LlamaCpp  # noqa: E402

from pyggml_spec import Engine, assets  # noqa: E402
from pyggml_spec.tree.accept import accept_greedy  # noqa: E402
from pyggml_spec.tree.build import MarginalSource, build_draft_tree  # noqa: E402
from pyggml_spec.tree.draft_tree import DraftTree  # noqa: E402
from pyggml_spec.tree.schedule import encode_schedule, schedule_tree  # noqa: E402

WIDTHS = (1, 2, 4, 8, 12, 16, 22, 32)


def tokens_per_second(engine: Engine, spec: str, prompts: list[list[int]], n_tokens: int) -> tuple[float, dict]:
    """Decode rate over all prompts, and the statistics of the last one."""
    n_done, ms, stats = 0, 0.0, {}
    for prompt in prompts:
        stats = engine.generate(prompt, max_tokens=n_tokens, ignore_eos=True, spec=spec).stats
        n_done += stats["committed"]
        ms += stats["draft_ms"] + stats["verify_ms"] + stats["host_ms"]
    return n_done / ms * 1e3, stats


def host_ms_per_round(engine: Engine, spec: str, prompts: list[list[int]], n_tokens: int) -> float:
    """Median over the prompts of what Python adds to a round, graphs already built."""
    values = []
    for prompt in prompts:
        stats = engine.generate(prompt, max_tokens=n_tokens, ignore_eos=True, spec=spec).stats
        values.append(stats["host_ms"] / stats["rounds"])
    return statistics.median(values)


def llama_rate(llama: LlamaCpp, prompts: list[list[int]], n_tokens: int) -> float:
    """llama.cpp's own decode rate over all prompts."""
    times = [llama.generate(prompt, n_tokens, n_probs=0).ms_per_token for prompt in prompts]
    return 1e3 / statistics.fmean(times)


def verify_ms(engine: Engine, width: int, n_runs: int = 40) -> float:
    """Median time of a chain verify of `width` nodes behind 128 committed tokens, upload and download included."""
    session = engine.open_session()
    target = session.target
    target.prefill(list(range(100, 228)))
    tree = DraftTree.chain(5, np.arange(width - 1))
    times = []
    for _ in range(n_runs):
        begin = time.perf_counter()
        target.verify(tree)
        times.append(time.perf_counter() - begin)
        target.discard()
    session.close()
    return statistics.median(times[n_runs // 4 :]) * 1e3


def verify_ratio(engine: Engine, n_nodes: int, n_runs: int = 40) -> float:
    """Median over pairs of runs: time of a tree verify over that of a chain verify of as many nodes."""
    rng = np.random.default_rng(0)
    parents = [-1, *(int(rng.integers(max(0, i - 6), i)) for i in range(1, n_nodes))]
    ids = [parents[:i].count(parent) for i, parent in enumerate(parents)]  # siblings differ
    trees = DraftTree.from_parents(ids, parents), DraftTree.chain(5, np.arange(n_nodes - 1))
    session = engine.open_session()
    session.target.prefill(list(range(100, 228)))
    ratios = []
    for _ in range(n_runs):
        times = []
        for tree in trees:
            begin = time.perf_counter()
            session.target.verify(tree)
            times.append(time.perf_counter() - begin)
            session.target.discard()
        ratios.append(times[0] / times[1])
    session.close()
    return statistics.median(ratios)


def tree_host_us(engine: Engine, prompt: list[int], budget: int, n_runs: int = 200) -> float:
    """Median microseconds of a tree round's own host work: build, schedule, encode, walk (attention needs no mask)."""
    session = engine.open_session()
    session.target.prefill(prompt)
    block = session.drafter.draft(prompt[-1], n_draft=session.drafter.draft_horizon, top_k=4)
    session.close()
    words = np.zeros(4096, dtype=np.int32)
    times = []
    for _ in range(n_runs):
        begin = time.perf_counter()
        tree = build_draft_tree(
            MarginalSource(block.ids, block.logprobs), prompt[-1], budget=budget, tau=math.inf, horizon=len(block.ids)
        )
        schedule = schedule_tree(tree.parents)
        encode_schedule(
            words, schedule=schedule, n_columns=tree.n_nodes, pending_bank=0, write_bank=1, state_slot=0, fold=False
        )
        accept_greedy(tree, block.ids[tree.depths % len(block.ids), 0])
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def acceptance_by_prompt(engine: Engine, prompts: list[list[int]], n_tokens: int) -> list[tuple[float, float]]:
    """(chain, tree) tokens a round of each prompt."""
    rows = []
    for prompt in prompts:
        stats = [
            engine.generate(prompt, max_tokens=n_tokens, ignore_eos=True, spec=spec).stats for spec in ("chain", "tree")
        ]
        rows.append((stats[0]["acceptance_length"], stats[1]["acceptance_length"]))
    return rows


def bank_memory(engine: Engine) -> dict[str, float]:
    """Bytes of the factor banks, and of the dense snapshots that would hold a state for each of their nodes."""
    recurrent = engine.target.state.recurrent
    snapshots = recurrent.n_rows * recurrent.state_bytes
    return {"banks": recurrent.bank_bytes, "snapshots": snapshots, "ratio": round(snapshots / recurrent.bank_bytes, 1)}


def measure(contenders: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Rates of every contender in every repeat; one more repeat first, which does not count."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, run in contenders.items():
            rate = run()
            if repeat:
                rates[name].append(rate)
    return rates


def ratio(rates: dict[str, list[float]], above: str, below: str) -> float | None:
    """Median of the repeats' ratios, or None when one was not measured."""
    if above not in rates or below not in rates:
        return None
    return statistics.median(a / b for a, b in zip(rates[above], rates[below], strict=True))


def commit() -> str:
    """What was measured."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


@click.command()
@click.option("--target", type=click.Path(exists=True, path_type=Path), default=assets.embedded_target_path)
@click.option("--drafter", type=click.Path(exists=True, path_type=Path), default=assets.embedded_drafter_path)
@click.option("--draft-type", default="DRAFT_DFLASH", show_default=True, help="llama.cpp's name of the drafter's kind.")
@click.option("--repeats", default=5, show_default=True)
@click.option("--tokens", default=128, show_default=True, help="Tokens per prompt.")
@click.option("--threads", default=2, show_default=True)
@click.option("--prompts", "n_prompts", default=8, show_default=True, help="Prompts, of the 40 the tests use.")
@click.option("--llama-cpp/--no-llama-cpp", "with_llama", default=True, show_default=True)
def main(
    target: Path,
    drafter: Path,
    draft_type: str,
    repeats: int,
    tokens: int,
    threads: int,
    n_prompts: int,
    with_llama: bool,
) -> None:
    """Print decode rates, their ratios, the time of a verify by width, and the host's share of a round."""
    texts = (ROOT / "tests" / "e2e" / "prompts.txt").read_text().split("\n---\n")
    with Engine.load(target, drafter, n_threads=threads, n_ctx=1024) as engine:
        prompts = [engine.tokenizer.encode(text) for text in texts[:: max(1, len(texts) // n_prompts)][:n_prompts]]
        contenders: dict[str, Callable[[], float]] = {
            f"ours {spec}": lambda spec=spec: tokens_per_second(engine, spec, prompts, tokens)[0]
            for spec in ("off", "auto", "chain", "tree")
        }
        if with_llama:
            options = {"n_threads": threads, "n_ctx": 1024, "kv_type": "f16"}
            plain = LlamaCpp(target, **options)
            drafting = LlamaCpp(target, drafter, draft_type=draft_type, **options)
            contenders["llama.cpp off"] = lambda: llama_rate(plain, prompts, tokens)
            contenders["llama.cpp draft"] = lambda: llama_rate(drafting, prompts, tokens)
        rates = measure(contenders, repeats)
        widths = {width: verify_ms(engine, width) for width in WIDTHS}
        host = {spec: host_ms_per_round(engine, spec, prompts, tokens) for spec in ("off", "chain", "tree")}
        acceptance = acceptance_by_prompt(engine, prompts, tokens)
        trees = {
            "verify 22, tree / chain": round(verify_ratio(engine, 22), 3),
            "host us, budget 22": round(tree_host_us(engine, prompts[0], 22), 1),
            "host us, budget 64": round(tree_host_us(engine, prompts[0], 64), 1),
        }
        memory = bank_memory(engine)
    report = {
        "commit": commit(),
        "machine": f"{platform.machine()}, {threads} threads",
        "tok_s": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        "ratios": {
            "auto / off": ratio(rates, "ours auto", "ours off"),
            "chain / off": ratio(rates, "ours chain", "ours off"),
            "tree / off": ratio(rates, "ours tree", "ours off"),
            "off / llama.cpp off": ratio(rates, "ours off", "llama.cpp off"),
            "chain / llama.cpp off": ratio(rates, "ours chain", "llama.cpp off"),
            "auto / llama.cpp off": ratio(rates, "ours auto", "llama.cpp off"),
            "auto / llama.cpp draft": ratio(rates, "ours auto", "llama.cpp draft"),
            "chain / llama.cpp draft": ratio(rates, "ours chain", "llama.cpp draft"),
            "llama.cpp draft / off": ratio(rates, "llama.cpp draft", "llama.cpp off"),
        },
        "verify_ms": {str(width): round(ms, 2) for width, ms in widths.items()},
        "host_ms_per_round": {spec: round(ms, 3) for spec, ms in host.items()},
        "acceptance_length": {
            "chain": round(statistics.fmean(chain for chain, _ in acceptance), 3),
            "tree": round(statistics.fmean(tree for _, tree in acceptance), 3),
            "prompts with tree >= chain": f"{sum(tree >= chain for chain, tree in acceptance)} of {len(acceptance)}",
        },
        "trees": trees,
        "bank_memory": memory,
    }
    for name, values in rates.items():
        spread = f"{min(values):.0f} .. {max(values):.0f}"
        click.echo(f"{name:18} {statistics.median(values):8.1f} tokens/s   (of {repeats}: {spread})")
    for name, value in report["ratios"].items():
        click.echo(f"{name:26} {'not measured' if value is None else f'{value:.2f} x'}")
    click.echo("verify by width, ms:  " + "  ".join(f"{width}: {ms:.2f}" for width, ms in widths.items()))
    click.echo("host, ms a round:     " + "  ".join(f"{spec}: {ms:.3f}" for spec, ms in host.items()))
    click.echo(f"trees:                {trees}")
    click.echo(f"tokens a round:       {report['acceptance_length']}")
    click.echo(f"bank memory, bytes:   {memory}")
    click.echo(json.dumps(report))


if __name__ == "__main__":
    main()
