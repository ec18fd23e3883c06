"""Accepted draft tokens a block under greedy verification, by the method of the small models' card.

    python tools/acceptance.py --target T.gguf --drafter D.gguf [--drafter ...] --prompts tests/e2e/prompts.txt
    python tools/acceptance.py --target T.gguf --drafter D.gguf --tokens heldout.tok --rows 96 --spec tree

Each row is a prompt; its first token is generated plainly, then blocks of the full draft horizon follow until the
anchor lies `--positions` tokens behind the prompt. A row loops when its last 128 tokens repeat themselves; loops are
easy to draft, so both kinds of row are given. The last line is JSON.

--tokens: little-endian 16-bit ids, documents ended by the end token (as the card's corpus); rows of `--prompt-tokens`
start at line beginnings spread evenly. --prompts: texts separated by lines of three dashes, used whole.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pyggml_spec import Engine
from pyggml_spec.decode.round import SpecOptions
from pyggml_spec.records import SamplingParams
from pyggml_spec.tree.build import TreeOptions


@dataclass(frozen=True)
class Row:
    """One prompt's blocks: accepted draft tokens of each, and whether the text loops."""

    accepted: list[int]
    loops: bool


def token_rows(engine: Engine, path: Path, n_rows: int, n_tokens: int) -> list[list[int]]:
    """Prompts from a token file, beginning after line ends."""
    ids = np.fromfile(path, dtype="<u2").astype(np.int64)
    vocabulary = engine.tokenizer.vocabulary
    newline = "\u010a".encode()  # the line end in the alphabet of byte-level vocabularies
    ends = np.array([text.endswith(newline) for text in vocabulary.tokens])
    ends[list(engine.tokenizer.end_ids)] = True
    starts = np.flatnonzero(ends[ids[:-1]]) + 1
    starts = starts[starts < len(ids) - n_tokens]
    chosen = starts[np.linspace(0, len(starts) - 1, n_rows).astype(int)]
    return [ids[at : at + n_tokens].tolist() for at in chosen]


def text_rows(engine: Engine, path: Path) -> list[list[int]]:
    """Prompts from a text file."""
    return [engine.tokenizer.encode(text) for text in path.read_text().split("\n---\n")]


def blocks(engine: Engine, prompt: list[int], spec: SpecOptions, n_positions: int) -> Row:
    """Accepted tokens of the blocks whose anchors lie among the first `n_positions` generated tokens."""
    session, horizon = engine.open_session(), engine.drafter.config.draft_horizon
    try:
        for _ in session.generate(prompt, SamplingParams(), max_tokens=1, spec=SpecOptions("off")):
            pass
        accepted, anchor = [], 0  # the anchor's place among the generated tokens
        for emission in session.generate([], SamplingParams(), max_tokens=None, spec=spec):
            if not emission.token_ids or len(session.tokens) + horizon >= session.target.n_ctx:
                raise SystemExit(f"a prompt of {len(prompt)} tokens needs a larger context for {n_positions} positions")
            accepted.append(len(emission.token_ids) - 1)
            anchor += len(emission.token_ids)
            if anchor >= n_positions:
                break
        return Row(accepted, _loops(session.tokens))
    finally:
        session.close()


def _loops(tokens: list[int], window: int = 128, n: int = 6, least: float = 0.4) -> bool:
    tail = tokens[-window:]
    grams = [tuple(tail[i : i + n]) for i in range(len(tail) - n + 1)]
    return len(set(grams)) < least * len(grams)


def summary(rows: list[Row], horizon: int) -> dict[str, object]:
    """Mean accepted, and the share of blocks that accepted at least n."""
    accepted = np.array([n for row in rows for n in row.accepted])
    if not len(accepted):
        return {"rows": len(rows), "blocks": 0}
    shares = [round(float((accepted > depth).mean()), 4) for depth in range(horizon)]
    error = float(np.std([np.mean(row.accepted) for row in rows]) / np.sqrt(len(rows)))
    return {
        "rows": len(rows), "blocks": len(accepted), "mean_accepted": round(float(accepted.mean()), 4),
        "standard_error_over_rows": round(error, 4), "accepted_at_least": shares,
    }  # fmt: skip


def measure(args: argparse.Namespace, drafter: Path) -> dict[str, object]:
    """One drafter on all rows."""
    options = TreeOptions(budget=args.budget, top_k=args.tree_top_k, tau=args.tau)
    spec = SpecOptions(args.spec, tree=options)
    with Engine.load(
        args.target, drafter, n_ctx=args.n_ctx, n_threads=args.threads, kv_type_k=args.kv_type, kv_type_v=args.kv_type,
        kv_type_draft_k=args.draft_kv_type, kv_type_draft_v=args.draft_kv_type,
    ) as engine:
        prompts = (
            token_rows(engine, args.tokens, args.rows, args.prompt_tokens)
            if args.tokens
            else text_rows(engine, args.prompts)
        )
        rows = [blocks(engine, prompt, spec, args.positions) for prompt in prompts]
        horizon = engine.drafter.config.draft_horizon
    kinds = {"all": rows, "looping": [r for r in rows if r.loops], "not_looping": [r for r in rows if not r.loops]}
    return {"drafter": drafter.name} | {name: summary(chosen, horizon) for name, chosen in kinds.items()}


def report(found: dict[str, object]) -> Iterator[str]:
    """Lines for people."""
    yield str(found["drafter"])
    for name in ("all", "looping", "not_looping"):
        part = found[name]
        if part["blocks"]:
            shares = " ".join(f"{share:.3f}" for share in part["accepted_at_least"])
            error = part["standard_error_over_rows"]
            yield f"  {name:12} {part['rows']:3} rows  {part['mean_accepted']:.3f} +- {error:.3f} accepted   {shares}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, action="append", required=True)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", type=Path)
    source.add_argument("--tokens", type=Path)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--positions", type=int, default=192)
    parser.add_argument("--spec", choices=["chain", "tree"], default="chain")
    parser.add_argument("--budget", type=int, default=22)
    parser.add_argument("--tree-top-k", type=int, default=4)
    parser.add_argument("--tau", type=float, default=6.0)
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--draft-kv-type", default="f16")
    parser.add_argument("--n-ctx", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    results = [measure(args, drafter) for drafter in args.drafter]
    for found in results:
        print("\n".join(report(found)))
    settings = {name: str(value) for name, value in vars(args).items() if name not in ("target", "drafter")}
    print(json.dumps({"target": args.target.name, "settings": settings, "results": results}))


if __name__ == "__main__":
    main()
