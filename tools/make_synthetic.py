#!/usr/bin/env python3
"""Write models of real shapes with random weights, a `qwen35` target and a DFlash drafter for it, to measure speed.

    python tools/make_synthetic.py --shape 27b --type q4_k_m target.gguf
    python tools/make_synthetic.py --shape 27b --type q8_0 --drafter drafter.gguf

Types per tensor are those of `pyggml-spec quantize`. The text that such a model makes is noise.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from random_gguf import F32, write_model

from pyggml_spec.convert.recipes import MIXTURES, UNIFORM_TYPES, ModelShape, choose_type, fitting_type, is_matrix
from pyggml_spec.gguf_io.drafter import drafter_tensors
from pyggml_spec.gguf_io.reader import TensorInfo
from pyggml_spec.gguf_io.target import target_tensors
from pyggml_spec.records import DrafterConfig, TargetConfig


@dataclass(frozen=True)
class Shape:
    """Sizes of a published model."""

    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_heads_kv: int
    n_heads_v: int  # of the recurrent layers, with 16 key heads
    tied_embeddings: bool
    n_vocab: int = 248320


SHAPES = {
    "27b": Shape(64, 5120, 17408, 24, 4, 48, tied_embeddings=False),
    "9b": Shape(32, 4096, 12288, 16, 4, 32, tied_embeddings=False),
    "4b": Shape(32, 2560, 9216, 16, 4, 32, tied_embeddings=True),
    "tiny": Shape(4, 512, 1024, 4, 2, 32, tied_embeddings=False, n_vocab=4096),  # to try tools with
}


def target_config(shape: Shape) -> TargetConfig:
    """A Qwen3.5 target of this shape: every fourth layer is full attention."""
    return TargetConfig(
        architecture="qwen35",
        n_layers=shape.n_layers,
        n_embd=shape.n_embd,
        n_ff=shape.n_ff,
        n_vocab=shape.n_vocab,
        n_ctx_train=262144,
        n_heads=shape.n_heads,
        n_heads_kv=shape.n_heads_kv,
        head_dim=256,
        norm_eps=1e-6,
        rope_theta=1e7,
        rope_dims=64,
        rope_sections=(11, 11, 10, 0),
        recurrent_layers=tuple((i + 1) % 4 != 0 for i in range(shape.n_layers)),
        conv_taps=4,
        state_size=128,
        n_heads_k=16,
        n_heads_v=shape.n_heads_v,
        tied_embeddings=shape.tied_embeddings,
    )


def drafter_config(shape: Shape, block_size: int) -> DrafterConfig:
    """A DFlash drafter of five layers that reads five evenly spaced layers of the target."""
    ids = tuple(round(1 + i * (shape.n_layers - 3) / 4) for i in range(5)) if shape.n_layers > 8 else (0, 1, 2)
    return DrafterConfig(
        kind="dflash",
        dialect="llama.cpp",
        n_layers=5 if shape.n_layers > 8 else 1,
        n_embd=shape.n_embd,
        n_ff=shape.n_ff,
        n_heads=32,
        n_heads_kv=8,
        head_dim=128,
        n_vocab=shape.n_vocab,
        norm_eps=1e-6,
        rope_theta=1e7,
        rope_scaling=None,
        draft_block_size=block_size,
        mask_token_id=shape.n_vocab - 1,
        target_layer_ids=ids,
        n_embd_target=shape.n_embd,
        n_vocab_target=shape.n_vocab,
    )


def vocabulary_keys(n_vocab: int) -> dict[str, Any]:
    """A byte alphabet and numbered tokens after it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": alphabet + ["te"] + [f"t{i}" for i in range(257, n_vocab)],
        "tokenizer.ggml.token_type": [1] * n_vocab,
        "tokenizer.ggml.merges": ["t e"],
        "tokenizer.ggml.eos_token_id": n_vocab - 2,
    }


def target_keys(c: TargetConfig) -> dict[str, Any]:
    """What a converter writes for this configuration."""
    p = "qwen35."
    return {
        "general.architecture": "qwen35",
        "general.name": "synthetic",
        p + "block_count": c.n_layers,
        p + "context_length": c.n_ctx_train,
        p + "embedding_length": c.n_embd,
        p + "feed_forward_length": c.n_ff,
        p + "attention.head_count": c.n_heads,
        p + "attention.head_count_kv": c.n_heads_kv,
        p + "attention.key_length": c.head_dim,
        p + "attention.value_length": c.head_dim,
        p + "attention.layer_norm_rms_epsilon": c.norm_eps,
        p + "rope.dimension_count": c.rope_dims,
        p + "rope.dimension_sections": list(c.rope_sections),
        p + "rope.freq_base": c.rope_theta,
        p + "full_attention_interval": 4,
        p + "ssm.conv_kernel": c.conv_taps,
        p + "ssm.state_size": c.state_size,
        p + "ssm.group_count": c.n_heads_k,
        p + "ssm.time_step_rank": c.n_heads_v,
        p + "ssm.inner_size": c.state_size * c.n_heads_v,
        **vocabulary_keys(c.n_vocab),
    }


def drafter_keys(c: DrafterConfig) -> dict[str, Any]:
    """What a converter writes for this configuration; layer ids are stored one up."""
    p = "dflash."
    return {
        "general.architecture": "dflash",
        "general.name": "synthetic drafter",
        p + "block_count": c.n_layers,
        p + "context_length": 262144,
        p + "embedding_length": c.n_embd,
        p + "feed_forward_length": c.n_ff,
        p + "attention.head_count": c.n_heads,
        p + "attention.head_count_kv": c.n_heads_kv,
        p + "attention.key_length": c.head_dim,
        p + "attention.value_length": c.head_dim,
        p + "attention.layer_norm_rms_epsilon": c.norm_eps,
        p + "rope.freq_base": c.rope_theta,
        p + "block_size": c.draft_block_size,
        p + "target_layers": [i + 1 for i in c.target_layer_ids],
        "tokenizer.ggml.mask_token_id": c.mask_token_id,
        **vocabulary_keys(c.n_vocab),
    }


def choose_types(table: dict[str, tuple[int, ...]], recipe: str, shape: ModelShape) -> dict[str, Any]:
    """The type of every tensor, as the requantiser would choose it."""
    types = {}
    for name, ne in table.items():
        tensor = TensorInfo(name, ne, F32, 0, np.empty(0, np.uint8))
        kind = choose_type(tensor, recipe, shape, ()) if is_matrix(tensor) else F32
        types[name] = fitting_type(ne[0], kind) if kind != F32 else F32
    return types


@click.command()
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--shape", "shape_name", type=click.Choice(list(SHAPES)), default="27b", show_default=True)
@click.option("--type", "recipe", type=click.Choice([*MIXTURES, *UNIFORM_TYPES]), default="q4_k_m", show_default=True)
@click.option("--drafter", is_flag=True, help="The drafter for a target of this shape, instead of the target.")
@click.option("--layers", type=click.IntRange(4), help="So many of the target's layers only, for profiles.")
@click.option("--block-size", default=16, show_default=True, help="Slots of the drafter's block, anchor included.")
def main(path: Path, shape_name: str, recipe: str, drafter: bool, layers: int | None, block_size: int) -> None:
    """Write one file."""
    shape = SHAPES[shape_name]
    shape = replace(shape, n_layers=min(layers or shape.n_layers, shape.n_layers))
    if drafter:
        config = drafter_config(shape, block_size)
        table, keys = drafter_tensors(config), drafter_keys(config)
        model_shape = ModelShape(config.n_layers, config.n_heads // config.n_heads_kv, False)
    else:
        target = target_config(shape)
        table, keys = target_tensors(target), target_keys(target)
        model_shape = ModelShape(target.n_layers, target.n_heads // target.n_heads_kv, not target.tied_embeddings)
    n_bytes = write_model(path, keys, table, choose_types(table, recipe, model_shape))
    print(f"{path}: {n_bytes / 2**30:.2f} GiB, {len(table)} tensors", file=sys.stderr)


if __name__ == "__main__":
    main()
