"""Rows of weights to and from ggml's storage types, without a graph: what converters need."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pyggml_spec._native import ffi, lib
from pyggml_spec.errors import OptionError, ShapeError
from pyggml_spec.ggml.types import TensorType, type_by_number

_F16_MAX = 65504.0


def _numbers(names: Iterable[str]) -> dict[str, int]:
    return {name: getattr(lib, f"GGML_TYPE_{name.upper()}") for name in names}


WRITABLE_TYPES = _numbers(
    ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl")
    + ("iq4_xs",)
)
"""Types rows can be written in without an importance matrix, name -> ggml's number."""


def quantise_rows(values: np.ndarray, type_number: int) -> np.ndarray:
    """Rows of f32 (n_rows, n_values) in ggml's layout of a type, as uint8 (n_rows, bytes of a row).

    Raises OptionError for a type that cannot be written, ShapeError when a row is no multiple of its block, and
    ValueError when a value is not finite or too large for f16: kernels would spread it over the whole row.
    """
    tensor_type = _writable(type_number)
    if values.ndim != 2 or values.dtype != np.float32 or not values.flags.c_contiguous:
        raise ShapeError(f"rows to quantise must be (n_rows, n_values) f32 in order, not {values.dtype} {values.shape}")
    n_rows, n_values = values.shape
    _check_row(tensor_type, n_values)
    _check_range(values, tensor_type)
    if tensor_type.name == "f32":
        return values.view(np.uint8)
    raw = np.empty((n_rows, tensor_type.row_bytes(n_values)), np.uint8)
    if raw.size:
        source, out = ffi.from_buffer("float[]", values), ffi.from_buffer(raw, require_writable=True)
        lib.ggml_quantize_chunk(type_number, source, out, 0, n_rows, n_values, ffi.NULL)
    return raw


def dequantise_rows(raw: np.ndarray, type_number: int, n_values: int) -> np.ndarray:
    """Rows of uint8 (n_rows, bytes of a row) in ggml's layout of a type, as f32 (n_rows, n_values).

    Raises OptionError for a type without a decoder, ShapeError when the bytes do not fit.
    """
    tensor_type = type_by_number(type_number)
    if raw.dtype != np.uint8 or raw.ndim != 2 or not raw.flags.c_contiguous:
        raise ShapeError(f"stored rows must be (n_rows, n_bytes) uint8 in order, not {raw.dtype} {raw.shape}")
    _check_row(tensor_type, n_values)
    if raw.shape[1] != tensor_type.row_bytes(n_values):
        raise ShapeError(f"a row of {n_values} {tensor_type.name} values does not have {raw.shape[1]} bytes")
    if tensor_type.name == "f32":
        return raw.view(np.float32)
    decode = lib.ggml_get_type_traits(type_number).to_float
    if decode == ffi.NULL:
        raise OptionError(f"tensors of type {tensor_type.name} cannot be decoded; start from another file")
    values = np.empty((raw.shape[0], n_values), np.float32)
    if values.size:
        decode(ffi.from_buffer(raw), ffi.from_buffer("float[]", values, require_writable=True), values.size)
    return values


def _writable(type_number: int) -> TensorType:
    if type_number not in WRITABLE_TYPES.values():
        names = ", ".join(WRITABLE_TYPES)
        raise OptionError(f"ggml type number {type_number} cannot be written; choose one of {names}")
    return type_by_number(type_number)


def _check_row(tensor_type: TensorType, n_values: int) -> None:
    if n_values % tensor_type.block_size:
        raise ShapeError(f"{tensor_type.name} packs {tensor_type.block_size} values, so no row of {n_values} fits")


def _check_range(values: np.ndarray, tensor_type: TensorType) -> None:
    # one pass without temporaries: the extremes are not finite if any value is not
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    if not (np.isfinite(low) and np.isfinite(high)):
        raise ValueError("a weight is infinite or not a number")
    if tensor_type.name == "f16" and max(-low, high) > _F16_MAX:
        raise ValueError(f"a weight of {max(-low, high):g} is beyond f16's {_F16_MAX:g}; bf16 and f32 hold it")
