"""A drafter's metadata in the two dialects."""

from __future__ import annotations

from pyggml_spec.convert.drafter import DrafterSettings
from pyggml_spec.convert.model_keys import read_head_dim, transformer_keys
from pyggml_spec.convert.rope import yarn_keys
from pyggml_spec.convert.stored_keys import store_bool, store_bools, store_float, store_int, store_ints, store_text

LLAMA_CPP, LUCEBOX = "dflash", "qwen35-dflash-draft"
MASK_KEY = "tokenizer.ggml.mask_token_id"


def llama_cpp_keys(drafter: DrafterSettings, *, target_has_sections: bool) -> dict[str, bytes]:
    """Dialect A, the vocabulary apart. llama.cpp names the layer whose INPUT is read: one more than ours."""
    prefix = f"{LLAMA_CPP}."
    keys = _shared_keys(drafter, prefix) | {
        prefix + "block_size": store_int(drafter.block_size),
        prefix + "target_layers": store_ints([layer + 1 for layer in drafter.target_layer_ids]),
    }
    keys |= {prefix + name: store_int(size) for name, size in drafter.dflash2_sizes.items()}
    if drafter.rope.partial_factor is not None:
        keys[prefix + "rope.dimension_count"] = store_int(_n_rotating(drafter))
    if target_has_sections:
        # the drafter itself rotates by text position only: all its pairs are in the first section
        keys[prefix + "rope.dimension_sections"] = store_ints([read_head_dim(drafter.base) // 2, 0, 0, 0])
    if drafter.kind == "dspark":
        keys[prefix + "has_confidence_head"] = store_bool(drafter.has_confidence_head)
    return keys


def lucebox_keys(drafter: DrafterSettings) -> dict[str, bytes]:
    """Dialect B: no vocabulary, only its size."""
    prefix = f"{LUCEBOX}."
    own = prefix + "dflash."
    keys = _shared_keys(drafter, prefix) | {
        prefix + "vocab_size": store_int(drafter.n_vocab),
        prefix + "rope.dimension_count": store_int(_n_rotating(drafter)),
        own + "n_target_layers": store_int(len(drafter.target_layer_ids)),
        own + "target_layer_ids": store_ints(drafter.target_layer_ids),
        own + "block_size": store_int(drafter.block_size),
        own + "mask_token_id": store_int(drafter.mask_token_id),
    }
    keys |= {f"{own}dflash2.{name}": store_int(size) for name, size in drafter.dflash2_sizes.items()}
    return keys | (_lucebox_dspark_keys(drafter, own + "dspark.") if drafter.kind == "dspark" else {})


def _lucebox_dspark_keys(drafter: DrafterSettings, prefix: str) -> dict[str, bytes]:
    rank = drafter.base.require_int("markov_rank", low=1, high=1 << 17)
    n_embd = drafter.base.require_int("hidden_size", low=1, high=1 << 17)
    keys = {
        prefix + "enabled": store_int(1),
        prefix + "markov_rank": store_int(rank),
        prefix + "vocab_size": store_int(drafter.n_vocab),
        prefix + "markov_type": store_text("vanilla"),
        prefix + "confidence.enabled": store_bool(drafter.has_confidence_head),
        prefix + "confidence.with_markov": store_bool(drafter.has_confidence_head),
    }
    return keys | ({prefix + "confidence_dim": store_int(n_embd + rank)} if drafter.has_confidence_head else {})


def _shared_keys(drafter: DrafterSettings, prefix: str) -> dict[str, bytes]:
    keys = transformer_keys(drafter.base, drafter.rope, prefix) | yarn_keys(drafter.rope, prefix)
    keys |= {prefix + name: store_float(value) for name, value in drafter.scales.items()}
    if drafter.causal is not None:
        keys[prefix + "attention.causal"] = store_bool(drafter.causal)
    if drafter.sliding_window:
        keys[prefix + "attention.sliding_window"] = store_int(drafter.sliding_window)
        keys[prefix + "attention.sliding_window_pattern"] = store_bools(drafter.sliding_layers)
    if drafter.kind == "dspark":
        keys[prefix + "sample_from_anchor"] = store_bool(drafter.sample_from_anchor)
    return keys


def _n_rotating(drafter: DrafterSettings) -> int:
    return int(read_head_dim(drafter.base) * (drafter.rope.partial_factor or 1.0))
