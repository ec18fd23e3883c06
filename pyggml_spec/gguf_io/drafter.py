"""The configuration and tensor table of a drafter: DFlash, DSpark or DFlash2, in either dialect."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from pyggml_spec.errors import ModelFileError
from pyggml_spec.gguf_io.dialects import Dialect, canonical_tensors, find_dialect, read_mask_token_id
from pyggml_spec.gguf_io.metadata import Metadata
from pyggml_spec.gguf_io.reader import GgufFile, TensorInfo
from pyggml_spec.gguf_io.shapes import Shape, check_tensors
from pyggml_spec.gguf_io.target import (
    MAX_CONV_TAPS,
    MAX_CTX,
    MAX_EMBD,
    MAX_FF,
    MAX_LAYERS,
    MAX_VOCAB,
    read_head_counts,
    read_head_dim,
)
from pyggml_spec.records import DrafterConfig, DrafterKind, RopeScaling

MAX_BLOCK_SIZE = 256
MAX_RANK = 1 << 14
MAX_SELECTOR_TOP_K = 16  # candidates a device-side top-k returns per position

Tensors = Mapping[str, TensorInfo]


def read_drafter_config(file: GgufFile) -> DrafterConfig:
    """The configuration of a drafter file; every tensor of every layer is checked against it.

    Layer numbers become "output of target layer i, 0-based" here, in both dialects. `canonical_tensors(file)` gives
    the weights under the names of `drafter_tensors(config)`.
    Raises ModelFileError when the architecture, a key or a tensor does not fit.
    """
    dialect = find_dialect(file)
    tensors = canonical_tensors(file)
    _refuse_unsupported_variants(file.metadata, dialect.prefix)
    config = _config_from_keys(file, dialect, tensors)
    check_tensors(file, drafter_tensors(config), tensors)
    if config.has_reduced_vocabulary:
        _check_draft_to_target_table(file, tensors["d2t"], config.n_vocab_target)
    return config


def drafter_tensors(config: DrafterConfig) -> dict[str, Shape]:
    """Every tensor that a drafter of this configuration has, name (llama.cpp's spelling) -> ne (fastest first)."""
    table: dict[str, Shape] = {
        "fc.weight": (len(config.target_layer_ids) * config.n_embd_target, config.n_embd),
        "enc.output_norm.weight": (config.n_embd,),
        "output_norm.weight": (config.n_embd,),
    }
    block = _block_tensors(config) | (_conv_tensors(config) if config.kind == "dflash2" else {})
    for layer in range(config.n_layers):
        table |= {f"blk.{layer}.{name}": ne for name, ne in block.items()}
    heads = {"dflash": _no_tensors, "dspark": _dspark_tensors, "dflash2": _selector_tensors}
    return table | _vocabulary_tensors(config) | heads[config.kind](config)


def _block_tensors(config: DrafterConfig) -> dict[str, Shape]:
    n_query, n_key = config.head_dim * config.n_heads, config.head_dim * config.n_heads_kv
    return {
        "attn_norm.weight": (config.n_embd,),
        "attn_q.weight": (config.n_embd, n_query),
        "attn_k.weight": (config.n_embd, n_key),
        "attn_v.weight": (config.n_embd, n_key),
        "attn_q_norm.weight": (config.head_dim,),
        "attn_k_norm.weight": (config.head_dim,),
        "attn_output.weight": (n_query, config.n_embd),
        "ffn_norm.weight": (config.n_embd,),
        "ffn_gate.weight": (config.n_embd, config.n_ff),
        "ffn_up.weight": (config.n_embd, config.n_ff),
        "ffn_down.weight": (config.n_ff, config.n_embd),
    }


def _conv_tensors(config: DrafterConfig) -> dict[str, Shape]:
    n_coefficients = 2 * config.conv_taps * (config.n_embd // config.conv_group_size)
    base = (config.n_embd, config.conv_taps, 2)
    projection = (config.n_embd, n_coefficients)
    return {
        "attn_conv_base": base,
        "attn_conv_proj.weight": projection,
        "ffn_conv_base": base,
        "ffn_conv_proj.weight": projection,
    }


def _vocabulary_tensors(config: DrafterConfig) -> dict[str, Shape]:
    table: dict[str, Shape] = {}
    if config.has_own_embeddings:
        table["token_embd.weight"] = (config.n_embd, config.n_vocab_target)
    if config.has_own_head:
        table["output.weight"] = (config.n_embd, config.n_vocab)
    if config.has_reduced_vocabulary:
        table["d2t"] = (config.n_vocab,)
    return table


def _no_tensors(config: DrafterConfig) -> dict[str, Shape]:
    return {}


def _dspark_tensors(config: DrafterConfig) -> dict[str, Shape]:
    table: dict[str, Shape] = {
        "markov_w1.weight": (config.markov_rank, config.n_vocab_target),
        "markov_w2.weight": (config.markov_rank, config.n_vocab),
    }
    if config.has_confidence_head:
        table["conf_proj.weight"] = (config.n_embd + config.markov_rank, 1)
    if config.has_confidence_bias:
        table["conf_proj.bias"] = (1,)
    return table


def _selector_tensors(config: DrafterConfig) -> dict[str, Shape]:
    return {
        "selector_predecessor.weight": (config.selector_rank, config.n_vocab_target),
        "selector_successor.weight": (config.selector_rank, config.n_vocab_target),
        "selector_hidden.weight": (config.n_embd, config.selector_rank),
    }


def _refuse_unsupported_variants(keys: Metadata, prefix: str) -> None:
    if keys.find_string(prefix + "hidden_activation", default="silu") != "silu":
        keys.fail(prefix + "hidden_activation", "only 'silu' drafters are supported")
    for name in ("hyper_connection_count", "expert_count", "dflash.domino.enabled"):
        if keys.find_int(prefix + name, 0, MAX_CTX, default=0):
            keys.fail(prefix + name, "drafters of this variant are not supported")
    for name in ("attention.scale", "attention.value_scale"):
        if prefix + name in keys:
            keys.fail(prefix + name, "drafters with their own attention scale are not supported")


def _config_from_keys(file: GgufFile, dialect: Dialect, tensors: Tensors) -> DrafterConfig:
    keys, prefix = file.metadata, dialect.prefix
    kind = _find_kind(file, tensors)
    n_layers = keys.require_int(prefix + "block_count", 1, MAX_LAYERS)
    n_embd = keys.require_int(prefix + "embedding_length", 1, MAX_EMBD)
    head_dim = read_head_dim(keys, prefix)
    n_heads, n_heads_kv = read_head_counts(keys, prefix)
    layer_ids = _read_target_layers(keys, dialect)
    n_vocab, n_vocab_target = _read_vocabulary_sizes(file, dialect, tensors)
    sample_from_anchor = kind == "dspark" and keys.find_bool(prefix + "sample_from_anchor", True)
    sliding_window, sliding_layers = _read_sliding_window(keys, prefix, n_layers)
    return DrafterConfig(
        kind=kind,
        dialect=dialect.name,
        n_layers=n_layers,
        n_embd=n_embd,
        n_ff=keys.require_int(prefix + "feed_forward_length", 1, MAX_FF),
        n_heads=n_heads,
        n_heads_kv=n_heads_kv,
        head_dim=head_dim,
        n_vocab=n_vocab,
        norm_eps=keys.require_float(prefix + "attention.layer_norm_rms_epsilon", 0.0, 0.1),
        rope_theta=keys.require_float(prefix + "rope.freq_base", 1.0, 1e12),
        rope_scaling=_read_rope_scaling(keys, prefix, dialect),
        draft_block_size=keys.require_int(dialect.block_size, 1 if sample_from_anchor else 2, MAX_BLOCK_SIZE),
        mask_token_id=read_mask_token_id(keys, dialect, MAX_VOCAB),
        target_layer_ids=layer_ids,
        n_embd_target=_read_n_embd_target(file, tensors, len(layer_ids)),
        causal=keys.find_bool(prefix + "attention.causal", False),
        sliding_window=sliding_window,
        sliding_layers=sliding_layers,
        sample_from_anchor=sample_from_anchor,
        has_confidence_head=_read_has_confidence(keys, prefix, tensors),
        has_confidence_bias="conf_proj.bias" in tensors,
        embedding_scale=keys.find_float(prefix + "embedding_scale", 1e-6, 1e6, default=1.0),
        logit_scale=keys.find_float(prefix + "logit_scale", 1e-6, 1e6, default=1.0),
        final_logit_softcapping=keys.find_float(prefix + "final_logit_softcapping", 0.0, 1e6, default=0.0),
        markov_rank=_first_extent(tensors, "markov_w1.weight"),
        has_own_embeddings="token_embd.weight" in tensors,
        has_own_head="output.weight" in tensors,
        has_reduced_vocabulary="d2t" in tensors,
        n_vocab_target=n_vocab_target,
        n_ctx_train=keys.find_int(prefix + "context_length", 0, MAX_CTX, default=0),
        rope_dims=_read_rope_dims(keys, prefix, head_dim),
        **(_read_dflash2_sizes(keys, dialect, n_embd) if kind == "dflash2" else {}),
    )


def _find_kind(file: GgufFile, tensors: Tensors) -> DrafterKind:
    has_markov, has_selector = "markov_w1.weight" in tensors, "selector_hidden.weight" in tensors
    if has_markov and has_selector:
        raise ModelFileError.about(file.path, "has both DSpark and DFlash2 heads; such a drafter is not supported")
    return "dspark" if has_markov else "dflash2" if has_selector else "dflash"


def _read_target_layers(keys: Metadata, dialect: Dialect) -> tuple[int, ...]:
    shift = dialect.target_layer_shift
    stored = keys.require_ints(dialect.target_layers, shift, MAX_LAYERS)
    if len(set(stored)) != len(stored):
        keys.fail(dialect.target_layers, "must name every layer once")
    n_claimed = keys.find_int(dialect.prefix + "dflash.n_target_layers", 1, MAX_LAYERS, default=len(stored))
    if n_claimed != len(stored):
        keys.fail(dialect.prefix + "dflash.n_target_layers", f"'{dialect.target_layers}' names {len(stored)} layers")
    return tuple(layer - shift for layer in stored)


def _read_n_embd_target(file: GgufFile, tensors: Tensors, n_features: int) -> int:
    n_inputs = _first_extent(tensors, "fc.weight")
    if n_inputs == 0 or n_inputs % n_features:
        raise ModelFileError.about(
            file.path,
            f"projects features of {n_inputs} values (tensor fc.weight), "
            f"which do not divide into its {n_features} target layers",
            way_out="convert the drafter again",
        )
    return n_inputs // n_features


def _read_vocabulary_sizes(file: GgufFile, dialect: Dialect, tensors: Tensors) -> tuple[int, int]:
    """(rows of the head, token ids of the target's vocabulary)"""
    tokens = file.metadata.find_string_array("tokenizer.ggml.tokens")
    sizes = [_rows(tensors, name) for name in ("token_embd.weight", "markov_w1.weight", "selector_predecessor.weight")]
    sizes.append(0 if tokens is None else tokens.n_items)
    sizes.append(file.metadata.find_int(dialect.prefix + "vocab_size", 1, MAX_VOCAB, default=0))
    is_reduced = "d2t" in tensors
    if not is_reduced:
        sizes.append(_rows(tensors, "output.weight"))
    n_vocab_target = next((size for size in sizes if size), 0)
    if not 1 <= n_vocab_target <= MAX_VOCAB:
        file.metadata.fail("tokenizer.ggml.tokens", f"a drafter needs a vocabulary of 1 to {MAX_VOCAB} tokens")
    if is_reduced and "output.weight" not in tensors:
        raise ModelFileError.about(
            file.path, "maps draft ids (tensor d2t) but has no output.weight", way_out="convert it again"
        )
    n_vocab = _first_extent(tensors, "d2t") if is_reduced else _rows(tensors, "output.weight") or n_vocab_target
    return n_vocab, n_vocab_target


def _read_sliding_window(keys: Metadata, prefix: str, n_layers: int) -> tuple[int, tuple[bool, ...]]:
    window = keys.find_int(prefix + "attention.sliding_window", 0, MAX_CTX, default=0)
    if window == 0:
        return 0, ()
    pattern = keys.require_bools(prefix + "attention.sliding_window_pattern", n_layers)
    return (window, pattern) if any(pattern) else (0, ())


def _read_rope_scaling(keys: Metadata, prefix: str, dialect: Dialect) -> RopeScaling | None:
    scaling = prefix + "rope.scaling."
    factor = keys.find_float(scaling + "factor", 0.0, 1e6, default=1.0)
    # lucebox files carry YaRN's numbers without its name
    implied = "yarn" if dialect.name == "lucebox" and factor not in (0.0, 1.0) else "none"
    kind = keys.find_string(scaling + "type", default=implied)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind != "yarn":
        keys.fail(scaling + "type", "only 'yarn' and 'none' are supported for drafters")
    factor = keys.require_float(scaling + "factor", 1.0, 1e6)
    return RopeScaling(
        factor=factor,
        n_ctx_original=keys.require_int(scaling + "original_context_length", 1, MAX_CTX),
        beta_fast=keys.find_float(scaling + "yarn_beta_fast", 0.0, 1e6, default=32.0),
        beta_slow=keys.find_float(scaling + "yarn_beta_slow", 0.0, 1e6, default=1.0),
        attention_factor=_read_attention_factor(keys, scaling, factor),
    )


def _read_attention_factor(keys: Metadata, scaling: str, factor: float) -> float:
    # An explicit factor replaces YaRN's own (as in the checkpoints' configurations), so that one is divided out.
    own = 1.0 + 0.1 * math.log(factor)
    return keys.find_float(scaling + "yarn_attn_factor", 1e-3, 1e3, default=own) / own


def _read_rope_dims(keys: Metadata, prefix: str, head_dim: int) -> int:
    rope_dims = keys.find_int(prefix + "rope.dimension_count", 2, head_dim, default=head_dim)
    key = prefix + "rope.dimension_sections"
    if rope_dims % 2:
        keys.fail(prefix + "rope.dimension_count", "must be even")
    if key in keys and any(keys.require_ints(key, 0, rope_dims, n_items=4)[1:]):
        keys.fail(key, "a drafter rotates by text position only, so every section but the first must be 0")
    return rope_dims


def _read_has_confidence(keys: Metadata, prefix: str, tensors: Tensors) -> bool:
    has_tensor = "conf_proj.weight" in tensors
    return keys.find_bool(prefix + "has_confidence_head", has_tensor) or has_tensor


def _read_dflash2_sizes(keys: Metadata, dialect: Dialect, n_embd: int) -> dict[str, int]:
    prefix = dialect.conv_prefix
    group_size = keys.require_int(prefix + "conv_group_size", 1, n_embd)
    if n_embd % group_size:
        keys.fail(prefix + "conv_group_size", f"must divide embedding_length = {n_embd}")
    return {
        "conv_taps": keys.require_int(prefix + "conv_kernel_size", 1, MAX_CONV_TAPS),
        "conv_group_size": group_size,
        "selector_rank": keys.require_int(prefix + "selector_rank", 1, MAX_RANK),
        "selector_top_k": keys.require_int(prefix + "selector_top_k", 1, MAX_SELECTOR_TOP_K),
    }


def _check_draft_to_target_table(file: GgufFile, table: TensorInfo, n_vocab_target: int) -> None:
    ids = table.data.view(np.int64)
    if ids.min() < 0 or ids.max() >= n_vocab_target or np.unique(ids).size != ids.size:
        raise ModelFileError.about(
            file.path,
            f"maps draft ids to {ids.min()} .. {ids.max()}, but they must be different ids below {n_vocab_target}",
            part="tensor 'd2t'",
            way_out="convert the drafter again",
        )


def _first_extent(tensors: Tensors, name: str) -> int:
    return tensors[name].ne[0] if name in tensors else 0


def _rows(tensors: Tensors, name: str) -> int:
    return tensors[name].ne[1] if name in tensors and len(tensors[name].ne) > 1 else 0
