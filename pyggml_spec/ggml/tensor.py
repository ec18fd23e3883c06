"""A tensor of a context: shape known to Python, data on whatever device its buffer lives on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyggml_spec._native import ffi, lib
from pyggml_spec.errors import ShapeError
from pyggml_spec.ggml.types import F32, I32, TensorType, type_by_number

if TYPE_CHECKING:
    from pyggml_spec.ggml.context import Context

_NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "i32": np.dtype(np.int32),
}


class Tensor:
    """A view of one `ggml_tensor`; it keeps its context alive, which owns the memory of the descriptor.

    Attributes: `ne` four sizes, fastest first; `type`; `ptr` the C pointer.
    """

    __slots__ = ("_has_memory", "_shape", "context", "ne", "ptr", "type")

    def __init__(self, context: Context, ptr: Any) -> None:
        self.context = context
        self.ptr = ptr
        ne = ptr.ne
        self.ne = (ne[0], ne[1], ne[2], ne[3])
        self.type: TensorType = type_by_number(ptr.type)
        self._has_memory = False
        self._shape: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        return ffi.string(self.ptr.name).decode(errors="replace")

    @property
    def nb(self) -> tuple[int, int, int, int]:
        """Strides in bytes, same order as `ne`."""
        nb = self.ptr.nb
        return (nb[0], nb[1], nb[2], nb[3])

    @property
    def n_bytes(self) -> int:
        return lib.ggml_nbytes(self.ptr)

    @property
    def n_values(self) -> int:
        return self.ne[0] * self.ne[1] * self.ne[2] * self.ne[3]

    @property
    def is_contiguous(self) -> bool:
        return bool(lib.ggml_is_contiguous(self.ptr))

    @property
    def has_contiguous_rows(self) -> bool:
        return self.ptr.nb[0] == self.type.block_bytes

    def named(self, name: str) -> Tensor:
        """Name the tensor (llama.cpp's tensor name, for graph dumps) and return it."""
        lib.ggml_set_name(self.ptr, name.encode())
        return self

    def set(self, values: np.ndarray, offset_bytes: int = 0) -> None:
        """Upload the bytes of a C-contiguous array; raises ShapeError when they do not fit."""
        self._require_memory()
        if offset_bytes < 0 or offset_bytes + values.nbytes > self.n_bytes:
            raise ShapeError(
                f"upload of {values.nbytes} bytes at offset {offset_bytes} does not fit tensor '{self.name}' "
                f"of {self.n_bytes} bytes"
            )
        if values.nbytes:
            lib.ggml_backend_tensor_set(self.ptr, ffi.from_buffer(values), offset_bytes, values.nbytes)

    def get(self, out: np.ndarray | None = None) -> np.ndarray:
        """Download the data of a contiguous tensor: an array of shape ne reversed, unit axes in front of (rows, cols)
        dropped."""
        self._require_memory()
        if out is None:
            out = np.empty(self._numpy_shape(), dtype=self._numpy_type())
        if out.nbytes != self.n_bytes:
            raise ShapeError(f"tensor '{self.name}' has {self.n_bytes} bytes, the output array {out.nbytes}")
        lib.ggml_backend_tensor_get(self.ptr, ffi.from_buffer(out), 0, out.nbytes)
        return out

    def read(self, offset_bytes: int, out: np.ndarray) -> None:
        """Fill a C-contiguous array with the bytes from `offset_bytes` on; raises ShapeError when there are fewer."""
        self._require_memory()
        if offset_bytes < 0 or offset_bytes + out.nbytes > self.n_bytes:
            raise ShapeError(
                f"download of {out.nbytes} bytes at offset {offset_bytes} leaves tensor '{self.name}' "
                f"of {self.n_bytes} bytes"
            )
        if out.nbytes:
            lib.ggml_backend_tensor_get(self.ptr, ffi.from_buffer(out), offset_bytes, out.nbytes)

    def zero(self, offset_bytes: int, n_bytes: int) -> None:
        """Zero a part on the device; raises ShapeError when it reaches beyond the tensor."""
        self._require_memory()
        if offset_bytes < 0 or n_bytes < 0 or offset_bytes + n_bytes > self.n_bytes:
            raise ShapeError(
                f"zeroing {n_bytes} bytes at offset {offset_bytes} leaves tensor '{self.name}' of {self.n_bytes} bytes"
            )
        if n_bytes:
            lib.ggml_backend_tensor_memset(self.ptr, 0, offset_bytes, n_bytes)

    def pack(self) -> bool:
        """Reorder a weight matrix in place for the CPU's products; False where its type or this CPU has no such order.

        Afterwards only `mul_mat` and `get_rows` read it rightly.
        """
        return bool(lib.ggml_spec_pack(self.ptr))

    @property
    def is_packed(self) -> bool:
        return bool(lib.ggml_spec_is_packed(self.ptr))

    def _require_memory(self) -> None:
        self.context.live()
        if self._has_memory:
            return
        view_src = self.ptr.view_src
        if self.ptr.buffer == ffi.NULL and (view_src == ffi.NULL or view_src.buffer == ffi.NULL):
            raise ShapeError(f"tensor '{self.name}' has no memory yet; allocate its graph or buffer first")
        self._has_memory = True

    def get_bytes(self, offset_bytes: int, n_bytes: int) -> np.ndarray:
        """Download a stretch of the data as stored: (n_bytes,) uint8."""
        if offset_bytes < 0 or n_bytes < 0 or offset_bytes + n_bytes > self.n_bytes:
            raise ShapeError(
                f"{n_bytes} bytes at offset {offset_bytes} do not lie inside the {self.n_bytes} of tensor '{self.name}'"
            )
        out = np.empty(n_bytes, dtype=np.uint8)
        if n_bytes:
            lib.ggml_backend_tensor_get(self.ptr, ffi.from_buffer(out), offset_bytes, n_bytes)
        return out

    def _numpy_shape(self) -> tuple[int, ...]:
        if self._shape is not None:
            return self._shape
        n_dims = max(2, *(i + 1 for i, n in enumerate(self.ne) if n > 1), 0)
        self._shape = self.ne[:n_dims][::-1]
        return self._shape

    def _numpy_type(self) -> np.dtype[Any]:
        try:
            return _NUMPY_TYPES[self.type.name]
        except KeyError:
            raise ShapeError(f"tensor '{self.name}' of type {self.type.name} has no NumPy counterpart") from None

    def __repr__(self) -> str:
        return f"Tensor('{self.name}', {self.type.name}, ne={list(self.ne)})"


def require_type(tensor: Tensor, *types: TensorType, what: str) -> None:
    """Raise ShapeError unless `tensor` has one of `types`."""
    if tensor.type not in types:
        wanted = " or ".join(t.name for t in types)
        raise ShapeError(f"{what} must be {wanted}, but '{tensor.name}' is {tensor.type.name}")


def require_f32(tensor: Tensor, what: str) -> None:
    require_type(tensor, F32, what=what)


def require_i32(tensor: Tensor, what: str) -> None:
    require_type(tensor, I32, what=what)
