"""Target configurations: every rule of the file format, checked on files that break it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_samples import TARGET, target_keys, target_weights, write_gguf, write_target

from pyggml_spec.assets import embedded_target_path
from pyggml_spec.errors import ModelFileError
from pyggml_spec.gguf_io import open_gguf, read_target_config, target_tensors
from pyggml_spec.records import TargetConfig


def read(path: Path) -> TargetConfig:
    """The configuration of a target file; eps and theta as the file's 32-bit floats hold them."""
    with open_gguf(path) as file:
        return read_target_config(file)


def refusal(path: Path) -> str:
    """The message with which reading a target fails."""
    with pytest.raises(ModelFileError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message and path.name in message
    return message


def test_all_fields(tmp_path: Path) -> None:
    """The configuration is the one the file was written from."""
    config = read(write_target(tmp_path / "target.gguf"))

    assert replace(config, norm_eps=TARGET.norm_eps) == TARGET
    assert config.norm_eps == np.float32(TARGET.norm_eps)
    assert config.n_conv_channels == 8 * (2 * 1 + 2)


def test_embedded_target() -> None:
    """The embedded model is the one its card describes."""
    config = read(embedded_target_path())

    assert (config.n_layers, config.n_embd, config.n_vocab, config.tied_embeddings) == (16, 256, 8192, True)
    assert [layer for layer, is_recurrent in enumerate(config.recurrent_layers) if not is_recurrent] == [3, 7, 11, 15]
    assert (config.rope_dims, config.rope_sections) == (16, (3, 3, 2, 0))
    assert (config.n_heads_k, config.n_heads_v, config.state_size, config.conv_taps) == (4, 8, 64, 4)


def test_separate_output_head(tmp_path: Path) -> None:
    """A file with an output.weight has a head of its own."""
    config = replace(TARGET, tied_embeddings=False)
    path = write_target(tmp_path / "target.gguf", tensors=target_weights(config))
    assert not read(path).tied_embeddings


def test_recurrent_layers_as_integers_or_interval(tmp_path: Path) -> None:
    """Both spellings of the layer kinds are read, and the list wins over the interval."""
    key = "qwen35.attention.recurrent_layers"
    integers = write_target(tmp_path / "a.gguf", {key: [1, 1, 1, 0], "qwen35.full_attention_interval": 2})
    interval = write_target(tmp_path / "b.gguf", {key: None, "qwen35.full_attention_interval": 4})

    assert read(integers).recurrent_layers == read(interval).recurrent_layers == (True, True, True, False)


def test_head_counts_per_layer(tmp_path: Path) -> None:
    """llama.cpp may store one count per layer."""
    path = write_target(tmp_path / "target.gguf", {"qwen35.attention.head_count_kv": [1, 1, 1, 1]})
    assert read(path).n_heads_kv == 1


def test_prediction_blocks_are_skipped(tmp_path: Path) -> None:
    """Multi-token-prediction blocks follow the trunk; their tensors are not the target's."""
    keys = {
        "qwen35.block_count": 5,
        "qwen35.nextn_predict_layers": 1,
        "qwen35.attention.recurrent_layers": [True, True, True, False, False],
    }
    extra = {"blk.4.nextn.eh_proj.weight": np.zeros((16, 32), np.float32)}
    config = read(write_target(tmp_path / "target.gguf", keys, tensors=target_weights() | extra))

    assert config.n_layers == 4
    assert not any(name.startswith("blk.4.") for name in target_tensors(config))


@pytest.mark.parametrize("architecture", ["qwen35moe", "llama", "dflash", "qwen35-dflash-draft"])
def test_other_architectures(tmp_path: Path, architecture: str) -> None:
    """What is not supported is refused by name."""
    path = write_gguf(tmp_path / "other.gguf", architecture, target_keys(), target_weights())
    assert f"architecture '{architecture}'" in refusal(path)


def test_no_architecture(tmp_path: Path) -> None:
    """A file without the key says so."""
    path = write_target(tmp_path / "target.gguf")
    content = path.read_bytes().replace(b"general.architecture", b"general.architektur_")
    path.write_bytes(content)
    assert "'general.architecture'" in refusal(path)
    path = write_gguf(tmp_path / "odd.gguf", "qwen\n35" * 1000, target_keys(), target_weights())
    assert "printable name" in refusal(path)


@pytest.mark.parametrize("key", [key for key in target_keys() if key.startswith("qwen35.")])
def test_missing_key(tmp_path: Path, key: str) -> None:
    """No key has a family default: each missing one is named."""
    message = refusal(write_target(tmp_path / "target.gguf", {key: None}))
    named = "qwen35.full_attention_interval" if key.endswith("recurrent_layers") else key
    assert f"'{named}'" in message and "is missing" in message


BAD_KEYS: dict[str, dict[str, Any]] = {
    "no layer": {"qwen35.block_count": 0},
    "too many layers": {"qwen35.block_count": 4_000_000_000},
    "more layers than tensors": {"qwen35.block_count": 8, "qwen35.attention.recurrent_layers": [True] * 8},
    "all layers predict": {"qwen35.nextn_predict_layers": 4},
    "list of another length": {"qwen35.attention.recurrent_layers": [True]},
    "other kinds": {"qwen35.attention.recurrent_layers": [True, True, False, True]},
    "huge width": {"qwen35.embedding_length": 2**31},
    "other width": {"qwen35.embedding_length": 32},
    "heads that do not divide": {"qwen35.attention.head_count": 3, "qwen35.attention.head_count_kv": 2},
    "more kv heads": {"qwen35.attention.head_count_kv": 3},
    "two head sizes": {"qwen35.attention.value_length": 16},
    "rotating more than a head": {"qwen35.rope.dimension_count": 10},
    "three sections": {"qwen35.rope.dimension_sections": [1, 1, 0]},
    "sections beyond the rotated part": {"qwen35.rope.dimension_sections": [2, 1, 0, 0]},
    "no time section": {"qwen35.rope.dimension_sections": [0, 1, 1, 0]},
    "value heads that do not divide": {"qwen35.ssm.group_count": 2, "qwen35.ssm.time_step_rank": 3},
    "inner size": {"qwen35.ssm.inner_size": 17},
    "one conv tap": {"qwen35.ssm.conv_kernel": 1},
    "eps": {"qwen35.attention.layer_norm_rms_epsilon": float("nan")},
    "theta": {"qwen35.rope.freq_base": 0.0},
    "scaled rope": {"qwen35.rope.scaling.type": "yarn", "qwen35.rope.scaling.factor": 4.0},
    "more tokens than rows": {"tokenizer.ggml.tokens": [str(number) for number in range(41)]},
}


@pytest.mark.parametrize("name", BAD_KEYS)
def test_bad_key(tmp_path: Path, name: str) -> None:
    """A value that breaks a rule is refused before anything is allocated."""
    refusal(write_target(tmp_path / "target.gguf", BAD_KEYS[name]))


@pytest.mark.parametrize("name", target_tensors(TARGET))
def test_every_tensor_is_required(tmp_path: Path, name: str) -> None:
    """Of every layer."""
    tensors = target_weights()
    del tensors[name]
    assert f"'{name}'" in refusal(write_target(tmp_path / "target.gguf", tensors=tensors))


@pytest.mark.parametrize("name", target_tensors(TARGET))
def test_every_shape_is_checked(tmp_path: Path, name: str) -> None:
    """Of every layer, against the keys."""
    tensors = target_weights()
    tensors[name] = np.zeros((*tensors[name].shape[:-1], tensors[name].shape[-1] + 1), np.float32)
    message = refusal(write_target(tmp_path / "target.gguf", tensors=tensors))
    assert f"tensor '{name}'" in message and "imply ne=" in message


def test_types(tmp_path: Path) -> None:
    """Norms must be F32, matrices must not be integers, and unknown tensors are not ignored."""
    half, integer, extra = target_weights(), target_weights(), target_weights()
    half["blk.3.attn_q_norm.weight"] = np.zeros(8, np.float16)
    integer["blk.0.ffn_up.weight"] = np.zeros((24, 16), np.int32)
    extra["blk.3.attn_q.scale"] = np.zeros(1, np.float32)

    assert "must be F32" in refusal(write_target(tmp_path / "half.gguf", tensors=half))
    assert "no matrix has that type" in refusal(write_target(tmp_path / "integer.gguf", tensors=integer))
    assert "'blk.3.attn_q.scale'" in refusal(write_target(tmp_path / "extra.gguf", tensors=extra))
