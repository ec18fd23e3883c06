"""Which type every tensor of a model gets: one type for all matrices, or a mixture that spends bits where they count.

The mixtures follow llama.cpp's long-standing rule, so that a name means the same size and quality as there: the output
head keeps six bits, and in the layers that hurt most (the first eighth, the last eighth, every third between them) the
values of attention and the projection down from the feed-forward do too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import gguf

from pyggml_spec.errors import OptionError
from pyggml_spec.gguf_io.reader import TensorInfo
from pyggml_spec.gguf_io.shapes import trimmed_shape

T: Any = gguf.GGMLQuantizationType

UNIFORM_TYPES = {
    name: T[name.upper()]
    for name in ("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k", "q4_k", "q3_k", "q2_k", "q5_1", "q5_0", "q4_1", "q4_0")
} | {"iq4_nl": T.IQ4_NL}
MIXTURES = ("q4_k_m", "q5_k_m", "iq4_xs")
NEED_IMATRIX = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")

_BASE = {"q4_k_m": T.Q4_K, "q5_k_m": T.Q5_K, "iq4_xs": T.IQ4_XS}
_SMALLER_BLOCKS = {  # nearest type in size among those with blocks of 32
    T.Q6_K: T.Q8_0,
    T.Q5_K: T.Q5_1,
    T.Q4_K: T.Q5_0,
    T.IQ4_XS: T.IQ4_NL,
    T.Q3_K: T.Q4_0,
    T.Q2_K: T.Q4_0,
}
_KEPT = re.compile(r"norm|conv1d|conv_base|conv\.base|ffn_gate_inp|\.bias$|ssm_a$")
_VALUES = re.compile(r"\.(attn_v|attn_qkv)\.weight$")
_DOWN = re.compile(r"\.ffn_down\.weight$")
_MANY_QUERIES = 4  # query heads per value head from which values are small enough to deserve bits


@dataclass(frozen=True)
class ModelShape:
    """What a recipe needs to know of a model."""

    n_layers: int
    n_queries_per_value: int
    has_output_head: bool  # of its own; otherwise the embedding table serves as one

    def is_sensitive(self, layer: int) -> bool:
        """Whether quantising a layer hurts more than most."""
        eighth = self.n_layers // 8
        is_outer = layer < eighth or layer >= self.n_layers * 7 // 8
        return is_outer or (layer - eighth) % 3 == 2


@dataclass(frozen=True)
class Override:
    """A type for the tensors whose name matches an expression."""

    pattern: re.Pattern[str]
    type: gguf.GGMLQuantizationType

    @classmethod
    def parse(cls, text: str) -> Override:
        """From `PATTERN=TYPE`; raises OptionError."""
        pattern, separator, name = text.rpartition("=")
        if not separator or not pattern:
            raise OptionError(f"override '{text}' must be PATTERN=TYPE, such as attn_v=q6_k")
        try:
            return cls(re.compile(pattern), single_type(name))
        except re.error as error:
            raise OptionError(f"override '{text}' is no regular expression: {error}") from error


def single_type(name: str) -> gguf.GGMLQuantizationType:
    """One storage type by its name; raises OptionError for mixtures and types that cannot be written."""
    types = {**UNIFORM_TYPES, "iq4_xs": T.IQ4_XS}
    found = types.get(name.lower())
    if found is None:
        raise OptionError(f"type '{name}' cannot be given to a tensor{_why_not(name, types)}")
    return found


def check_recipe(name: str) -> str:
    """The recipe's name in lower case; raises OptionError for an unknown one."""
    if name.lower() not in (*UNIFORM_TYPES, *MIXTURES):
        raise OptionError(f"type '{name}' is not supported{_why_not(name, (*MIXTURES, *UNIFORM_TYPES))}")
    return name.lower()


def _why_not(name: str, choices: Iterable[str]) -> str:
    if name.lower() in NEED_IMATRIX:
        return ": it needs an importance matrix, which is not supported"
    return f"; choose one of {', '.join(choices)}"


def is_matrix(tensor: TensorInfo) -> bool:
    """Whether a tensor may be quantised; norms, vectors, convolutions and integers stay as they are."""
    is_number = tensor.type.name in ("F32", "F16", "BF16") or gguf.GGML_QUANT_SIZES[tensor.type][0] > 1
    return is_number and len(trimmed_shape(tensor.ne)) >= 2 and not _KEPT.search(tensor.name)


def choose_type(
    tensor: TensorInfo, recipe: str, shape: ModelShape, overrides: Sequence[Override]
) -> gguf.GGMLQuantizationType:
    """The type a matrix should get: the last override that matches its name, else what the recipe says."""
    matching = [override.type for override in overrides if override.pattern.search(tensor.name)]
    if matching:
        return matching[-1]
    if recipe in UNIFORM_TYPES:
        return UNIFORM_TYPES[recipe]
    if tensor.name == ("output.weight" if shape.has_output_head else "token_embd.weight"):
        return T.Q6_K
    return _mixed_type(tensor.name, recipe, shape)


def _mixed_type(name: str, recipe: str, shape: ModelShape) -> gguf.GGMLQuantizationType:
    base = _BASE[recipe]
    layer = re.match(r"blk\.(\d+)\.", name)
    number = int(layer[1]) if layer else -1
    if recipe == "iq4_xs":
        deserves = _VALUES.search(name) and shape.n_queries_per_value >= _MANY_QUERIES
        is_early_down = _DOWN.search(name) and 0 <= number < shape.n_layers // 8
        return T.Q5_K if deserves or is_early_down else base
    is_delicate = _VALUES.search(name) or _DOWN.search(name)
    return T.Q6_K if is_delicate and number >= 0 and shape.is_sensitive(number) else base


def fitting_type(n_values: int, wanted: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    """`wanted`, or the nearest type whose blocks divide rows of n_values: one of blocks of 32, else f16."""
    for candidate in (wanted, _SMALLER_BLOCKS.get(wanted, wanted)):
        if n_values % gguf.GGML_QUANT_SIZES[candidate][0] == 0:
            return candidate
    return T.F16
