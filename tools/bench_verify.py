#!/usr/bin/env python3
"""What a round is made of on a CPU: verifies by width, trees beside chains, the host's share, acceptance, bank memory.

    python tools/bench_verify.py [--drafter D.gguf] [--tokens 128] [--threads 2] [--prompts 8]

One process, one engine; times are medians. How fast whole texts are generated is what `tools/bench_cpu.py` measures.
People read the tables; the last line is one JSON document.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from bench_cpu import N_CTX, choose_prompts, commit

from pyggml_spec import Engine, assets
from pyggml_spec.tree.accept import accept_greedy
from pyggml_spec.tree.build import MarginalSource, TreeOptions, build_draft_tree
from pyggml_spec.tree.draft_tree import DraftTree
from pyggml_spec.tree.schedule import encode_schedule, schedule_tree

WIDTHS = (1, 2, 4, 8, 12, 16, 22, 32)
SPECS = ("off", "chain", "tree")


def verify_ms(engine: Engine, width: int, n_runs: int = 40) -> float:
    """Median time of a chain verify of `width` nodes behind 128 committed tokens, upload and download included."""
    tree = DraftTree.chain(5, np.arange(width - 1))
    return statistics.median(row[0] for row in verify_times(engine, [tree], n_runs)) * 1e3


def verify_ratio(engine: Engine, n_nodes: int, n_runs: int = 40) -> float:
    """Median over pairs of runs: time of a tree verify over that of a chain verify of as many nodes."""
    rng = np.random.default_rng(0)
    parents = [-1, *(int(rng.integers(max(0, i - 6), i)) for i in range(1, n_nodes))]
    ids = [parents[:i].count(parent) for i, parent in enumerate(parents)]  # siblings differ
    trees = [DraftTree.from_parents(ids, parents), DraftTree.chain(5, np.arange(n_nodes - 1))]
    return statistics.median(tree / chain for tree, chain in verify_times(engine, trees, n_runs))


def verify_times(engine: Engine, trees: list[DraftTree], n_runs: int) -> list[list[float]]:
    """Seconds of the trees' verifies, in turn; the first quarter of the runs, which builds graphs, is left out."""
    session = engine.open_session()
    session.target.prefill(list(range(100, 228)))
    rows = []
    for _ in range(n_runs):
        row = []
        for tree in trees:
            begin = time.perf_counter()
            session.target.verify(tree)
            row.append(time.perf_counter() - begin)
            session.target.discard()
        rows.append(row)
    session.close()
    return rows[n_runs // 4 :]


def tree_host_us(engine: Engine, prompt: list[int], budget: int, n_runs: int = 200) -> float:
    """Median microseconds of a tree round's own host work: build, schedule, encode, walk (attention needs no mask).

    Candidates are scored as the drafter's kind has it, and no tree is cut short: all have `budget` nodes.
    """
    session = engine.open_session()
    session.target.prefill(prompt)
    block = session.drafter.draft(prompt[-1], n_draft=session.drafter.draft_horizon, top_k=TreeOptions.top_k)
    session.close()
    words = np.zeros(4096, dtype=np.int32)
    times = []
    for _ in range(n_runs):
        begin = time.perf_counter()
        source = block.source or MarginalSource(block.ids, block.logprobs)
        tree = build_draft_tree(source, prompt[-1], budget=budget, tau=math.inf, horizon=len(block.ids))
        schedule = schedule_tree(tree.parents)
        encode_schedule(
            words, schedule=schedule, n_columns=tree.n_nodes, pending_bank=0, write_bank=1, state_slot=0, fold=False
        )
        accept_greedy(tree, block.ids[tree.depths % len(block.ids), 0])
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def statistics_by_spec(engine: Engine, prompts: list[list[int]], n_tokens: int) -> dict[str, list[dict[str, Any]]]:
    """Every prompt's statistics; an earlier pass has built the graphs."""
    for _ in range(2):
        found = {
            spec: [engine.generate(p, max_tokens=n_tokens, ignore_eos=True, spec=spec).stats for p in prompts]
            for spec in SPECS
        }
    return found


def summarise_acceptance(stats: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Tokens a round of chains and trees: means, and each prompt's pair."""
    pairs = [
        (chain["acceptance_length"], tree["acceptance_length"])
        for chain, tree in zip(stats["chain"], stats["tree"], strict=True)
    ]
    return {
        "chain": round(statistics.fmean(chain for chain, _ in pairs), 3),
        "tree": round(statistics.fmean(tree for _, tree in pairs), 3),
        "prompts with tree >= chain": f"{sum(tree >= chain for chain, tree in pairs)} of {len(pairs)}",
        "by prompt": [(round(chain, 2), round(tree, 2)) for chain, tree in pairs],
    }


def bank_memory(engine: Engine) -> dict[str, float]:
    """Bytes of the factor banks, and of the dense snapshots that would hold a state for each of their nodes."""
    state = engine.target.state.recurrent
    ratio = round(state.dense_bytes / state.bank_bytes, 1)
    return {"banks": state.bank_bytes, "snapshots": state.dense_bytes, "ratio": ratio}


@click.command()
@click.option("--target", type=click.Path(exists=True, path_type=Path), default=assets.embedded_target_path)
@click.option("--drafter", type=click.Path(exists=True, path_type=Path), default=assets.embedded_drafter_path)
@click.option("--tokens", default=128, show_default=True, help="Tokens per prompt.")
@click.option("--threads", default=2, show_default=True)
@click.option("--prompts", "n_prompts", default=8, show_default=True, help="Prompts, of the 40 the tests use.")
def main(target: Path, drafter: Path, tokens: int, threads: int, n_prompts: int) -> None:
    """Print what verifies, trees and the host's part of a round take, and what drafts gain."""
    with Engine.load(target, drafter, n_threads=threads, n_ctx=N_CTX) as engine:
        prompts = [engine.tokenizer.encode(text) for text in choose_prompts(n_prompts)]
        stats = statistics_by_spec(engine, prompts, tokens)
        report = {
            "commit": commit(),
            "machine": f"{platform.machine()}, {threads} threads",
            "drafter": engine.drafter.config.kind,
            "verify_ms": {str(width): round(verify_ms(engine, width), 2) for width in WIDTHS},
            "host_ms_per_round": {
                spec: round(statistics.median(row["host_ms"] / row["rounds"] for row in rows), 3)
                for spec, rows in stats.items()
            },
            "trees": {
                "verify 22, tree / chain": round(verify_ratio(engine, 22), 3),
                "host us, budget 22": round(tree_host_us(engine, prompts[0], 22), 1),
                "host us, budget 64": round(tree_host_us(engine, prompts[0], 64), 1),
            },
            "acceptance_length": summarise_acceptance(stats),
            "bank_memory": bank_memory(engine),
        }
    print_report(report)


def print_report(report: dict[str, Any]) -> None:
    """Tables for people, then the document."""
    acceptance = dict(report["acceptance_length"])
    by_prompt = acceptance.pop("by prompt")
    rows = {
        "verify by width, ms": report["verify_ms"],
        "host, ms a round": report["host_ms_per_round"],
        "trees": report["trees"],
        f"tokens a round, {report['drafter']}": acceptance,
        "bank memory, bytes": report["bank_memory"],
    }
    for title, values in rows.items():
        click.echo(f"{title + ':':26}" + "   ".join(f"{name}: {value}" for name, value in values.items()))
    click.echo(f"{'chain/tree by prompt:':26}" + "  ".join(f"{chain}/{tree}" for chain, tree in by_prompt))
    click.echo(json.dumps(report))


if __name__ == "__main__":
    main()
