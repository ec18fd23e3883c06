"""Metadata that every converted model has."""

from __future__ import annotations

import re

import gguf

from pyggml_spec.convert.rope import RopeSettings
from pyggml_spec.convert.settings import Settings
from pyggml_spec.convert.stored_keys import store_float, store_int, store_text

MAX_COUNT = 1 << 24  # of layers, heads, values of a row: far above any model, and every product fits
QUANTIZATION_VERSION = 2
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
_VERSION = re.compile(r"v?\d")

_FILE_TYPES = {  # where llama.cpp's name for a file of one type says more than the type
    "f32": "ALL_F32",
    "q2_k": "MOSTLY_Q2_K",
    "q3_k": "MOSTLY_Q3_K_S",
    "q4_k": "MOSTLY_Q4_K_S",
    "q5_k": "MOSTLY_Q5_K_S",
}


def file_type_of(name: str) -> gguf.LlamaFileType:
    """llama.cpp's number for a file whose matrices have one type or mixture."""
    return gguf.LlamaFileType[_FILE_TYPES.get(name, f"MOSTLY_{name.upper()}")]


def general_keys(
    architecture: str, directory_name: str, n_parameters: int, matrix_type: gguf.GGMLQuantizationType
) -> dict[str, bytes]:
    """What the file is, for people and for llama.cpp."""
    return {
        "general.architecture": store_text(architecture),
        "general.type": store_text("model"),
        "general.name": store_text(_title(directory_name)),
        "general.size_label": store_text(size_label(n_parameters)),
        "general.file_type": store_int(file_type_of(matrix_type.name.lower())),
        "general.quantization_version": store_int(QUANTIZATION_VERSION),
    }


def transformer_keys(settings: Settings, rope: RopeSettings, prefix: str) -> dict[str, bytes]:
    """Sizes of a transformer, spelled alike by targets and drafters."""
    head_dim = read_head_dim(settings)
    counts = {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
    }
    keys = {
        prefix + key: store_int(settings.require_int(spelling, low=1, high=(1 << 31) - 1))
        for key, spelling in counts.items()
    }
    epsilon = settings.require_float("rms_norm_eps", low=0.0, high=0.1)
    return keys | {
        prefix + "attention.key_length": store_int(head_dim),
        prefix + "attention.value_length": store_int(head_dim),
        prefix + "attention.layer_norm_rms_epsilon": store_float(epsilon),
        prefix + "rope.freq_base": store_float(rope.theta),
    }


def read_head_dim(settings: Settings) -> int:
    """Size of an attention head; a missing key means that heads share the hidden size."""
    n_heads = settings.require_int("num_attention_heads", low=1, high=MAX_COUNT)
    n_embd = settings.require_int("hidden_size", low=1, high=MAX_COUNT)
    return settings.find_int("head_dim", low=1, high=MAX_COUNT, default=n_embd // n_heads)


def refuse_variants(settings: Settings) -> None:
    """Fail for settings that change the arithmetic in ways neither format can express."""
    settings.refuse_unless("attention_bias", False, why="models whose projections have biases are not supported")
    settings.refuse_unless("mlp_bias", False, why="models whose projections have biases are not supported")
    settings.refuse_unless("hidden_act", "silu", why="only the activation 'silu' is supported")
    if settings.find("quantization_config") is not None:
        settings.fail(("quantization_config",), "quantised checkpoints are not supported: convert the original one")


def size_label(n_parameters: int) -> str:
    """A parameter count in at least two digits and a unit, as model names have it: 19M, 2.6M, 27B."""
    unit, letter = next((u for u in _UNITS if n_parameters > u[0]), _UNITS[-1])
    scaled = n_parameters / unit
    return f"{scaled:.{0 if round(scaled) >= 10 else 1}f}{letter}"


def _title(directory_name: str) -> str:
    """A directory's name as a title: "minnow-dflash2" is Minnow Dflash2; capitals and versions are left alone."""
    words = directory_name.replace("-", " ").split()
    return " ".join(word.capitalize() if word.islower() and not _VERSION.match(word) else word for word in words)
