"""Metadata values in the bytes a GGUF file stores them as: type number, then the value."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import gguf

from pyggml_spec.errors import ModelFileError

_TYPE = gguf.GGUFValueType
_SCALAR_FORMATS = {_TYPE.UINT32: "I", _TYPE.INT32: "i", _TYPE.FLOAT32: "f", _TYPE.BOOL: "?"}


def text_bytes(text: str | bytes) -> bytes:
    """A GGUF string: its length, then UTF-8."""
    encoded = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(encoded)) + encoded


def store_int(value: int) -> bytes:
    """An unsigned 32-bit number, the type llama.cpp expects of counts and ids."""
    return _scalar(_TYPE.UINT32, value)


def store_float(value: float) -> bytes:
    """A 32-bit float."""
    return _scalar(_TYPE.FLOAT32, value)


def store_bool(value: bool) -> bytes:
    """A truth value."""
    return _scalar(_TYPE.BOOL, value)


def store_text(value: str) -> bytes:
    """A text."""
    return struct.pack("<I", _TYPE.STRING) + text_bytes(value)


def store_ints(values: Sequence[int]) -> bytes:
    """An array of signed 32-bit numbers, the type llama.cpp expects of layer lists and token types."""
    return _array(_TYPE.INT32, len(values), _packed(_TYPE.INT32, values))


def store_bools(values: Sequence[bool]) -> bytes:
    """An array of truth values."""
    return _array(_TYPE.BOOL, len(values), _packed(_TYPE.BOOL, values))


def store_texts(values: Sequence[str]) -> bytes:
    """An array of texts."""
    return _array(_TYPE.STRING, len(values), b"".join(map(text_bytes, values)))


def _scalar(value_type: gguf.GGUFValueType, value: float) -> bytes:
    return struct.pack("<I", value_type) + _packed(value_type, [value])


def _array(item_type: gguf.GGUFValueType, n_items: int, payload: bytes) -> bytes:
    return struct.pack("<IIQ", _TYPE.ARRAY, item_type, n_items) + payload


def _packed(value_type: gguf.GGUFValueType, values: Iterable[float]) -> bytes:
    items = tuple(values)
    try:
        return struct.pack(f"<{len(items)}{_SCALAR_FORMATS[value_type]}", *items)
    except (struct.error, OverflowError) as error:
        raise ModelFileError(f"{items[:4]} does not fit into {value_type.name}: {error}; check config.json") from error
