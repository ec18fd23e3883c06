"""Tensor element types: ggml's numbers with their block sizes, read from the library once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from pyggml_spec._native import ffi, lib
from pyggml_spec.errors import OptionError
from pyggml_spec.records import KV_TYPES


@dataclass(frozen=True)
class TensorType:
    """One ggml type; `block_size` values are stored in `block_bytes` bytes."""

    number: int
    name: str
    block_size: int
    block_bytes: int

    def row_bytes(self, n_values: int) -> int:
        """Bytes of one row of `n_values` values (a multiple of the block size)."""
        return n_values // self.block_size * self.block_bytes


@cache
def type_by_number(number: int) -> TensorType:
    """The type ggml numbers `number`; the caller vouches that the number exists."""
    name = ffi.string(lib.ggml_type_name(number)).decode()
    return TensorType(number, name, lib.ggml_blck_size(number), lib.ggml_type_size(number))


def type_by_name(name: str, allowed: tuple[str, ...] = KV_TYPES) -> TensorType:
    """The type called `name`, which must be one of `allowed`."""
    if name not in allowed:
        raise OptionError(f"tensor type '{name}' is not supported here; choose one of {', '.join(allowed)}")
    return next(t for t in map(type_by_number, _NUMBERS) if t.name == name)


_NUMBERS = (
    lib.GGML_TYPE_F32,
    lib.GGML_TYPE_F16,
    lib.GGML_TYPE_BF16,
    lib.GGML_TYPE_Q4_0,
    lib.GGML_TYPE_Q8_0,
    lib.GGML_TYPE_I32,
)
F32 = type_by_number(lib.GGML_TYPE_F32)
F16 = type_by_number(lib.GGML_TYPE_F16)
Q4_0 = type_by_number(lib.GGML_TYPE_Q4_0)
Q8_0 = type_by_number(lib.GGML_TYPE_Q8_0)
I32 = type_by_number(lib.GGML_TYPE_I32)
