"""Drafter configurations: three kinds, two dialects, and every rule checked on files that break it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_samples import DRAFTER, drafter_keys, drafter_weights, lucebox_keys, write_drafter, write_gguf

from pyggml_spec.assets import embedded_drafter_path
from pyggml_spec.errors import ModelFileError
from pyggml_spec.gguf_io import canonical_tensors, drafter_tensors, open_gguf, read_drafter_config
from pyggml_spec.records import DrafterConfig, RopeScaling

DSPARK = replace(
    DRAFTER,
    kind="dspark",
    sample_from_anchor=True,
    has_confidence_head=True,
    has_confidence_bias=True,
    markov_rank=4,
)
DFLASH2 = replace(DRAFTER, kind="dflash2", conv_taps=2, conv_group_size=4, selector_rank=4, selector_top_k=3)
KINDS = {"dflash": DRAFTER, "dspark": DSPARK, "dflash2": DFLASH2}

LUCEBOX_NAMES = {
    "fc.weight": "dflash.fc.weight",
    "enc.output_norm.weight": "dflash.hidden_norm.weight",
    "markov_w1.weight": "dflash.dspark.markov.w1",
    "markov_w2.weight": "dflash.dspark.markov.w2",
    "conf_proj.weight": "dflash.dspark.confidence.weight",
    "conf_proj.bias": "dflash.dspark.confidence.bias",
    "selector_hidden.weight": "dflash.selector.hproj.weight",
    "selector_predecessor.weight": "dflash.selector.pred_cb",
    "selector_successor.weight": "dflash.selector.succ_cb",
}


def lucebox_name(name: str) -> str:
    """The name a dialect-B file gives to a tensor."""
    for ours, theirs in (("_conv_base", "_conv.base"), ("_conv_proj.", "_conv.proj.")):
        name = name.replace(ours, theirs)
    return LUCEBOX_NAMES.get(name, name)


def write_lucebox(path: Path, config: DrafterConfig, keys: dict[str, Any] | None = None) -> Path:
    """Write a tiny dialect-B drafter, with other keys (None removes one)."""
    tensors = {lucebox_name(name): array for name, array in drafter_weights(config).items()}
    changed = {key: value for key, value in (lucebox_keys(config) | (keys or {})).items() if value is not None}
    return write_gguf(path, "qwen35-dflash-draft", changed, tensors)


def read(path: Path) -> DrafterConfig:
    """The configuration of a drafter file, with eps as the tests write it instead of its 32-bit neighbour."""
    with open_gguf(path) as file:
        config = read_drafter_config(file)
        assert drafter_tensors(config).keys() == canonical_tensors(file).keys()
    assert config.norm_eps == np.float32(1e-6)
    return replace(config, norm_eps=1e-6)


def refusal(path: Path) -> str:
    """The message with which reading a drafter fails."""
    with pytest.raises(ModelFileError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message and path.name in message
    return message


@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_dialect(tmp_path: Path, kind: str) -> None:
    """All fields of all kinds; `target_layers` counts inputs, so the stored numbers are one higher."""
    assert read(write_drafter(tmp_path / "a.gguf", KINDS[kind])) == KINDS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_lucebox_dialect(tmp_path: Path, kind: str) -> None:
    """The same drafter in the other dialect gives the same configuration and the same tensor names."""
    assert read(write_lucebox(tmp_path / "b.gguf", KINDS[kind])) == replace(KINDS[kind], dialect="lucebox")


def test_embedded_drafter() -> None:
    """The embedded drafter is the one its card describes."""
    config = read(embedded_drafter_path())

    assert (config.kind, config.n_layers, config.draft_block_size, config.draft_horizon) == ("dflash2", 3, 8, 7)
    assert (config.conv_taps, config.conv_group_size, config.selector_rank, config.selector_top_k) == (2, 16, 64, 8)
    assert (config.target_layer_ids, config.mask_token_id, config.n_embd_target) == ((1, 5, 9, 13), 8187, 256)


def test_unusual_mask_token(tmp_path: Path) -> None:
    """The id comes from the file, under whichever of the dialect's keys it has."""
    usual, other = "tokenizer.ggml.mask_token_id", "dflash.mask_token_id"
    assert read(write_drafter(tmp_path / "a.gguf", keys={usual: 3})).mask_token_id == 3
    assert read(write_drafter(tmp_path / "b.gguf", keys={usual: None, other: 4})).mask_token_id == 4
    key = "qwen35-dflash-draft.dflash.mask_token_id"
    assert read(write_lucebox(tmp_path / "c.gguf", DRAFTER, {key: None, usual: 5})).mask_token_id == 5


def test_contradicting_mask_tokens(tmp_path: Path) -> None:
    """Two different ids in one file are refused."""
    assert "holds 4" in refusal(write_drafter(tmp_path / "a.gguf", keys={"dflash.mask_token_id": 4}))


def test_last_layer_can_be_named_by_lucebox(tmp_path: Path) -> None:
    """Dialect B counts outputs, so its numbers are taken as they are."""
    config = replace(DRAFTER, target_layer_ids=(0, 3))
    assert read(write_lucebox(tmp_path / "b.gguf", config)).target_layer_ids == (0, 3)


def test_sliding_window(tmp_path: Path) -> None:
    """Window and per-layer pattern come from the file; a pattern without a window means nothing slides."""
    window, pattern = "dflash.attention.sliding_window", "dflash.attention.sliding_window_pattern"
    sliding = read(write_drafter(tmp_path / "a.gguf", keys={window: 32, pattern: [True, False]}))
    dense = read(write_drafter(tmp_path / "b.gguf", keys={window: 32, pattern: [False, False]}))

    assert (sliding.sliding_window, sliding.sliding_layers) == (32, (True, False))
    assert (dense.sliding_window, dense.sliding_layers) == (0, ())
    assert f"'{pattern}'" in refusal(write_drafter(tmp_path / "c.gguf", keys={window: 32}))
    assert f"'{pattern}'" in refusal(write_drafter(tmp_path / "d.gguf", keys={window: 32, pattern: [True]}))


def test_yarn(tmp_path: Path) -> None:
    """YaRN's numbers are read in both dialects; an explicit attention factor replaces YaRN's own."""
    p = "dflash.rope.scaling."
    keys = {p + "type": "yarn", p + "factor": 4.0, p + "original_context_length": 512}
    explicit = keys | {p + "yarn_attn_factor": 1.0, p + "yarn_beta_fast": 16.0, p + "yarn_beta_slow": 2.0}

    assert read(write_drafter(tmp_path / "a.gguf", keys=keys)).rope_scaling == RopeScaling(4.0, 512)
    scaling = read(write_drafter(tmp_path / "b.gguf", keys=explicit)).rope_scaling
    assert scaling == RopeScaling(4.0, 512, 16.0, 2.0, attention_factor=1.0 / (1.0 + 0.1 * math.log(4.0)))
    p = "qwen35-dflash-draft.rope.scaling."
    lucebox = {p + "factor": 8.0, p + "original_context_length": 64}
    assert read(write_lucebox(tmp_path / "c.gguf", DRAFTER, lucebox)).rope_scaling == RopeScaling(8.0, 64)


def test_no_scaling(tmp_path: Path) -> None:
    """A linear factor of one scales nothing."""
    p = "dflash.rope.scaling."
    for number, keys in enumerate(({p + "type": "none"}, {p + "type": "linear", p + "factor": 1.0})):
        assert read(write_drafter(tmp_path / f"{number}.gguf", keys=keys)).rope_scaling is None


def test_own_head_and_reduced_vocabulary(tmp_path: Path) -> None:
    """A d2t table makes the head smaller than the target's vocabulary, and its ids are checked."""
    config = replace(DRAFTER, has_own_head=True, has_reduced_vocabulary=True, n_vocab=6)
    tensors = drafter_weights(config) | {"d2t": np.array([0, 5, 7, 9, 11, 39])}
    assert read(write_gguf(tmp_path / "a.gguf", "dflash", drafter_keys(config), tensors)) == config
    for number, ids in enumerate(([0, 5, 7, 9, 11, 40], [0, 5, 7, 9, 11, -1], [0, 5, 7, 9, 11, 11])):
        path = write_gguf(tmp_path / f"{number}.gguf", "dflash", drafter_keys(config), tensors | {"d2t": np.array(ids)})
        assert "'d2t'" in refusal(path)
    del tensors["output.weight"]
    assert "no output.weight" in refusal(write_gguf(tmp_path / "b.gguf", "dflash", drafter_keys(config), tensors))


def test_own_embeddings(tmp_path: Path) -> None:
    """A drafter with its own table needs no vocabulary in its file."""
    config = replace(DRAFTER, has_own_embeddings=True, has_own_head=True)
    keys = {"tokenizer.ggml.tokens": None, "tokenizer.ggml.merges": None, "tokenizer.ggml.token_type": None}
    assert read(write_drafter(tmp_path / "a.gguf", config, keys)) == config


def test_dspark_without_confidence_head(tmp_path: Path) -> None:
    """The head is optional, but a file that promises it must have it."""
    config = replace(DSPARK, has_confidence_head=False, has_confidence_bias=False)
    path = write_drafter(tmp_path / "a.gguf", config, {"dflash.has_confidence_head": False})
    assert read(path) == config
    assert "'conf_proj.weight'" in refusal(write_drafter(tmp_path / "b.gguf", config))


def test_dspark_horizon(tmp_path: Path) -> None:
    """A drafter that predicts from the anchor drafts its whole block; files without the key do that."""
    anchored = read(write_drafter(tmp_path / "a.gguf", DSPARK, {"dflash.sample_from_anchor": None}))
    other = read(write_drafter(tmp_path / "b.gguf", DSPARK, {"dflash.sample_from_anchor": False}))
    assert (anchored.draft_horizon, other.draft_horizon) == (4, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_keys(tmp_path: Path, kind: str) -> None:
    """Every key without a neutral meaning is required and named."""
    optional = ("context_length", "dimension_sections", "sample_from_anchor", "has_confidence_head")
    for key in drafter_keys(KINDS[kind]):
        if key.startswith("dflash.") and not key.endswith(optional):
            assert f"'{key}'" in refusal(write_drafter(tmp_path / f"{key}.gguf", KINDS[kind], {key: None}))
    assert "mask_token_id" in refusal(write_drafter(tmp_path / "m.gguf", keys={"tokenizer.ggml.mask_token_id": None}))


BAD_KEYS: dict[str, tuple[str, dict[str, Any]]] = {
    "block of one": ("dflash", {"dflash.block_size": 1}),
    "huge block": ("dflash", {"dflash.block_size": 10_000}),
    "layer input 0": ("dflash", {"dflash.target_layers": [0, 3]}),
    "no layers": ("dflash", {"dflash.target_layers": 3}),
    "layer twice": ("dflash", {"dflash.target_layers": [1, 1]}),
    "features that do not divide": ("dflash", {"dflash.target_layers": [1, 2, 3]}),
    "another section": ("dflash", {"dflash.rope.dimension_sections": [2, 2, 0, 0]}),
    "odd rotation": ("dflash", {"dflash.rope.dimension_count": 7}),
    "another scaling": ("dflash", {"dflash.rope.scaling.type": "longrope"}),
    "linear scaling": ("dflash", {"dflash.rope.scaling.type": "linear", "dflash.rope.scaling.factor": 2.0}),
    "yarn without context": ("dflash", {"dflash.rope.scaling.type": "yarn", "dflash.rope.scaling.factor": 2.0}),
    "activation": ("dflash", {"dflash.hidden_activation": "gelu"}),
    "attention scale": ("dflash", {"dflash.attention.value_scale": 2.0}),
    "hyper connections": ("dflash", {"dflash.hyper_connection_count": 4}),
    "group size 0": ("dflash2", {"dflash.conv_group_size": 0}),
    "group size that does not divide": ("dflash2", {"dflash.conv_group_size": 3}),
    "selector wider than a top-k": ("dflash2", {"dflash.selector_top_k": 17}),
    "taps": ("dflash2", {"dflash.conv_kernel_size": 3}),
    "rank": ("dflash2", {"dflash.selector_rank": 5}),
}


@pytest.mark.parametrize("name", BAD_KEYS)
def test_bad_key(tmp_path: Path, name: str) -> None:
    """A value that breaks a rule is refused."""
    kind, keys = BAD_KEYS[name]
    refusal(write_drafter(tmp_path / "a.gguf", KINDS[kind], keys))


def test_lucebox_layer_count(tmp_path: Path) -> None:
    """The number of target layers and their list must agree; without the list nothing is guessed."""
    p = "qwen35-dflash-draft.dflash."
    assert "names 2 layers" in refusal(write_lucebox(tmp_path / "a.gguf", DRAFTER, {p + "n_target_layers": 5}))
    assert "target_layer_ids" in refusal(write_lucebox(tmp_path / "b.gguf", DRAFTER, {p + "target_layer_ids": None}))


def test_two_spellings_of_one_tensor(tmp_path: Path) -> None:
    """Which of them would count is not guessed."""
    tensors = {lucebox_name(name): array for name, array in drafter_weights().items()}
    tensors |= {"fc.weight": tensors["dflash.fc.weight"]}
    path = write_gguf(tmp_path / "b.gguf", "qwen35-dflash-draft", lucebox_keys(DRAFTER), tensors)
    assert "two spellings" in refusal(path)


@pytest.mark.parametrize("kind", KINDS)
def test_every_shape_is_checked(tmp_path: Path, kind: str) -> None:
    """Of every layer and head, against the keys."""
    config = KINDS[kind]
    table = drafter_weights(config)
    for name, array in table.items():
        wrong = np.zeros((array.shape[0], array.shape[-1] + 1) if array.ndim > 1 else array.shape[0] + 1, np.float32)
        path = write_gguf(tmp_path / "a.gguf", "dflash", drafter_keys(config), table | {name: wrong})
        refusal(path)


def test_no_drafter(tmp_path: Path) -> None:
    """A target passed as a drafter is refused by name, and so are both heads at once."""
    target = write_gguf(tmp_path / "a.gguf", "qwen35", drafter_keys(), drafter_weights())
    two_heads = drafter_weights(DFLASH2) | drafter_weights(DSPARK)
    both = write_gguf(tmp_path / "b.gguf", "dflash", drafter_keys(DFLASH2), two_heads)

    assert "no supported drafter" in refusal(target)
    assert "both" in refusal(both)
