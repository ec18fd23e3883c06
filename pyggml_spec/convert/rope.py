"""Rotary embedding settings of a checkpoint, in any of the spellings that `transformers` has used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyggml_spec.convert.settings import Settings
from pyggml_spec.convert.stored_keys import store_float, store_int, store_text

_CTX_MAX = (1 << 31) - 1
_PLAIN = (None, "default", "none")


@dataclass(frozen=True)
class RopeSettings:
    """One rotary embedding; `entries` are its own settings (rope_theta apart)."""

    theta: float
    kind: str | None  # of scaling
    entries: Settings
    partial_factor: float | None  # share of a head that rotates
    sections: list[int] | None  # of a multi-section embedding

    @property
    def is_scaled(self) -> bool:
        return self.kind not in _PLAIN


def read_rope(settings: Settings) -> RopeSettings:
    """The rotary embedding: `rope_parameters` (transformers >= 5) or `rope_scaling` with a theta beside it.

    Raises ModelFileError when the base is missing or layers have different ones.
    """
    section = settings.find("rope_parameters", "rope_scaling")
    values: Mapping[str, Any] = section if isinstance(section, Mapping) else {}
    if "full_attention" in values:
        values = _only_kind_of_layer(settings, values)
    beside = {key: settings.find(key) for key in ("rope_theta", "partial_rotary_factor")}
    entries = Settings({**beside, **{k: v for k, v in values.items() if v is not None}}, file=settings.file)
    return RopeSettings(
        theta=entries.require_float("rope_theta", low=1.0, high=1e12),
        kind=entries.find_text("rope_type", "type"),
        entries=entries,
        partial_factor=entries.find_float("partial_rotary_factor", low=1e-3, high=1.0),
        sections=entries.find_ints("mrope_section", low=0, high=1 << 16),
    )


def _only_kind_of_layer(settings: Settings, by_layer: Mapping[str, Any]) -> Mapping[str, Any]:
    kinds = [value for value in by_layer.values() if isinstance(value, Mapping)]
    if not kinds or any(value != kinds[0] for value in kinds):
        settings.fail(("rope_parameters",), "layers with different rotary embeddings are not supported")
    return kinds[0]


def yarn_keys(rope: RopeSettings, prefix: str) -> dict[str, bytes]:
    """The keys of a scaled embedding; none for a plain one. Raises ModelFileError for scaling other than YaRN."""
    if not rope.is_scaled:
        return {}
    entries = rope.entries
    if rope.kind != "yarn":
        entries.fail(("rope_type", "type"), "only 'yarn' and 'default' are supported")
    scaling = prefix + "rope.scaling."
    keys = {
        scaling + "type": store_text("yarn"),
        scaling + "factor": store_float(entries.require_float("factor", low=1.0, high=1e6)),
        scaling + "original_context_length": store_int(
            entries.require_int("original_max_position_embeddings", low=1, high=_CTX_MAX)
        ),
    }
    optional = {
        "yarn_ext_factor": ("extrapolation_factor",),
        "yarn_attn_factor": ("attention_factor", "attn_factor"),
        "yarn_beta_fast": ("beta_fast",),
        "yarn_beta_slow": ("beta_slow",),
    }
    for name, spellings in optional.items():
        value = entries.find_float(*spellings, low=0.0, high=1e6)
        if value is not None:
            keys[scaling + name] = store_float(value)
    return keys
