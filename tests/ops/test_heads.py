"""Drafter graphs against float64: selector, Markov chain and confidence, and every option of the trunk.

Bounds: f32 arithmetic, some ten products of 30 to 70 terms one after the other, each with a rounding error of a few
units of the largest value. ROUNDING allows 128 units; of 228 cases (4 seeds) five needed more than 32, none 64. On a
GPU comes on top what factors of 11 bits may do to the very case (`reference/rounding.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from native_helpers import Harness
from reference import drafter as oracle
from reference import heads
from reference.rounding import Arrays, errors_of_11_bits
from tiny_drafter import DFLASH, DFLASH2, DSPARK, Drawn, TinyDrafter, ids_and_values

from pyggml_spec.ggml import F16, Q8_0
from pyggml_spec.records import DrafterConfig, RopeScaling

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("device")]

ANCHOR = 7
ROUNDING = 128 * 2.0**-24
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


def oracle_arrays(drawn: Drawn) -> Arrays:
    """Everything the oracle multiplies, in float64; the tables under the names of a drafter's own."""
    tables = {"token_embd.weight": drawn.embeddings, "output.weight": drawn.head, "features": drawn.features}
    arrays = {**drawn.arrays, **tables}
    return {name: a.astype(np.float64) if a.dtype.kind == "f" else a for name, a in arrays.items()}


def reference_block(config: DrafterConfig, arrays: Arrays) -> oracle.Block:
    embeddings, head = arrays["token_embd.weight"], arrays["output.weight"]
    return oracle.draft(config, arrays, embeddings, head, arrays["features"], ANCHOR)


def reference_logits(drawn: Drawn) -> np.ndarray:
    return reference_block(drawn.config, oracle_arrays(drawn)).logits


def run(drawn: Drawn, top_k: int = 4, **options: Any) -> Arrays:
    with TinyDrafter(drawn, **options) as tiny:
        return tiny.run(ANCHOR, top_k)


def check_results(drawn: Drawn, results: Arrays) -> None:
    """Ids and log-probabilities of the best of each row, and the numbers of the kind's heads, each within its bound."""
    wanted, errors = expected_values(drawn.config, oracle_arrays(drawn), results), device_errors(drawn, results)
    assert wanted.keys() == results.keys()
    for name, values in wanted.items():
        error = errors[name] + ROUNDING * max(1.0, float(np.abs(values).max()))
        if name in ("top", "chain"):
            heads.check_best(*ids_and_values(results[name]), values, error)
        else:
            assert np.abs(results[name].reshape(values.shape) - values).max(initial=0.0) < error, name


def device_errors(drawn: Drawn, results: Arrays) -> dict[str, float]:
    """Allowed beyond f32 rounding, by result."""
    if Harness.device == "CPU":
        return dict.fromkeys(results, 0.0)
    return errors_of_11_bits(lambda arrays: expected_values(drawn.config, arrays, results), oracle_arrays(drawn))


def expected_values(config: DrafterConfig, arrays: Arrays, results: Arrays) -> Arrays:
    """Results of a drafter of these arrays, given the choices made in `results`; logits for "top" and "chain"."""
    block = reference_block(config, arrays)
    if config.kind == "dspark":
        return expected_of_markov(config, arrays, block, results)
    if config.kind == "dflash2":
        candidates = target_ids(arrays, ids_and_values(results["top"])[0])
        codebooks = [arrays[f"selector_{name}.weight"] for name in ("predecessor", "successor", "hidden")]
        scores = heads.selector_scores(block.hidden, candidates, *codebooks, ANCHOR)
        k = scores.shape[-1]
        pairs = np.concatenate([scores[0, :1], scores[1:].reshape(-1, k)])
        return {"top": block.logits, "pairs": pairs}
    return {"top": block.logits}


def expected_of_markov(config: DrafterConfig, arrays: Arrays, block: oracle.Block, results: Arrays) -> Arrays:
    """Chain, confidence along it, unconditioned candidates, and biases between neighbours."""
    w1, w2 = arrays["markov_w1.weight"], arrays["markov_w2.weight"]
    chained = ids_and_values(results["chain"])[0]
    chosen = chained[:, 0].tolist()
    biased, _ = heads.markov_chain(block.logits, w1, w2, ANCHOR, arrays.get("d2t"), chosen)
    previous = np.concatenate([[ANCHOR], target_ids(arrays, np.array(chosen[:-1], dtype=int))])
    bias = float(arrays["conf_proj.bias"][0]) if "conf_proj.bias" in arrays else 0.0
    confidence = heads.confidence(block.hidden, w1[previous], arrays["conf_proj.weight"][0], bias)
    if config.draft_horizon == 1:
        return {"chain": biased, "confidence": confidence}
    candidates = ids_and_values(results["top"])[0]
    before = target_ids(arrays, np.concatenate([candidates, chained], axis=1)[:-1])
    pairs = w1[before] @ w2[candidates[1:]].swapaxes(1, 2)
    return {"chain": biased, "confidence": confidence, "top": block.logits, "pairs": pairs}


def target_ids(arrays: Arrays, ids: np.ndarray) -> np.ndarray:
    return arrays["d2t"][ids] if "d2t" in arrays else ids


def check(config: DrafterConfig, seed: int, n_context: int = 19) -> None:
    drawn = Drawn.from_seed(config, seed, n_context)
    check_results(drawn, run(drawn))


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

    assert np.abs(reference_logits(dense) - reference_logits(sliding)).max() > 0.1


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

    check_results(drawn, run(padded))


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_with_fewer_rows_than_the_tables(kind: str) -> None:
    """The other way round: what the target cannot say is not drafted."""
    drawn = Drawn.from_seed(KINDS[kind], 10, 15)
    shorter = replace_head(drawn, drawn.head[:40])
    if kind == "dspark":
        shorter.arrays["markov_w2.weight"] = drawn.arrays["markov_w2.weight"][:40]

    check_results(shorter, run(replace_head(drawn, drawn.head[:40])))


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
    results = run(drawn, top_k=8, kv_type=kv_type)
    ids, values = ids_and_values(results["top"])
    wanted = np.take_along_axis(heads.log_softmax(reference_logits(drawn)), ids, axis=1)

    assert np.abs(values - wanted).max() < error + device_errors(drawn, results)["top"]


@pytest.mark.parametrize("kind", KINDS)
def test_rotated_keys_change_only_the_rounding(kind: str) -> None:
    """Context and block keys and the queries are rotated alike, so their products are what they were."""
    drawn = Drawn.from_seed(replace(KINDS[kind], **SLIDING), 6, 21)

    check_results(drawn, run(drawn, rotates_keys=True))


def test_rotation_spreads_keys_that_stick_out() -> None:
    """One value of a head 60 times the others costs the others their bits in a block of 8-bit keys; spread, it does
    not: an error at most half as large (found: a fifth; factors of 11 bits would add a twentieth)."""
    errors = {False: 0.0, True: 0.0}
    for seed in range(4):
        drawn = Drawn.from_seed(DFLASH, seed, 40)
        for layer in range(DFLASH.n_layers):
            drawn.arrays[f"blk.{layer}.attn_k_norm.weight"][3] = 60.0
            drawn.arrays[f"blk.{layer}.attn_q_norm.weight"][3] = 0.02
        wanted = heads.log_softmax(reference_logits(drawn))
        for rotates_keys in errors:
            ids, values = ids_and_values(run(drawn, top_k=8, kv_type=Q8_0, rotates_keys=rotates_keys)["top"])
            errors[rotates_keys] += np.abs(values - np.take_along_axis(wanted, ids, axis=1)).mean()

    assert errors[True] < errors[False] / 2
