"""Graphs built once and replayed, and the arena of scratch memory they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyggml_spec._native import ffi, lib
from pyggml_spec.errors import DeviceError, ShapeError
from pyggml_spec.ggml.backend import Backend
from pyggml_spec.ggml.context import Context
from pyggml_spec.ggml.tensor import Tensor
from pyggml_spec.ggml.types import TensorType


class GraphArena:
    """Scratch memory shared by all graphs of one backend: they never run at the same time.

    Growing it frees the memory that graphs placed before point into, so `generation` counts the growths and a graph
    of an older generation is stale: it must be built again. Build the largest graph first and nothing goes stale.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.generation = 0
        self.n_bytes = 0
        self._allocator = lib.ggml_gallocr_new(lib.ggml_backend_get_default_buffer_type(backend.ptr))
        if self._allocator == ffi.NULL:
            raise DeviceError(f"device '{backend.device.name}' has no graph allocator")

    def place(self, graph_ptr: Any) -> int:
        """Give every tensor of the graph its address; returns the generation it belongs to."""
        placed = lib.ggml_gallocr_reserve(self._allocator, graph_ptr)
        if not (placed and lib.ggml_gallocr_alloc_graph(self._allocator, graph_ptr)):
            raise DeviceError(f"device '{self.backend.device.name}' has no memory for the scratch space of a graph")
        n_bytes = lib.ggml_gallocr_get_buffer_size(self._allocator, 0)
        if n_bytes != self.n_bytes:
            self.n_bytes = n_bytes
            self.generation += 1
        return self.generation

    def close(self) -> None:
        """Release the scratch memory; safe to call twice."""
        if self._allocator != ffi.NULL:
            lib.ggml_gallocr_free(self._allocator)
            self._allocator = ffi.NULL

    def __del__(self) -> None:
        if hasattr(self, "_allocator") and lib is not None:
            self.close()


class Graph:
    """A computation with named inputs and outputs, replayed with new input data.

    Build it by calling operations on `context`, then `expand` each result whose side effects or value are wanted.
    """

    def __init__(self, arena: GraphArena, n_nodes: int) -> None:
        self.context = Context(n_tensors=2 * n_nodes, n_nodes=n_nodes)
        self.ptr = lib.ggml_new_graph_custom(self.context.live(), n_nodes, False)
        self._arena = arena
        self._n_room = n_nodes
        self._generation = -1

    @property
    def n_nodes(self) -> int:
        return lib.ggml_graph_n_nodes(self.ptr)

    def input(self, type_: TensorType, ne: Sequence[int], name: str) -> Tensor:
        """A tensor to upload before EVERY run: its memory is scratch again after its last use."""
        tensor = self.context.new_tensor(type_, ne, name)
        lib.ggml_set_input(tensor.ptr)
        return tensor

    def output(self, tensor: Tensor) -> Tensor:
        """Mark a result that is downloaded after the run, and include it in the graph."""
        lib.ggml_set_output(tensor.ptr)
        self.expand(tensor)
        return tensor

    def expand(self, tensor: Tensor) -> None:
        """Include `tensor` and all it depends on, in this order."""
        lib.ggml_build_forward_expand(self.ptr, tensor.ptr)

    def node(self, index: int) -> Tensor:
        """Node `index` in execution order."""
        if not 0 <= index < self.n_nodes:
            raise ShapeError(f"graph node {index} does not exist; the graph has {self.n_nodes}")
        return Tensor(self.context, lib.ggml_graph_node(self.ptr, index))

    def place(self) -> None:
        """Give all tensors their addresses; the last step of building."""
        self._refuse_unsupported()
        self._generation = self._arena.place(self.ptr)
        lib.ggml_spec_graph_seal(self.ptr)

    @property
    def is_stale(self) -> bool:
        """Whether the arena has moved since this graph was placed."""
        return self._generation != self._arena.generation

    def _refuse_unsupported(self) -> None:
        backend = self._arena.backend
        for i in range(self.n_nodes):
            node = lib.ggml_graph_node(self.ptr, i)
            if not lib.ggml_backend_supports_op(backend.ptr, node):
                described = lib.ggml_spec_mode_name if lib.ggml_spec_is_mode(node) else lib.ggml_op_desc
                op = ffi.string(described(node)).decode()
                name = ffi.string(node.name).decode()
                raise DeviceError(f"device '{backend.device.name}' has no kernel for {op} (node '{name}')")

    def refuse_stale(self) -> None:
        """Raise before anything is written to memory that this graph had once."""
        if self.is_stale:
            raise ShapeError("this graph was placed before its scratch memory moved; build it again")

    def run(self) -> None:
        """Compute with the inputs uploaded last."""
        self.refuse_stale()
        self._arena.backend.compute(self.ptr)

    def close(self) -> None:
        """Free the descriptors; safe to call twice."""
        self.ptr = ffi.NULL
        self.context.close()
