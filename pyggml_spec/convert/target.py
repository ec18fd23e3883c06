"""Qwen3.5 text checkpoints as `qwen35` files."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyggml_spec.convert.checkpoint import Checkpoint, StoredTensor
from pyggml_spec.convert.model_keys import MAX_COUNT, read_head_dim, refuse_variants, transformer_keys
from pyggml_spec.convert.rope import read_rope
from pyggml_spec.convert.settings import Settings
from pyggml_spec.convert.stored_keys import store_bools, store_int, store_ints
from pyggml_spec.convert.tensors import LAYER_NAMES, TensorPlan, canonical_layer_name
from pyggml_spec.errors import ModelFileError

ARCHITECTURE = "qwen35"
CLASSES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")

_RECURRENT, _FULL = "linear_attention", "full_attention"
_TOP_NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = LAYER_NAMES | {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}
_TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
_LEFT_OUT = {
    "mtp.": "the block that predicts several tokens",
    "model.mtp.": "the block that predicts several tokens",
    "model.visual.": "the vision tower",
    "visual.": "the vision tower",
}


@dataclass(frozen=True)
class _HeadOrder:
    """Where value heads go.

    A checkpoint keeps the value heads that share a key head side by side; kernels pair value head h with key head
    h % n_heads_k, so the file has the first value head of every key head, then the second of every one, and so on.
    """

    n_heads_k: int
    n_heads_v: int
    head_dim: int

    def values(self, width: int) -> np.ndarray:
        """For every position of a file's axis of `n_heads_v x width` entries, the checkpoint's position."""
        heads = np.arange(self.n_heads_v).reshape(self.n_heads_k, -1).T.ravel()
        return (heads[:, None] * width + np.arange(width)).ravel()

    def channels(self) -> np.ndarray:
        """The same for the convolution's channels: queries and keys stay, values move."""
        n_query_key = 2 * self.n_heads_k * self.head_dim
        return np.concatenate([np.arange(n_query_key), n_query_key + self.values(self.head_dim)])


def read_target_settings(checkpoint: Checkpoint) -> Settings:
    """The settings of the text model, those of a multi-modal checkpoint's `text_config` included.

    Raises ModelFileError when they describe a variant that `qwen35` files cannot hold.
    """
    settings = checkpoint.settings.merged("text_config")
    refuse_variants(settings)
    settings.refuse_unless("attn_output_gate", True, why="attention without an output gate is not supported")
    return settings


def target_keys(settings: Settings) -> dict[str, bytes]:
    """The model's own keys of a `qwen35` file."""
    prefix, rope = f"{ARCHITECTURE}.", read_rope(settings)
    if rope.is_scaled:
        rope.entries.fail(("rope_type", "type"), "targets with rope scaling are not supported: remove it")
    if rope.partial_factor is None:
        rope.entries.fail(("partial_rotary_factor",), "a Qwen3.5 model must say which share of a head rotates")
    if rope.sections is None or not 3 <= len(rope.sections) <= 4:
        rope.entries.fail(("mrope_section",), "a Qwen3.5 model must have three sections of rotating pairs")
    n_rotating = int(read_head_dim(settings) * rope.partial_factor)
    return transformer_keys(settings, rope, prefix) | {
        prefix + "rope.dimension_count": store_int(n_rotating),
        prefix + "rope.dimension_sections": store_ints([*rope.sections, 0][:4]),
        **_recurrent_keys(settings, prefix),
    }


def _recurrent_keys(settings: Settings, prefix: str) -> dict[str, bytes]:
    order = _read_head_order(settings)
    is_recurrent = _read_layer_kinds(settings)
    return {
        prefix + "ssm.conv_kernel": store_int(settings.require_int("linear_conv_kernel_dim", low=2, high=16)),
        prefix + "ssm.state_size": store_int(order.head_dim),
        prefix + "ssm.group_count": store_int(order.n_heads_k),
        prefix + "ssm.time_step_rank": store_int(order.n_heads_v),
        prefix + "ssm.inner_size": store_int(order.n_heads_v * order.head_dim),
        prefix + "attention.recurrent_layers": store_bools(is_recurrent),
        prefix + "full_attention_interval": store_int(_read_interval(settings, is_recurrent)),
    }


def _read_head_order(settings: Settings) -> _HeadOrder:
    head_dim = settings.require_int("linear_key_head_dim", low=1, high=1024)
    if settings.require_int("linear_value_head_dim", low=1, high=1024) != head_dim:
        settings.fail(("linear_value_head_dim",), f"must equal linear_key_head_dim = {head_dim}")
    n_heads_k = settings.require_int("linear_num_key_heads", low=1, high=1024)
    n_heads_v = settings.require_int("linear_num_value_heads", low=1, high=1024)
    if n_heads_v % n_heads_k:
        settings.fail(("linear_num_value_heads",), f"must be a multiple of linear_num_key_heads = {n_heads_k}")
    return _HeadOrder(n_heads_k, n_heads_v, head_dim)


def _read_layer_kinds(settings: Settings) -> list[bool]:
    """Per layer, whether it is recurrent."""
    n_layers = settings.require_int("num_hidden_layers", low=1, high=1024)
    kinds = settings.find_texts("layer_types")
    if kinds is None:
        interval = settings.require_int("full_attention_interval", low=1, high=1024)
        return [(layer + 1) % interval != 0 for layer in range(n_layers)]
    if len(kinds) != n_layers or set(kinds) - {_RECURRENT, _FULL}:
        settings.fail(("layer_types",), f"must have {n_layers} entries '{_RECURRENT}' or '{_FULL}'")
    return [kind == _RECURRENT for kind in kinds]


def _read_interval(settings: Settings, is_recurrent: list[bool]) -> int:
    # llama.cpp asks for it even where the list of layers says more
    first_full = is_recurrent.index(False) + 1 if False in is_recurrent else len(is_recurrent) + 1
    return settings.find_int("full_attention_interval", low=1, high=MAX_COUNT, default=first_full)


def target_tensors(checkpoint: Checkpoint, settings: Settings, notes: list[str]) -> list[TensorPlan]:
    """How every tensor of the file is made; what is left out is added to `notes`.

    Raises ModelFileError for a tensor that is neither known nor safe to leave out.
    """
    order = _read_head_order(settings)
    is_tied = settings.find_bool("tie_word_embeddings") or False
    plans, left_out = [], dict.fromkeys(_LEFT_OUT.values(), 0)
    for name, stored in checkpoint.tensors.items():
        part = next((what for prefix, what in _LEFT_OUT.items() if name.startswith(prefix)), None)
        if part is not None:
            left_out[part] += 1
        elif not (is_tied and name.endswith("lm_head.weight")):
            plans.append(_plan(stored, _canonical_name(stored), order))
    notes += [f"left out: {what} ({count} tensors)" for what, count in left_out.items() if count]
    return plans


def _canonical_name(stored: StoredTensor) -> str:
    prefix = next((prefix for prefix in _TEXT_PREFIXES if stored.name.startswith(prefix)), "")
    name = canonical_layer_name(stored.name.removeprefix(prefix), _LAYER_NAMES, _TOP_NAMES)
    if name is None:
        raise ModelFileError(
            f"'{stored.path}' has a tensor '{stored.name}' that Qwen3.5 text models do not have; "
            "this variant of the model is not supported"
        )
    return name


def _plan(stored: StoredTensor, name: str, order: _HeadOrder) -> TensorPlan:
    """The tensor's place, order and change by the role its name gives."""
    role = name.split(".", 2)[-1]
    if role in ("attn_qkv.weight", "ssm_conv1d.weight"):
        return TensorPlan(stored, name, row_order=order.channels(), shape=_squeezed(stored))
    if role in ("ssm_alpha.weight", "ssm_beta.weight"):
        return TensorPlan(stored, name, row_order=order.values(1))
    if role == "attn_gate.weight":
        return TensorPlan(stored, name, row_order=order.values(order.head_dim))
    if role == "ssm_out.weight":
        return TensorPlan(stored, name, column_order=order.values(order.head_dim))
    if role in ("ssm_a", "ssm_dt.bias"):
        return TensorPlan(stored, name, column_order=order.values(1), change=_decay if role == "ssm_a" else None)
    is_zero_centred = name.endswith("norm.weight") and role != "ssm_norm.weight"
    return TensorPlan(stored, name, change=_from_zero_centred if is_zero_centred else None)


def _squeezed(stored: StoredTensor) -> tuple[int, ...]:
    is_convolution = len(stored.shape) == 3 and stored.shape[1] == 1  # one input per channel
    return (stored.shape[0], stored.shape[2]) if is_convolution else stored.shape


def _decay(logarithms: np.ndarray) -> np.ndarray:
    # through f64, so that the result is the nearest f32 whatever the machine's exponential does
    return -np.exp(logarithms.astype(np.float64)).astype(np.float32)


def _from_zero_centred(weights: np.ndarray) -> np.ndarray:
    return weights + np.float32(1.0)
