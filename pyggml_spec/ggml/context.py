"""A context: the arena of tensor descriptors. It holds no tensor data; buffers and graph arenas do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyggml_spec._native import ffi, lib
from pyggml_spec.errors import DeviceError, ShapeError
from pyggml_spec.ggml.tensor import Tensor
from pyggml_spec.ggml.types import TensorType

_MAX_VALUES = 1 << 46  # beyond any device, far below the range where C arithmetic wraps


class Context:
    """Room for `n_tensors` descriptors and, when `n_nodes` > 0, one graph of that many nodes."""

    def __init__(self, n_tensors: int, n_nodes: int = 0) -> None:
        size = n_tensors * lib.ggml_tensor_overhead()
        if n_nodes:
            size += lib.ggml_graph_overhead_custom(n_nodes, False)
        self.ptr = lib.ggml_init(ffi.new("struct ggml_init_params *", [size, ffi.NULL, True])[0])
        if self.ptr == ffi.NULL:
            raise DeviceError(f"out of host memory: no room for {n_tensors} tensor descriptors ({size} bytes)")
        self._n_free = n_tensors

    def new_tensor(self, type_: TensorType, ne: Sequence[int], name: str = "") -> Tensor:
        """A tensor of 1 to 4 dimensions ne, still without memory."""
        if not 1 <= len(ne) <= 4 or any(n < 1 for n in ne):
            raise ShapeError(f"tensor '{name}' needs 1 to 4 positive sizes, found {list(ne)}")
        n_values = 1
        for n in ne:
            n_values *= n
        if n_values > _MAX_VALUES:
            raise ShapeError(f"tensor '{name}' of ne={list(ne)} is too large; a file or option claims an absurd size")
        if ne[0] % type_.block_size:
            raise ShapeError(f"tensor '{name}': ne[0]={ne[0]} does not fill {type_.name} blocks of {type_.block_size}")
        self.claim()
        tensor = Tensor(self, lib.ggml_new_tensor(self.live(), type_.number, len(ne), ffi.new("int64_t[]", list(ne))))
        return tensor.named(name) if name else tensor

    def claim(self) -> None:
        """Count one descriptor; ggml aborts when its arena is full, so this raises first."""
        if self._n_free <= 0:
            raise ShapeError("the context is full of tensors: its creator planned for fewer graph nodes")
        self._n_free -= 1

    def live(self) -> Any:
        """The C pointer of an open context."""
        if self.ptr == ffi.NULL:
            raise ShapeError("this context was closed; its tensors cannot be used any more")
        return self.ptr

    def close(self) -> None:
        """Free the descriptors; safe to call twice."""
        if self.ptr != ffi.NULL:
            lib.ggml_free(self.ptr)
            self.ptr = ffi.NULL

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "ptr", None) is not None and lib is not None:
            self.close()
