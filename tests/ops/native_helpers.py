"""Smallest possible harness for one native operation: tensors on one device, one graph, numpy in and out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np

from pyggml_spec._native import ffi, lib

TYPES = {np.dtype(np.float32): lib.GGML_TYPE_F32, np.dtype(np.int32): lib.GGML_TYPE_I32}
CONTEXT_BYTES = 1 << 20
MIRRORS: dict[int, np.ndarray] = {}  # address of a tensor off the host -> (n_bytes,) uint8 that stands for its memory


class Harness:
    """One ggml context on one backend; `finish` allocates the tensors and fixes the graph's result nodes.

    Tensors off the host are mirrored: `compute` uploads every mirror, runs, and downloads them all.
    """

    device = "CPU"  # of harnesses made from now on; see `on_device`

    def __init__(self, n_threads: int = 1) -> None:
        params = ffi.new("struct ggml_init_params *", {"mem_size": CONTEXT_BYTES, "no_alloc": True})
        self.context = lib.ggml_init(params[0])
        self.backend = lib.ggml_backend_dev_init(lib.ggml_backend_dev_by_name(self.device.encode()), ffi.NULL)
        if self.device == "CPU":
            lib.ggml_backend_cpu_set_n_threads(self.backend, n_threads)
        self.buffer = ffi.NULL
        self.graph = ffi.NULL
        self.tensors: list[Any] = []

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.buffer != ffi.NULL:
            lib.ggml_backend_buffer_free(self.buffer)
        for tensor in self.tensors:
            MIRRORS.pop(address(tensor), None)
        lib.ggml_backend_free(self.backend)
        lib.ggml_free(self.context)

    def tensor(self, *ne: int, dtype: Any = np.float32, type_id: int | None = None) -> Any:
        """A new tensor, ne fastest first."""
        kind = TYPES[np.dtype(dtype)] if type_id is None else type_id
        self.tensors.append(lib.ggml_new_tensor(self.context, kind, len(ne), ffi.new("int64_t[]", ne)))
        return self.tensors[-1]

    def finish(self, *results: Any) -> None:
        """Allocates every tensor and builds the graph."""
        self.graph = lib.ggml_new_graph(self.context)
        for result in results:
            lib.ggml_build_forward_expand(self.graph, result)
        self.buffer = lib.ggml_backend_alloc_ctx_tensors(self.context, self.backend)
        assert self.buffer != ffi.NULL, "the buffer could not be allocated"
        for result in results:
            assert lib.ggml_backend_supports_op(self.backend, result), f"{self.device} has no kernel for this"
        self.tensors += results
        if not lib.ggml_backend_buffer_is_host(self.buffer):
            MIRRORS.update((address(t), np.zeros(lib.ggml_nbytes(t), dtype=np.uint8)) for t in self.tensors)

    def compute(self) -> None:
        """Runs the graph once."""
        mirrored = [(tensor, MIRRORS[address(tensor)]) for tensor in self.tensors if address(tensor) in MIRRORS]
        for tensor, mirror in mirrored:
            lib.ggml_backend_tensor_set(tensor, ffi.from_buffer(mirror), 0, mirror.nbytes)
        status = lib.ggml_backend_graph_compute(self.backend, self.graph)
        assert status == lib.GGML_STATUS_SUCCESS, f"graph ended with status {status}"
        for tensor, mirror in mirrored:
            lib.ggml_backend_tensor_get(tensor, ffi.from_buffer(mirror), 0, mirror.nbytes)


@contextmanager
def on_device(name: str) -> Iterator[str]:
    """Harnesses made inside compute on this device."""
    before, Harness.device = Harness.device, name
    yield name
    Harness.device = before


def address(tensor: Any) -> int:
    """Of the C struct."""
    return int(ffi.cast("uintptr_t", tensor))


def view(tensor: Any) -> np.ndarray:
    """The tensor's memory, or what mirrors it, as a numpy array, slowest axis first; float32 or int32, contiguous."""
    dtype = np.int32 if tensor.type == lib.GGML_TYPE_I32 else np.float32
    shape = [tensor.ne[i] for i in range(4)]
    while len(shape) > 1 and shape[-1] == 1:
        shape.pop()
    mirror = MIRRORS.get(address(tensor))
    memory = ffi.buffer(tensor.data, lib.ggml_nbytes(tensor)) if mirror is None else mirror
    return np.frombuffer(memory, dtype=dtype).reshape(shape[::-1])


def message(text: Any) -> str:
    """The text of a native check, empty when the operands fit."""
    return "" if text == ffi.NULL else ffi.string(text).decode()
