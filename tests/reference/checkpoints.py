"""Checkpoints in Hugging Face layout, derived from GGUF files by undoing what a converter does, head by head."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

QWEN35_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TOP = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
}
_PLAIN = ("single_word", "lstrip", "rstrip", "normalized")
_DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int64": "I64"}

Tensors = dict[str, np.ndarray]


def to_bf16(values: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 of every f32 value, as uint16 words (ties to even)."""
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """One file; uint16 arrays are bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, values in tensors.items():
        ends = [offset, offset + values.nbytes]
        header[name] = {"dtype": _DTYPES[values.dtype.name], "shape": list(values.shape), "data_offsets": ends}
        offset = ends[1]
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for values in tensors.values():
            file.write(np.ascontiguousarray(values).tobytes())


def write_checkpoint(directory: Path, config: Mapping[str, Any], tensors: Tensors, *, n_shards: int = 1) -> Path:
    """config.json and the tensors, in one file or in shards with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if n_shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
        return directory
    weight_map: dict[str, str] = {}
    for number in range(n_shards):
        shard = f"model-{number + 1:05d}-of-{n_shards:05d}.safetensors"
        part = dict(list(tensors.items())[number::n_shards])
        write_safetensors(directory / shard, part)
        weight_map |= dict.fromkeys(part, shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def read_keys(path: Path) -> dict[str, Any]:
    """Every key of a GGUF file with its Python value."""
    fields = gguf.GGUFReader(path).fields.items()
    return {key: field.contents() for key, field in fields if not key.startswith("GGUF.")}


def write_target_checkpoint(source: Path, directory: Path, *, n_shards: int = 1) -> Path:
    """The checkpoint a `qwen35` GGUF file of f16 and f32 tensors came from, tokenizer included."""
    keys = read_keys(source)
    config = target_config(keys)
    tensors = {hf_name(t.name): _undo(t.name, np.array(t.data), config) for t in gguf.GGUFReader(source).tensors}
    write_checkpoint(directory, config, tensors, n_shards=n_shards)
    write_tokenizer(directory, keys)
    return directory


def target_config(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a Qwen3.5 text model by the keys of its GGUF file."""
    k = {key.removeprefix("qwen35."): value for key, value in keys.items()}
    kinds = ["linear_attention" if flag else "full_attention" for flag in k["attention.recurrent_layers"]]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": len(keys["tokenizer.ggml.tokens"]),
        "hidden_size": k["embedding_length"],
        "intermediate_size": k["feed_forward_length"],
        "num_hidden_layers": k["block_count"],
        "num_attention_heads": k["attention.head_count"],
        "num_key_value_heads": k["attention.head_count_kv"],
        "head_dim": k["attention.key_length"],
        "max_position_embeddings": k["context_length"],
        "rms_norm_eps": k["attention.layer_norm_rms_epsilon"],
        "layer_types": kinds,
        "linear_conv_kernel_dim": k["ssm.conv_kernel"],
        "linear_key_head_dim": k["ssm.state_size"],
        "linear_value_head_dim": k["ssm.inner_size"] // k["ssm.time_step_rank"],
        "linear_num_key_heads": k["ssm.group_count"],
        "linear_num_value_heads": k["ssm.time_step_rank"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": k["rope.freq_base"],
            "partial_rotary_factor": k["rope.dimension_count"] / k["attention.key_length"],
            "mrope_section": k["rope.dimension_sections"][:3],
        },
        "tie_word_embeddings": True,
        "attn_output_gate": True,
        "hidden_act": "silu",
    }


def hf_name(name: str) -> str:
    """The name a tensor of a GGUF file has in a checkpoint of a text model."""
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    return f"model.layers.{match[1]}.{_LAYER[match[2]]}" if match else f"model.{_TOP[name]}"


def _undo(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    n_k, n_v = config["linear_num_key_heads"], config["linear_num_value_heads"]
    d = config["linear_value_head_dim"]
    role = name.rsplit("blk.", 1)[-1].split(".", 1)[-1]
    if role == "attn_qkv.weight":
        return _grouped(values, n_k, n_v, d, start=2 * n_k * d)
    if role == "ssm_conv1d.weight":
        return _grouped(values, n_k, n_v, d, start=2 * n_k * d)[:, None, :]
    if role == "attn_gate.weight":
        return _grouped(values, n_k, n_v, d)
    if role == "ssm_out.weight":
        return np.ascontiguousarray(_grouped(values.T, n_k, n_v, d).T)
    if role in ("ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias"):
        return _grouped(values, n_k, n_v, 1)
    if role == "ssm_a":  # checkpoints hold bf16: its few digits survive the way there and back
        return to_bf16(np.log(-_grouped(values, n_k, n_v, 1).astype(np.float64)))
    return values - np.float32(1) if name.endswith("norm.weight") and role != "ssm_norm.weight" else values


def _grouped(values: np.ndarray, n_k: int, n_v: int, width: int, start: int = 0) -> np.ndarray:
    """Value heads back beside those of the same key head: head r of group g is head r * n_k + g of the file."""
    out = values.copy()
    n_ratio = n_v // n_k
    for g in range(n_k):
        for r in range(n_ratio):
            to, since = start + (g * n_ratio + r) * width, start + (r * n_k + g) * width
            out[to : to + width] = values[since : since + width]
    return out


def write_tokenizer(directory: Path, keys: Mapping[str, Any]) -> None:
    """tokenizer.json and tokenizer_config.json of a byte-level vocabulary."""
    g = {key.removeprefix("tokenizer.ggml."): value for key, value in keys.items()}
    tokens, kinds = g["tokens"], g["token_type"]
    added = [
        {"id": i, "content": text, "special": kind == 3, **dict.fromkeys(_PLAIN, False)}
        for i, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (3, 4)
    ]
    tokenizer = {
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": QWEN35_SPLIT}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "model": {
            "type": "BPE",
            "vocab": {text: i for i, (text, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == 1},
            "merges": g["merges"],
        },
    }
    settings: dict[str, Any] = {"add_bos_token": g["add_bos_token"]} if "add_bos_token" in g else {}
    for role, key in (("eos", "eos"), ("pad", "padding"), ("mask", "mask")):
        if f"{key}_token_id" in g:
            settings[f"{role}_token"] = tokens[g[f"{key}_token_id"]]
    if "tokenizer.chat_template" in keys:
        settings["chat_template"] = keys["tokenizer.chat_template"]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
