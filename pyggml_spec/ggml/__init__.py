"""Thin owners and checked operations over the native library: the only user of `_native`.

Everything ggml would `abort()` on is checked here first and raised as an exception. Shapes are ggml's
ne = [fastest, ...] throughout.
"""

from pyggml_spec.ggml.backend import Backend, Buffer, Device, list_devices
from pyggml_spec.ggml.context import Context
from pyggml_spec.ggml.graph import Graph, GraphArena
from pyggml_spec.ggml.tensor import Tensor
from pyggml_spec.ggml.types import F16, F32, I32, Q8_0, TensorType, type_by_name

__all__ = [
    "F16", "F32", "I32", "Q8_0", "Backend", "Buffer", "Context", "Device", "Graph", "GraphArena", "Tensor",
    "TensorType", "list_devices", "type_by_name",
]
