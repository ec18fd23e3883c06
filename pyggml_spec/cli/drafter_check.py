"""`pyggml-spec bench --drafter-check`: why acceptance is what it is, by trying settings one at a time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .drafter_findings import NOT_CHECKED, find_remedies, read_contexts, read_curve, read_files
from .drafter_trials import DraftedRound, Trial, draft_rounds, list_trials, summarise
from .progress import StageBar
from .render import align
from .run import load_engine

if TYPE_CHECKING:
    from ..decode.engine import Engine
    from ..gguf_io import GgufFile

KV_OPTIONS = ("kv_type_k", "kv_type_v", "kv_type_draft_k", "kv_type_draft_v")


def check_drafter(engine: Engine, prompts: list[list[int]], given: dict[str, Any], bar: StageBar) -> dict[str, Any]:
    """Measure the loaded pair, then load it once for every trial; the given engine is closed on the way."""
    from ..gguf_io import open_gguf
    from ..gguf_io.dialects import find_dialect

    assert engine.drafter is not None, "refused before loading"
    drafter, vocabulary = engine.drafter.config, engine.tokenizer.vocabulary
    kv_types = {name: given[name] for name in KV_OPTIONS}
    with open_gguf(_drafter_path(given)) as file:
        trials = list(list_trials(drafter, engine.target.config, vocabulary, find_dialect(file), kv_types))
        bits, types = _bits_per_weight(file)
    rounds = draft_rounds(engine, prompts, given["max_tokens"])
    engine.close()  # two targets need not fit into memory
    rows = [summarise(rounds), *_run_trials(trials[1:], prompts, given, bar)]
    found = [
        *find_remedies(list(zip(trials, rows, strict=True))),
        *read_curve(rows[0]["accepted_share_per_depth"]),
        *read_contexts(rounds, drafter),
        *read_files(drafter, bits, types, vocabulary),
    ]
    return {
        "drafter_settings": _describe(drafter, bits, types, rounds),
        "trials": [{"name": trial.name, **row} for trial, row in zip(trials, rows, strict=True)],
        "findings": found,
        "not_checked": list(NOT_CHECKED),
    }


def _run_trials(
    trials: list[Trial], prompts: list[list[int]], given: dict[str, Any], bar: StageBar
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    quiet = StageBar()  # loading has a bar of its own; here the trials are what progresses
    quiet.disable()
    for trial in trials:
        bar.update("trying", len(rows), len(trials))
        with load_engine({**given, **trial.loading}, quiet, drafter_settings=trial.settings) as engine:
            rows.append(summarise(draft_rounds(engine, prompts, given["max_tokens"])))
    return rows


def _drafter_path(given: dict[str, Any]) -> Path:
    from ..assets import embedded_drafter_path

    return Path(given["drafter"]) if given["drafter"] else embedded_drafter_path()


def _bits_per_weight(file: GgufFile) -> tuple[float, list[str]]:
    """Of the matrices, and their types."""
    matrices = [tensor for tensor in file.tensors.values() if len([n for n in tensor.ne if n > 1]) > 1]
    n_weights = sum(math.prod(tensor.ne) for tensor in matrices)
    types = sorted({tensor.type.name.lower() for tensor in matrices})
    return sum(tensor.n_bytes for tensor in matrices) * 8 / max(n_weights, 1), types


def _describe(drafter: Any, bits: float, types: list[str], rounds: list[DraftedRound]) -> dict[str, Any]:
    return {
        "kind": drafter.kind,
        "target_layer_ids": list(drafter.target_layer_ids),
        "mask_token_id": drafter.mask_token_id,
        "rope_base": drafter.rope_theta,
        "rope_scaling": None if drafter.rope_scaling is None else drafter.rope_scaling.factor,
        "sliding_window": drafter.sliding_window,
        "causal": drafter.causal,
        "n_ctx_train": drafter.n_ctx_train,
        "longest_context": max((each.n_context for each in rounds), default=0),
        "matrix_types": types,
        "bits_per_weight": round(bits, 2),
    }


def render_check(report: dict[str, Any]) -> str:
    """Settings, trials, findings, and what stays open."""
    settings = align((f"  {name.replace('_', ' ')}", _shown(v)) for name, v in report["drafter_settings"].items())
    curve = report["trials"][0]["accepted_share_per_depth"]
    shares = align(
        [("  depth", *(str(d) for d in range(1, len(curve) + 1))), ("  rounds", *(f"{s:.0%}" for s in curve))]
    )
    trials = align(
        (f"  {row['name']}", f"{row['mean_accepted']:.2f} +- {row['standard_error']:.2f}", f"{row['rounds']} rounds")
        for row in report["trials"]
    )
    sections = {
        "the drafter's settings": settings,
        "rounds that accepted a token at depth": shares,
        "accepted draft tokens a round (greedy chains of the whole horizon)": trials,
        "findings": "\n".join(f"  * {text}" for text in report["findings"]),
        "not checked": "\n".join(f"  * {text}" for text in report["not_checked"]),
    }
    return "\n\n".join(f"{title}\n{text}" for title, text in sections.items())


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)
