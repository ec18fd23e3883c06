"""Options of drafter files, from the file to the block: each against a float64 drafter on the reference's features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from reference import drafter as oracle
from reference import heads
from reference.model_files import drafter_arrays, write_f32_drafter

from pyggml_spec.decode.protocols import DraftBlock
from pyggml_spec.records import DrafterConfig

from .conftest import DATA, load

pytestmark = pytest.mark.native

# f32 against float64 through three layers, on log-probabilities down to -30: found are 3e-5 on a CPU. A GPU may round
# the factors of f32 products to 11 bits.
CPU_ERROR, GPU_ERROR = 1e-4, 5e-2
KINDS = ("dflash", "dspark", "dflash2")
YARN = {"dflash.rope.scaling.type": "yarn", "dflash.rope.scaling.factor": 4.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "as trained": {},
    "window": {"dflash.attention.sliding_window": 8, "dflash.attention.sliding_window_pattern": [True, False, True]},
    "yarn": {**YARN, "dflash.rope.scaling.original_context_length": 64},
    "unusual mask token": {"tokenizer.ggml.mask_token_id": 3},
    "causal": {"dflash.attention.causal": True},
    "short block": {"dflash.block_size": 5},
    "scales": {"dflash.embedding_scale": 2.0, "dflash.logit_scale": 0.5, "dflash.final_logit_softcapping": 20.0},
}


@dataclass
class Case:
    """A drafter file beside what it holds, and the block it drafts."""

    config: DrafterConfig
    arrays: dict[str, np.ndarray]
    anchor: int
    block: DraftBlock
    wanted: oracle.Block
    error: float  # allowed on log-probabilities


@pytest.fixture(scope="module")
def table(f32_files: tuple[Path, Path]) -> np.ndarray:
    """The target's embedding table and output head, (n_vocab, n_embd)."""
    tensor = next(t for t in gguf.GGUFReader(f32_files[0]).tensors if t.name == "token_embd.weight")
    return np.array(tensor.data)


@pytest.fixture
def draft(
    f32_files: tuple[Path, Path], golden: list[dict[str, Any]], table: np.ndarray, tmp_path: Path, device: str
) -> Callable[..., Case]:
    """Write a drafter of a kind with other keys or tensors, and draft one block after a reference prompt."""

    def draft_one(kind: str, keys: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> Case:
        template = DATA / f"minnow-{kind}-q8_0.gguf"
        if kind == "dflash":
            template = f32_files[1]
        file = write_f32_drafter(DATA / f"minnow-{kind}", template, tmp_path / "d.gguf", keys=keys, tensors=tensors)
        arrays = drafter_arrays(DATA / f"minnow-{kind}") | (tensors or {})
        anchor, prompt = int(golden[4]["blocks"][kind]["anchor"]), golden[4]
        with load(f32_files[0], file, device=device) as engine:
            config, session = engine.drafter.config, engine.open_session()
            session.target.prefill(prompt["ids"])
            block = session.drafter.draft(anchor, n_draft=config.draft_horizon, top_k=5)
            session.close()
        embeddings = arrays.get("token_embd.weight", table)
        head = arrays.get("output.weight", embeddings)
        wanted = oracle.draft(
            config,
            {name: array.astype(np.float64) for name, array in arrays.items()},
            embeddings,
            head,
            prompt["arrays"]["features"].astype(np.float64),
            anchor,
        )
        return Case(config, arrays, anchor, block, wanted, CPU_ERROR if device == "CPU" else GPU_ERROR)

    return draft_one


def draft_rows(case: Case, ids: np.ndarray) -> np.ndarray:
    """Rows of the output head that stand for target ids."""
    if "d2t" not in case.arrays:
        return ids
    row_of = {int(target_id): row for row, target_id in enumerate(case.arrays["d2t"])}
    return np.vectorize(row_of.__getitem__)(ids)


def check(case: Case) -> None:
    """Ids and log-probabilities of the block, along its own chain; of a selector its scores after the anchor."""
    logits, arrays = case.wanted.logits, case.arrays
    if case.config.kind == "dflash2":
        check_selector(case)
        return
    rows = draft_rows(case, case.block.ids)
    if case.config.kind == "dspark":
        w1, w2 = arrays["markov_w1.weight"], arrays["markov_w2.weight"]
        logits, _ = heads.markov_chain(logits, w1, w2, case.anchor, arrays.get("d2t"), rows[:, 0].tolist())
    heads.check_best(rows, case.block.logprobs, logits, case.error)


def check_selector(case: Case) -> None:
    """The candidates of every slot, and their scores after the third candidate of the slot before."""
    before, logits = None, case.wanted.logits
    codebooks = [case.arrays[f"selector_{name}.weight"] for name in ("predecessor", "successor", "hidden")]
    for slot in range(case.config.draft_horizon):
        parent = case.anchor if before is None else before[2]
        prefix = [case.anchor, *[0] * (slot - 1), *([] if before is None else [parent])]
        ids, logprobs = case.block.source(prefix, slot + 1)
        rows = draft_rows(case, np.array([ids]))
        pairs = heads.selector_scores(case.wanted.hidden[slot : slot + 1], np.array([ids]), *codebooks, parent)[0, 0]
        scores, before = logits[slot, rows[0]] + pairs, ids

        unconditioned = logits[slot : slot + 1]
        heads.check_best(rows, heads.log_softmax(unconditioned)[:, rows[0]], unconditioned, case.error)
        assert np.ptp(np.array(logprobs) - scores) < case.error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_option_reaches_the_block(draft: Callable[..., Case], kind: str, option: str) -> None:
    """Every option with every kind, read from the file."""
    check(draft(kind, OPTIONS[option]))


@pytest.mark.parametrize("kind", KINDS)
def test_reduced_vocabulary(draft: Callable[..., Case], table: np.ndarray, kind: str) -> None:
    """A head of 3000 rows in random order: the ids that leave the drafter are the target's."""
    rows = np.random.default_rng(3).permutation(len(table))[:3000]
    tensors = {"d2t": rows.astype(np.int64), "output.weight": table[rows]}
    if kind == "dspark":
        tensors["markov_w2.weight"] = drafter_arrays(DATA / "minnow-dspark")["markov_w2.weight"][rows]
    case = draft(kind, {}, tensors)

    assert set(case.block.ids.ravel().tolist()) <= set(rows.tolist())
    check(case)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_head", [False, True], ids=["embeddings are the head", "a head of its own"])
def test_own_tables(draft: Callable[..., Case], table: np.ndarray, kind: str, has_head: bool) -> None:
    """A drafter's own tables are used, not the target's; without a head its embeddings serve as one."""
    rng = np.random.default_rng(4)
    own = {"token_embd.weight": (table + 0.05 * rng.normal(size=table.shape)).astype(np.float32)}
    if has_head:
        own["output.weight"] = (table + 0.05 * rng.normal(size=table.shape)).astype(np.float32)
    check(draft(kind, {}, own))


def test_a_window_is_part_of_the_result(draft: Callable[..., Case]) -> None:
    """Run dense, the same drafter drafts with other probabilities: the tests above would notice."""
    sliding, dense = (draft("dflash", OPTIONS[option]) for option in ("window", "as trained"))

    assert np.abs(sliding.wanted.logits - dense.wanted.logits).max() > 0.1
    assert replace(sliding.config, sliding_window=0, sliding_layers=()) == dense.config
