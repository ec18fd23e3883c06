"""Options of drafter files, from the file to the block: each against a float64 drafter on the features it read."""

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
from reference.rounding import Arrays, errors_of_11_bits

from pyggml_spec import Engine
from pyggml_spec.decode.protocols import DraftBlock
from pyggml_spec.records import DrafterConfig

from .conftest import DATA, DRAFTERS, load

pytestmark = pytest.mark.native

# f32 against float64 through three layers, on log-probabilities down to -30: found are 3e-5 on a CPU. On a GPU comes on
# top what factors of 11 bits may do to the very case (`reference/rounding.py`).
ERROR = 1e-4
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
    arrays: Arrays  # float64; the tables under the names of a drafter's own, and the features that were read
    anchor: int
    block: DraftBlock
    device: str

    def block_of(self, arrays: Arrays) -> oracle.Block:
        """What a drafter of these arrays computes."""
        tables = arrays["token_embd.weight"], arrays["output.weight"]
        return oracle.draft(self.config, arrays, *tables, arrays["features"], self.anchor)

    def errors(self, expected: Callable[[Arrays], Arrays]) -> dict[str, float]:
        """Allowed for each of the expected values."""
        on_top = {} if self.device == "CPU" else errors_of_11_bits(expected, self.arrays)
        return {name: ERROR + on_top.get(name, 0.0) for name in expected(self.arrays)}


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
        checkpoint, file = DATA / f"minnow-{kind}", tmp_path / "d.gguf"
        write_f32_drafter(checkpoint, DRAFTERS[kind], file, keys=keys, tensors=tensors)
        arrays = drafter_arrays(DATA / f"minnow-{kind}") | (tensors or {})
        anchor, prompt = int(golden[4]["blocks"][kind]["anchor"]), golden[4]
        with load(f32_files[0], file, device=device) as engine:
            features, block = draft_after(engine, prompt["ids"], anchor)
            config = engine.drafter.config
        embeddings = arrays.get("token_embd.weight", table)
        tables = {"token_embd.weight": embeddings, "output.weight": arrays.get("output.weight", embeddings)}
        arrays |= {"features": features, **tables}
        exact = {name: a.astype(np.float64) if a.dtype.kind == "f" else a for name, a in arrays.items()}
        return Case(config, exact, anchor, block, device)

    return draft_one


def draft_after(engine: Engine, ids: list[int], anchor: int) -> tuple[np.ndarray, DraftBlock]:
    """The target's features (n_tokens, ..) of the prompt and the first block after it."""
    session = engine.open_session()
    session.target.prefill(ids)
    features = engine.target.state.features.tensor.get()[session.target.features.unread]
    block = session.drafter.draft(anchor, n_draft=engine.drafter.config.draft_horizon, top_k=5)
    session.close()
    return features, block


def draft_rows(case: Case, ids: np.ndarray) -> np.ndarray:
    """Rows of the output head that stand for target ids."""
    if "d2t" not in case.arrays:
        return ids
    row_of = {int(target_id): row for row, target_id in enumerate(case.arrays["d2t"])}
    return np.vectorize(row_of.__getitem__)(ids)


def check(case: Case) -> None:
    """Ids and log-probabilities of the block, along its own chain; of a selector its scores after the third candidate
    of the slot before."""
    if case.config.kind == "dflash2":
        check_selector(case)
        return
    rows = draft_rows(case, case.block.ids)

    def expected(arrays: Arrays) -> Arrays:
        logits = case.block_of(arrays).logits
        if case.config.kind == "dspark":
            w1, w2 = arrays["markov_w1.weight"], arrays["markov_w2.weight"]
            logits, _ = heads.markov_chain(logits, w1, w2, case.anchor, arrays.get("d2t"), rows[:, 0].tolist())
        return {"logits": logits}

    heads.check_best(rows, case.block.logprobs, expected(case.arrays)["logits"], case.errors(expected)["logits"])


def check_selector(case: Case) -> None:
    """The candidates of every slot, and their scores up to the normaliser of the slot."""
    ids, scores, parent = [], [], case.anchor
    for slot in range(case.config.draft_horizon):
        prefix = [case.anchor, *[0] * (slot - 1), *([parent] if slot else [])]
        candidates, logprobs = case.block.source(prefix, slot + 1)
        ids.append(candidates)
        scores.append(logprobs)
        parent = candidates[2]
    rows = draft_rows(case, np.array(ids))

    def expected(arrays: Arrays) -> Arrays:
        block = case.block_of(arrays)
        codebooks = [arrays[f"selector_{name}.weight"] for name in ("predecessor", "successor", "hidden")]
        pairs = heads.selector_scores(block.hidden, np.array(ids), *codebooks, case.anchor)
        after_third = np.concatenate([pairs[:1, 0], pairs[1:, 2]])
        return {"logits": block.logits, "scores": np.take_along_axis(block.logits, rows, axis=1) + after_third}

    wanted, errors = expected(case.arrays), case.errors(expected)
    logprobs = np.take_along_axis(heads.log_softmax(wanted["logits"]), rows, axis=1)
    heads.check_best(rows, logprobs, wanted["logits"], errors["logits"])
    assert np.ptp(np.array(scores) - wanted["scores"], axis=1).max() < errors["scores"]


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
    difference = np.abs(sliding.block_of(sliding.arrays).logits - dense.block_of(dense.arrays).logits).max()
    allowed = sliding.errors(lambda arrays: {"logits": sliding.block_of(arrays).logits})["logits"]

    assert difference > max(0.1, 3 * allowed)
    assert replace(sliding.config, sliding_window=0, sliding_layers=()) == dense.config
