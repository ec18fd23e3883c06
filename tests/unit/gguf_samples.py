"""Tiny GGUF files for tests: written by the `gguf` package, or byte by byte where a file must be wrong."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from pyggml_spec.gguf_io import drafter_tensors, target_tensors
from pyggml_spec.records import DrafterConfig, TargetConfig

F32 = gguf.GGMLQuantizationType.F32

TARGET = TargetConfig(
    architecture="qwen35",
    n_layers=4,
    n_embd=16,
    n_ff=24,
    n_vocab=40,
    n_ctx_train=64,
    n_heads=2,
    n_heads_kv=1,
    head_dim=8,
    norm_eps=1e-6,
    rope_theta=1e6,
    rope_dims=4,
    rope_sections=(1, 1, 0, 0),
    recurrent_layers=(True, True, True, False),
    conv_taps=4,
    state_size=8,
    n_heads_k=1,
    n_heads_v=2,
    tied_embeddings=True,
)
DRAFTER = DrafterConfig(
    kind="dflash",
    dialect="llama.cpp",
    n_layers=2,
    n_embd=16,
    n_ff=24,
    n_heads=2,
    n_heads_kv=1,
    head_dim=8,
    n_vocab=40,
    norm_eps=1e-6,
    rope_theta=1e6,
    rope_scaling=None,
    draft_block_size=4,
    mask_token_id=39,
    target_layer_ids=(0, 2),
    n_embd_target=16,
    n_vocab_target=40,
    n_ctx_train=64,
    rope_dims=8,
)


def target_keys(config: TargetConfig = TARGET) -> dict[str, Any]:
    """Keys of a target file, as llama.cpp's converter writes them."""
    p = "qwen35."
    return {
        p + "block_count": config.n_layers,
        p + "context_length": config.n_ctx_train,
        p + "embedding_length": config.n_embd,
        p + "feed_forward_length": config.n_ff,
        p + "attention.head_count": config.n_heads,
        p + "attention.head_count_kv": config.n_heads_kv,
        p + "attention.key_length": config.head_dim,
        p + "attention.value_length": config.head_dim,
        p + "attention.layer_norm_rms_epsilon": config.norm_eps,
        p + "attention.recurrent_layers": list(config.recurrent_layers),
        p + "rope.freq_base": config.rope_theta,
        p + "rope.dimension_count": config.rope_dims,
        p + "rope.dimension_sections": list(config.rope_sections),
        p + "ssm.conv_kernel": config.conv_taps,
        p + "ssm.inner_size": config.state_size * config.n_heads_v,
        p + "ssm.state_size": config.state_size,
        p + "ssm.time_step_rank": config.n_heads_v,
        p + "ssm.group_count": config.n_heads_k,
        **vocabulary_keys(config.n_vocab),
    }


def drafter_keys(config: DrafterConfig = DRAFTER) -> dict[str, Any]:
    """Keys of a dialect-A drafter file, as llama.cpp's converter writes them."""
    p = "dflash."
    keys = _shared_drafter_keys(config, p) | {
        p + "block_size": config.draft_block_size,
        p + "target_layers": [layer + 1 for layer in config.target_layer_ids],
        p + "rope.dimension_sections": [config.head_dim // 2, 0, 0, 0],
        **vocabulary_keys(config.n_vocab_target),
        "tokenizer.ggml.mask_token_id": config.mask_token_id,
    }
    if config.kind == "dspark":
        keys |= {p + "sample_from_anchor": config.sample_from_anchor, p + "has_confidence_head": True}
    if config.kind == "dflash2":
        keys |= _dflash2_keys(config, p)
    return keys


def lucebox_keys(config: DrafterConfig) -> dict[str, Any]:
    """Keys of a dialect-B drafter file, as lucebox's converter writes them: no vocabulary."""
    p = "qwen35-dflash-draft."
    keys = _shared_drafter_keys(config, p) | {
        p + "vocab_size": config.n_vocab_target,
        p + "dflash.n_target_layers": len(config.target_layer_ids),
        p + "dflash.block_size": config.draft_block_size,
        p + "dflash.mask_token_id": config.mask_token_id,
        p + "dflash.target_layer_ids": list(config.target_layer_ids),
    }
    return keys | (_dflash2_keys(config, p + "dflash.dflash2.") if config.kind == "dflash2" else {})


def _shared_drafter_keys(config: DrafterConfig, p: str) -> dict[str, Any]:
    return {
        p + "block_count": config.n_layers,
        p + "context_length": config.n_ctx_train,
        p + "embedding_length": config.n_embd,
        p + "feed_forward_length": config.n_ff,
        p + "attention.head_count": config.n_heads,
        p + "attention.head_count_kv": config.n_heads_kv,
        p + "attention.key_length": config.head_dim,
        p + "attention.value_length": config.head_dim,
        p + "attention.layer_norm_rms_epsilon": config.norm_eps,
        p + "rope.freq_base": config.rope_theta,
    }


def _dflash2_keys(config: DrafterConfig, p: str) -> dict[str, Any]:
    return {
        p + "conv_kernel_size": config.conv_taps,
        p + "conv_group_size": config.conv_group_size,
        p + "selector_rank": config.selector_rank,
        p + "selector_top_k": config.selector_top_k,
    }


def vocabulary_keys(n_tokens: int) -> dict[str, Any]:
    """A byte-level vocabulary: single letters, one merge, and a control token at the end."""
    letters = [chr(0x21 + number) for number in range(n_tokens - 2)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": [*letters, letters[0] + letters[1], "<|end|>"],
        "tokenizer.ggml.merges": [f"{letters[0]} {letters[1]}"],
        "tokenizer.ggml.token_type": [1] * (n_tokens - 1) + [3],
        "tokenizer.ggml.eos_token_id": n_tokens - 1,
    }


def target_weights(config: TargetConfig = TARGET) -> dict[str, np.ndarray]:
    """Zeros of every shape of a target, (rows, cols)."""
    return _zeros(target_tensors(config))


def drafter_weights(config: DrafterConfig = DRAFTER) -> dict[str, np.ndarray]:
    """Zeros of every shape of a drafter, (rows, cols)."""
    return _zeros(drafter_tensors(config))


def _zeros(table: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    kinds = {"d2t": np.int64}
    return {name: np.zeros(tuple(reversed(ne)), kinds.get(name, np.float32)) for name, ne in table.items()}


def write_gguf(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    alignment: int = 0,
    max_tensors_per_shard: int = 0,
) -> Path:
    """Write a file (or shards) with the `gguf` package; the Python type of a value chooses its GGUF type."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=max_tensors_per_shard)
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, value in keys.items():
        _add_key(writer, key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {
        bool: writer.add_bool,
        int: writer.add_int32 if isinstance(value, int) and value < 0 else writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    add[type(value)](key, value)


def write_target(path: Path, keys: Mapping[str, Any] | None = None, **options: Any) -> Path:
    """Write the tiny target, with other keys (None removes one) or tensors (`tensors=`)."""
    tensors = options.pop("tensors", None) or target_weights()
    return write_gguf(path, "qwen35", _changed(target_keys(), keys), tensors, **options)


def write_drafter(path: Path, config: DrafterConfig = DRAFTER, keys: Mapping[str, Any] | None = None) -> Path:
    """Write a tiny dialect-A drafter, with other keys (None removes one)."""
    return write_gguf(path, "dflash", _changed(drafter_keys(config), keys), drafter_weights(config))


def _changed(keys: dict[str, Any], changes: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (keys | dict(changes or {})).items() if value is not None}


def text(value: bytes) -> bytes:
    """A GGUF string."""
    return struct.pack("<Q", len(value)) + value


def u32_key(name: bytes, value: int) -> bytes:
    """A key with an unsigned 32-bit value."""
    return text(name) + struct.pack("<II", gguf.GGUFValueType.UINT32, value)


def tensor_entry(name: bytes, ne: tuple[int, ...], offset: int = 0, kind: int = F32) -> bytes:
    """A tensor's header entry."""
    return text(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, kind, offset)


def raw_gguf(
    keys: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    """A file put together by hand: header, entries as given, padding to 32 bytes, data."""
    counts = (len(tensors) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys)
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % 32) + data
