"""Drafter graphs against float64: selector, Markov chain and confidence, and every option of the trunk.

Bounds: f32 arithmetic, some ten products of 30 to 70 terms one after the other, each with a rounding error of a few
units of the largest value. ROUNDING allows 128 units; of 228 cases (4 seeds) five needed more than 32, none 64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from native_helpers import Harness
from reference import drafter as oracle
from reference import heads
from tiny_drafter import DFLASH, DFLASH2, DSPARK, Drawn, TinyDrafter, ids_and_values

from pyggml_spec.ggml import F16, Q8_0
from pyggml_spec.records import DrafterConfig, RopeScaling

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("device")]

ANCHOR = 7
ROUNDING = 128 * 2.0**-24
GPU_ROUNDING = 8 * 2.0**-11  # products of f32 matrices may round their operands to 11 bits there
KINDS = {"dflash": DFLASH, "dspark": DSPARK, "dflash2": DFLASH2}
REDUCED: dict[str, Any] = {"has_reduced_vocabulary": True, "has_own_head": True, "n_vocab": 30}
SLIDING: dict[str, Any] = {"sliding_window": 6, "sliding_layers": (True, False)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": SLIDING,
    "window of one": {"sliding_window": 1, "sliding_layers": (True, True)},
    "causal": {"causal": True},
    "causal window": {"causal": True, **SLIDING},
    "yarn": {"rope_scaling": RopeScaling(factor=4.0, n_ctx_original=32)},
    "yarn, own numbers": {"rope_scaling": RopeScaling(8.0, 16, beta_fast=8.0, beta_slow=2.0, attention_factor=0.7)},
    "half rotates": {"rope_dims": 32},
    "reduced vocabulary": REDUCED,
    "own tables": {"has_own_embeddings": True, "has_own_head": True},
    "own embeddings are the head": {"has_own_embeddings": True},
    "scales": {"embedding_scale": 3.0, "logit_scale": 0.25},
    "soft cap": {"final_logit_softcapping": 5.0},
    "scaled, then capped": {"final_logit_softcapping": 5.0, "logit_scale": 0.5},
    "shortest block": {"draft_block_size": 2},
    "long block": {"draft_block_size": 16},
    "other mask": {"mask_token_id": 3},
    "three features": {"target_layer_ids": (0, 1, 3)},
    "equal heads": {"n_heads": 2},
}


def bound(*values: np.ndarray) -> float:
    """Allowed absolute error of values this large."""
    unit = ROUNDING if Harness.device == "CPU" else GPU_ROUNDING
    return unit * max(1.0, *(float(np.abs(v).max()) for v in values))


def reference_block(drawn: Drawn) -> oracle.Block:
    arrays = {name: array.astype(np.float64) for name, array in drawn.arrays.items()}
    return oracle.draft(drawn.config, arrays, drawn.embeddings, drawn.head, drawn.features.astype(np.float64), ANCHOR)


def run(drawn: Drawn, top_k: int = 4, **options: Any) -> dict[str, np.ndarray]:
    with TinyDrafter(drawn, **options) as tiny:
        return tiny.run(ANCHOR, top_k)


def check_top(top: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Ids and log-probabilities of the best of each row; returns the ids."""
    ids, values = ids_and_values(top)
    heads.check_best(ids, values, logits, bound(logits))
    return ids


def target_ids(drawn: Drawn, ids: np.ndarray) -> np.ndarray:
    return drawn.arrays["d2t"][ids] if "d2t" in drawn.arrays else ids


def check_markov(drawn: Drawn, block: oracle.Block, results: dict[str, np.ndarray]) -> None:
    """Chain, confidence along it, unconditioned candidates, and biases between neighbours."""
    w1, w2 = drawn.arrays["markov_w1.weight"], drawn.arrays["markov_w2.weight"]
    chosen = ids_and_values(results["chain"])[0][:, 0].tolist()
    biased, _ = heads.markov_chain(block.logits, w1, w2, ANCHOR, drawn.arrays.get("d2t"), chosen)
    chained = check_top(results["chain"], biased)
    previous = np.concatenate([[ANCHOR], target_ids(drawn, np.array(chosen[:-1], dtype=int))])
    bias = float(drawn.arrays["conf_proj.bias"][0]) if "conf_proj.bias" in drawn.arrays else 0.0
    wanted = heads.confidence(block.hidden, w1[previous], drawn.arrays["conf_proj.weight"][0], bias)
    assert np.abs(results["confidence"].ravel() - wanted).max() < bound(wanted)
    if drawn.config.draft_horizon == 1:
        assert "pairs" not in results
        return
    candidates = check_top(results["top"], block.logits)
    before = target_ids(drawn, np.concatenate([candidates, chained], axis=1)[:-1])
    wanted = np.einsum("npr,ncr->npc", w1[before].astype(np.float64), w2[candidates[1:]])
    assert np.abs(results["pairs"].reshape(wanted.shape) - wanted).max() < bound(wanted)


def check_selector(drawn: Drawn, block: oracle.Block, results: dict[str, np.ndarray]) -> None:
    """Candidates and the scores of every pair of neighbours."""
    arrays = drawn.arrays
    candidates = target_ids(drawn, check_top(results["top"], block.logits))
    codebooks = arrays["selector_predecessor.weight"], arrays["selector_successor.weight"]
    wanted = heads.selector_scores(block.hidden, candidates, *codebooks, arrays["selector_hidden.weight"], ANCHOR)
    n, k = candidates.shape
    first, rest = results["pairs"][0], results["pairs"][1:].reshape(n - 1, k, k)
    assert np.abs(first - wanted[0, 0]).max() < bound(wanted)
    assert np.abs(rest - wanted[1:]).max(initial=0.0) < bound(wanted)


def check(config: DrafterConfig, seed: int, n_context: int = 19) -> None:
    drawn = Drawn.from_seed(config, seed, n_context)
    block, results = reference_block(drawn), run(drawn)
    if config.kind == "dspark":
        check_markov(drawn, block, results)
    elif config.kind == "dflash2":
        check_selector(drawn, block, results)
    else:
        check_top(results["top"], block.logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_block_equals_the_reference(kind: str, option: str) -> None:
    """Every option with every kind: ids, log-probabilities, and what the kind's heads add."""
    check(replace(KINDS[kind], **OPTIONS[option]), seed=len(option))


@pytest.mark.parametrize("n_context", [1, 5, 6, 7, 12, 24])
def test_window_at_its_edges(n_context: int) -> None:
    """Contexts shorter than, equal to, and several times the window of 6."""
    check(replace(DFLASH, **SLIDING), seed=n_context, n_context=n_context)


def test_a_window_changes_the_block() -> None:
    """A sliding layer run dense would pass unnoticed if the test data could not tell."""
    dense, sliding = (Drawn.from_seed(replace(DFLASH, **o), 3, 19) for o in ({}, SLIDING))

    assert np.abs(reference_block(dense).logits - reference_block(sliding).logits).max() > 0.1


@pytest.mark.parametrize(("taps", "group_size"), [(1, 8), (2, 1), (3, 32), (4, 16), (7, 4)])
def test_convolution_sizes(taps: int, group_size: int) -> None:
    """One tap to more taps than slots; one group to one group a channel."""
    check(replace(DFLASH2, conv_taps=taps, conv_group_size=group_size), seed=taps)


@pytest.mark.parametrize("changes", [{"sample_from_anchor": False}, {"has_confidence_bias": False}])
def test_dspark_variants(changes: dict[str, bool]) -> None:
    """Slot 0 that does not predict; a confidence head without bias."""
    check(replace(DSPARK, **changes), seed=2)


@pytest.mark.parametrize("kind", ["dspark", "dflash2"])
def test_tokens_the_heads_do_not_know_are_not_drafted(kind: str) -> None:
    """An output head with more rows than the codebooks (padding of the target's vocabulary), all of them likely."""
    drawn = Drawn.from_seed(KINDS[kind], 9, 15)
    padded = replace_head(drawn, np.concatenate([drawn.head, 9 * drawn.head[:14]]))
    block, results = reference_block(drawn), run(padded)
    if kind == "dspark":
        check_markov(drawn, block, results)
    else:
        check_selector(drawn, block, results)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_with_fewer_rows_than_the_tables(kind: str) -> None:
    """The other way round: what the target cannot say is not drafted."""
    drawn = Drawn.from_seed(KINDS[kind], 10, 15)
    shorter = replace_head(drawn, drawn.head[:40])
    if kind == "dspark":
        shorter.arrays["markov_w2.weight"] = drawn.arrays["markov_w2.weight"][:40]
    block, results = reference_block(shorter), run(replace_head(drawn, drawn.head[:40]))
    if kind == "dspark":
        check_markov(shorter, block, results)
    elif kind == "dflash2":
        check_selector(shorter, block, results)
    else:
        check_top(results["top"], block.logits)


def replace_head(drawn: Drawn, head: np.ndarray) -> Drawn:
    """The same drafter with another output head."""
    return Drawn(drawn.config, dict(drawn.arrays), drawn.embeddings, head, drawn.features)


def test_a_chain_needs_no_candidates() -> None:
    """With one token a slot nothing is computed for trees, and nothing changes."""
    drawn = Drawn.from_seed(DSPARK, 5, 11)
    alone, wide = run(drawn, top_k=1), run(drawn, top_k=4)

    assert sorted(alone) == ["chain", "confidence"]
    assert alone["chain"][:, 0].tolist() == wide["chain"][:, 0].tolist()
    assert np.array_equal(alone["confidence"], wide["confidence"])


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_no_bit(kind: str) -> None:
    drawn = Drawn.from_seed(KINDS[kind], 8, 33)
    one, two = run(drawn), run(drawn, n_threads=2)

    assert all(np.array_equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(("kv_type", "error"), [(F16, 3e-2), (Q8_0, 0.3)])
def test_smaller_caches(kv_type: Any, error: float) -> None:
    """Ten bits of mantissa, and 8-bit blocks: log-probabilities move by about as much as keys and values do."""
    drawn = Drawn.from_seed(DFLASH, 4, 40)
    ids, values = ids_and_values(run(drawn, top_k=8, kv_type=kv_type)["top"])
    wanted = np.take_along_axis(heads.log_softmax(reference_block(drawn).logits), ids, axis=1)

    assert np.abs(values - wanted).max() < error


@pytest.mark.parametrize("kind", KINDS)
def test_rotated_keys_change_only_the_rounding(kind: str) -> None:
    """Context and block keys and the queries are rotated alike, so their products are what they were."""
    drawn = Drawn.from_seed(replace(KINDS[kind], **SLIDING), 6, 21)
    block, results = reference_block(drawn), run(drawn, rotates_keys=True)
    if kind == "dspark":
        check_markov(drawn, block, results)
    else:
        check_top(results["top"], block.logits)


def test_rotation_spreads_keys_that_stick_out() -> None:
    """One value of a head 60 times the others costs the others their bits in a block of 8-bit keys; spread, it does
    not: an error at most half as large (found: a fifth)."""
    drawn = Drawn.from_seed(DFLASH, 4, 40)
    for layer in range(DFLASH.n_layers):
        drawn.arrays[f"blk.{layer}.attn_k_norm.weight"][3] = 60.0
        drawn.arrays[f"blk.{layer}.attn_q_norm.weight"][3] = 0.02
    wanted = heads.log_softmax(reference_block(drawn).logits)
    errors = []
    for rotates_keys in (False, True):
        ids, values = ids_and_values(run(drawn, top_k=8, kv_type=Q8_0, rotates_keys=rotates_keys)["top"])
        errors.append(np.abs(values - np.take_along_axis(wanted, ids, axis=1)).mean())

    assert errors[1] < errors[0] / 2
