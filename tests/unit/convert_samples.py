"""Tiny checkpoints for tests of the converter: a target with every kind of layer, and variants of drafters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf_samples import TARGET, target_keys, target_weights, write_gguf
from reference.checkpoints import to_bf16, write_safetensors, write_target_checkpoint

DATA = Path(__file__).parents[1] / "data"
TARGET_FILE = DATA / "minnow-f16.gguf"
TINY = replace(TARGET, n_heads_k=2, n_heads_v=6)  # value heads move: three for each key head


def write_tiny_target(path: Path, seed: int = 0) -> Path:
    """A `qwen35` file of random f32 weights that a checkpoint can hold exactly."""
    rng = np.random.default_rng(seed)
    tensors = {name: rng.standard_normal(zeros.shape, np.float32) for name, zeros in target_weights(TINY).items()}
    for name, values in tensors.items():
        if name.endswith("ssm_a"):
            logarithms = to_bf16(values).astype(np.uint32) << 16
            values[...] = -np.exp(logarithms.view(np.float32).astype(np.float64))
        elif name.endswith("norm.weight") and "ssm_norm" not in name:
            values[...] = 1 + values / 8
    keys = {"general.type": "model", "general.name": "Tiny", "general.size_label": "16K", "general.file_type": 0}
    interval = {"general.quantization_version": 2, "qwen35.full_attention_interval": 4}
    return write_gguf(path, "qwen35", target_keys(TINY) | keys | interval, tensors)


def write_tiny_checkpoint(directory: Path, **options: Any) -> Path:
    """The checkpoint of that file, in a directory called "tiny"."""
    source = write_tiny_target(directory / "tiny-source.gguf")
    return write_target_checkpoint(source, directory / "tiny", **options)


def change_config(directory: Path, **changes: Any) -> Path:
    """Change keys of config.json; None removes one, "__" in a name goes into a section."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        *sections, key = name.split("__")
        inner = config
        for section in sections:
            inner = inner.setdefault(section, {})
        inner.pop(key, None)
        if value is not None:
            inner[key] = value
    path.write_text(json.dumps(config))
    return directory


def copy_drafter(kind: str, directory: Path, **changes: Any) -> Path:
    """The drafter of one kind from tests/data, with another config.json, in a directory of the same name."""
    source, copy = DATA / f"minnow-{kind}", directory / f"minnow-{kind}"
    copy.mkdir(parents=True, exist_ok=True)
    (copy / "config.json").write_bytes((source / "config.json").read_bytes())
    if not (copy / "model.safetensors").exists():
        (copy / "model.safetensors").symlink_to(source / "model.safetensors")
    return change_config(copy, **changes)


def add_tensors(directory: Path, **tensors: np.ndarray) -> Path:
    """More tensors in a second file, with an index over both; "__" in a name is a dot."""
    named = {name.replace("__", "."): values for name, values in tensors.items()}
    write_safetensors(directory / "more.safetensors", named)
    weight_map = {"anything": "model.safetensors", **dict.fromkeys(named, "more.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory
