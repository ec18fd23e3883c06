"""DFlash, DSpark and DFlash2 checkpoints: settings in any of their spellings, and what becomes of every tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from pyggml_spec.convert.checkpoint import Checkpoint, StoredTensor
from pyggml_spec.convert.model_keys import refuse_variants
from pyggml_spec.convert.rope import RopeSettings, read_rope
from pyggml_spec.convert.settings import Settings
from pyggml_spec.convert.tensors import LAYER_NAMES, TensorPlan, canonical_layer_name
from pyggml_spec.errors import ModelFileError
from pyggml_spec.records import DrafterKind

CLASSES = ("DFlashDraftModel", "DFlash2DraftModel", "Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator")
DialectName = Literal["llama.cpp", "lucebox"]

_MAX_ID = (1 << 22) - 1
_TOP_NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "d2t": "d2t",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.predecessor_codebook.weight": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.successor_codebook.weight": "selector_successor.weight",
}
_LAYER_NAMES = LAYER_NAMES | {
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
_NEVER_READ = ("t2d", "rotary_emb.inv_freq")


@dataclass(frozen=True)
class DrafterSettings:
    """What config.json says of a drafter, whatever the spelling; layer ids mean "output of target layer i"."""

    kind: DrafterKind
    base: Settings  # sizes of the transformer
    rope: RopeSettings
    n_vocab: int
    block_size: int  # slots of a draft block, anchor included
    mask_token_id: int
    target_layer_ids: list[int]
    n_target_layers: int  # 0 = the file does not say
    causal: bool | None
    sliding_window: int  # tokens; 0 = none
    sliding_layers: list[bool]
    sample_from_anchor: bool
    has_confidence_head: bool
    scales: dict[str, float]  # under llama.cpp's names, those that are set
    dflash2_sizes: dict[str, int]


def read_drafter_settings(checkpoint: Checkpoint) -> DrafterSettings:
    """The settings of a drafter. Raises ModelFileError when one is missing or describes an unsupported variant."""
    is_nested = checkpoint.settings.find("transformer_layer_config", "aux_hidden_state_layer_ids") is not None
    settings = checkpoint.settings.merged("transformer_layer_config")
    kind = _find_kind(checkpoint)
    _refuse_variants(checkpoint, settings)
    window, sliding = _read_sliding(settings)
    anchored = settings.find_bool("sample_from_anchor")
    n_vocab = settings.require_int("vocab_size", low=1, high=_MAX_ID + 1)
    return DrafterSettings(
        kind=kind,
        base=settings,
        rope=read_rope(settings),
        n_vocab=n_vocab,
        block_size=settings.require_int("dflash_config.block_size", "block_size", low=1, high=256),
        mask_token_id=settings.require_int("dflash_config.mask_token_id", "mask_token_id", low=0, high=n_vocab - 1),
        target_layer_ids=_read_target_layers(settings),
        n_target_layers=settings.find_int("num_target_layers", low=1, high=1024, default=0),
        causal=settings.find_bool("is_causal", "dflash_config.causal"),
        sliding_window=window,
        sliding_layers=sliding,
        sample_from_anchor=(not is_nested) if anchored is None else anchored,
        has_confidence_head=_read_confidence(checkpoint, settings),
        scales=_read_scales(settings),
        dflash2_sizes=_read_dflash2_sizes(settings) if kind == "dflash2" else {},
    )


def _find_kind(checkpoint: Checkpoint) -> DrafterKind:
    names = {_short(name) for name in checkpoint.tensors}
    if "markov_head.markov_w1.weight" in names:
        return "dspark"
    return "dflash2" if any(name.startswith("candidate_selector.") for name in names) else "dflash"


def _refuse_variants(checkpoint: Checkpoint, settings: Settings) -> None:
    refuse_variants(settings)
    settings.refuse_unless("markov_head_type", "vanilla", why="only 'vanilla' Markov heads are supported")
    settings.refuse_unless("rope_is_neox_style", True, why="interleaved rotary embeddings are not supported")
    settings.refuse_unless("dflash_config.attention_value_scale", 1.0, why="scaled values are not supported")
    pickled = checkpoint.directory / "mask_embedding.pt"
    if pickled.exists():
        raise ModelFileError(f"'{pickled}' replaces the mask token's embedding, which is not supported yet")


def _read_target_layers(settings: Settings) -> list[int]:
    ids = settings.find_ints("dflash_config.target_layer_ids", "target_layer_ids", low=0, high=1023)
    if ids is not None:
        return ids
    inputs = settings.find_ints("aux_hidden_state_layer_ids", low=1, high=1024)  # counted as inputs of the next layer
    if inputs is None:
        keys = ("dflash_config.target_layer_ids", "target_layer_ids", "aux_hidden_state_layer_ids")
        settings.fail(keys, "a drafter must name the target layers it reads")
    return [layer - 1 for layer in inputs]


def _read_sliding(settings: Settings) -> tuple[int, list[bool]]:
    """(window in tokens, per layer whether it slides); a window of 0 means that none does."""
    n_layers = settings.require_int("num_hidden_layers", low=1, high=1024)
    slides_everywhere = settings.find_bool("dflash_config.use_swa") or False
    kinds = settings.find_texts("layer_types") or []
    if kinds and len(kinds) != n_layers:
        settings.fail(("layer_types",), f"must have {n_layers} entries, one per layer")
    pattern = [True] * n_layers if slides_everywhere else [kind == "sliding_attention" for kind in kinds]
    if not any(pattern) or (settings.find_bool("use_sliding_window") is False and not slides_everywhere):
        return 0, []
    window = settings.require_int("dflash_config.swa_window_size", "sliding_window", low=1, high=(1 << 31) - 1)
    return window, pattern


def _read_confidence(checkpoint: Checkpoint, settings: Settings) -> bool:
    has_head = any(_short(name).startswith("confidence_head.") for name in checkpoint.tensors)
    if settings.find_bool("enable_confidence_head") and not has_head:
        settings.fail(("enable_confidence_head",), "the checkpoint has no tensor 'confidence_head.proj.weight'")
    if has_head and settings.find_bool("confidence_head_with_markov") is False:
        settings.fail(("confidence_head_with_markov",), "confidence heads must read the Markov embedding too")
    return has_head


def _read_scales(settings: Settings) -> dict[str, float]:
    spellings = {
        "logit_scale": "output_multiplier",
        "final_logit_softcapping": "final_logit_softcapping",
        "embedding_scale": "input_embedding_scale",
    }
    found = {
        name: settings.find_float(f"dflash_config.{spelling}", spelling, low=0.0, high=1e6)
        for name, spelling in spellings.items()
    }
    return {name: value for name, value in found.items() if value}


def _read_dflash2_sizes(settings: Settings) -> dict[str, int]:
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    return {name: settings.require_int(f"dflash_config.{name}", name, low=1, high=1 << 17) for name in names}


def drafter_tensors(checkpoint: Checkpoint, dialect: DialectName) -> list[TensorPlan]:
    """How every tensor of the file is made, tables that repeat the target's included.

    Raises ModelFileError for a tensor that drafters of these kinds do not have.
    """
    return [
        TensorPlan(stored, _name_in(dialect, canonical), change=_absolute_ids if canonical == "d2t" else None)
        for name, stored in checkpoint.tensors.items()
        if not name.endswith(_NEVER_READ)
        for canonical in (_canonical_name(stored),)
    ]


def _canonical_name(stored: StoredTensor) -> str:
    name = canonical_layer_name(_short(stored.name), _LAYER_NAMES, _TOP_NAMES)
    if name is None:
        raise ModelFileError(
            f"'{stored.path}' has a tensor '{stored.name}' that DFlash, DSpark and DFlash2 drafters do not have; "
            "this variant of the drafter is not supported"
        )
    return name


def _short(name: str) -> str:
    return name.removeprefix("model.")


def _absolute_ids(offsets: np.ndarray) -> np.ndarray:
    # checkpoints store how far the target's id is from the draft row
    return offsets + np.arange(offsets.size)


_LUCEBOX_NAMES = {
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


def _name_in(dialect: DialectName, canonical: str) -> str:
    if dialect == "llama.cpp":
        return canonical
    return _LUCEBOX_NAMES.get(canonical) or canonical.replace("_conv_base", "_conv.base").replace(
        "_conv_proj.", "_conv.proj."
    )
