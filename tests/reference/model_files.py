"""Model files that tests derive from the shipped ones: f32 copies, and a drafter straight from its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors

_NAMES = {  # Hugging Face -> GGUF, without the layer prefix
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}


def write_f32_copy(source: Path, destination: Path) -> Path:
    """The same model with every tensor as f32 (exact for f16 and bf16 sources)."""
    reader = gguf.GGUFReader(source)
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    return _write(reader, tensors, destination)


def write_f32_drafter(
    checkpoint: Path,
    template: Path,
    destination: Path,
    *,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """A drafter of any kind from its Hugging Face checkpoint, with the metadata of an already converted file.

    `keys` and `tensors` replace what the file would have, or come on top of it.
    """
    own = drafter_arrays(checkpoint) | dict(tensors or {})
    return _write(gguf.GGUFReader(template), own, destination, keys)


def drafter_arrays(checkpoint: Path) -> dict[str, np.ndarray]:
    """The weights of a drafter's checkpoint as f32 arrays (rows, cols), under their names in GGUF."""
    raw = dict(safetensors.deserialize((checkpoint / "model.safetensors").read_bytes()))
    return {_gguf_name(name): _bf16_to_f32(entry) for name, entry in raw.items()}


def write_shards(source: Path, destination: Path, n_tensors: int) -> list[Path]:
    """The same model in files of at most `n_tensors` tensors, named as llama.cpp names shards of `destination`."""
    reader = gguf.GGUFReader(source)
    _write_raw(reader, {t.name: t for t in reader.tensors}, destination, split_max_tensors=n_tensors)
    return sorted(destination.parent.glob(f"{destination.stem}-*-of-*.gguf"))


def write_with_own_head(source: Path, destination: Path) -> Path:
    """A tied model untied: `output.weight` is a copy of the embedding table."""
    reader = gguf.GGUFReader(source)
    tensors = {t.name: t for t in reader.tensors}
    return _write_raw(reader, tensors | {"output.weight": tensors["token_embd.weight"]}, destination)


def _gguf_name(name: str) -> str:
    if not name.startswith("layers."):
        return _NAMES[name]
    _, layer, rest = name.split(".", 2)
    return f"blk.{layer}.{_NAMES[rest]}"


def _bf16_to_f32(entry: dict) -> np.ndarray:
    assert entry["dtype"] == "BF16", entry["dtype"]
    words = np.frombuffer(entry["data"], dtype=np.uint16).astype(np.uint32) << 16
    return words.view(np.float32).reshape(entry["shape"])


def _write(
    reader: gguf.GGUFReader,
    tensors: Mapping[str, np.ndarray],
    destination: Path,
    keys: Mapping[str, Any] | None = None,
) -> Path:
    writer = _new_writer(reader, destination, keys)
    for name, values in tensors.items():
        dtype = np.int64 if values.dtype == np.int64 else np.float32
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=dtype))
    return _finish(writer, destination)


def _write_raw(
    reader: gguf.GGUFReader, tensors: dict[str, gguf.ReaderTensor], destination: Path, *, split_max_tensors: int = 0
) -> Path:
    writer = _new_writer(reader, destination, split_max_tensors=split_max_tensors)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    return _finish(writer, destination)


def _new_writer(
    reader: gguf.GGUFReader, destination: Path, keys: Mapping[str, Any] | None = None, **options: int
) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(destination, reader.fields["general.architecture"].contents(), **options)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (keys or {}).items():
        add.get(type(value), writer.add_array)(key, value)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in (keys or {}):
            continue
        kind, *rest = field.types
        writer.add_key_value(key, field.contents(), kind, sub_type=rest[-1] if rest else None)
    return writer


def _finish(writer: gguf.GGUFWriter, destination: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return destination
