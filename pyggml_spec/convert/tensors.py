"""From tensors of a checkpoint to tensors of a GGUF file: which become what, in which order and type."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import gguf
import numpy as np

from pyggml_spec.convert.checkpoint import StoredTensor
from pyggml_spec.convert.encode import encode_rows
from pyggml_spec.convert.output_file import OutputTensor
from pyggml_spec.errors import ModelFileError

F32, F16, I64 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "I64"))
MATRIX_TYPES = {name: gguf.GGMLQuantizationType[name.upper()] for name in ("f32", "f16", "bf16", "q8_0")}

LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
"""What every kind of layer here has: Hugging Face's names -> llama.cpp's, both without the layer's prefix."""

_LAYER = re.compile(r"layers\.(0|[1-9]\d{0,3})\.(.+)")
_ALWAYS_F32 = ("norm.weight", "conv1d.weight", "_conv_base", "_conv.base", "dspark.confidence.weight")


@dataclass(frozen=True)
class TensorPlan:
    """How one tensor is made: read, put in order, changed element by element."""

    stored: StoredTensor
    name: str
    row_order: np.ndarray | None = None  # (n_rows,) row of the checkpoint for every row of the file
    column_order: np.ndarray | None = None  # (n_columns,) likewise; a vector's entries are columns
    change: Callable[[np.ndarray], np.ndarray] | None = None  # element by element
    shape: tuple[int, ...] = field(default=())  # slowest first; the checkpoint's unless a squeeze changes it

    @property
    def ne(self) -> tuple[int, ...]:
        """Shape in the file, fastest first."""
        return tuple(reversed(self.shape or self.stored.shape)) or (1,)

    @property
    def keeps_f32(self) -> bool:
        """Whether the tensor enters element-wise operations: vectors, norms, convolutions."""
        return len(self.ne) < 2 or self.name.endswith(_ALWAYS_F32)

    def rows(self, begin: int, end: int) -> np.ndarray:
        """Rows begin .. end as (n_rows, n_values) f32; a vector is one row, more axes are flattened into rows."""
        n_values = self.ne[0]
        if len(self.stored.shape) == 2:
            values = self.stored.widened(slice(begin, end) if self.row_order is None else self.row_order[begin:end])
        else:
            values = self.stored.widened(slice(None)).reshape(-1, n_values)
            values = values[slice(begin, end) if self.row_order is None else self.row_order[begin:end]]
        if self.column_order is not None:
            values = values[:, self.column_order]
        return np.ascontiguousarray(values if self.change is None else self.change(values), np.float32)


def canonical_layer_name(name: str, layer_names: Mapping[str, str], top_names: Mapping[str, str]) -> str | None:
    """llama.cpp's name of a tensor by its name in the checkpoint, or None for an unknown one."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return top_names.get(name)
    inner = layer_names.get(match[2])
    return None if inner is None else f"blk.{match[1]}.{inner}"


def output_tensors(
    plans: list[TensorPlan], matrix_type: gguf.GGMLQuantizationType, n_threads: int, notes: list[str]
) -> list[OutputTensor]:
    """The plans as tensors to write, in reading order; fallbacks are added to `notes`.

    Raises ModelFileError when two tensors of the checkpoint would get one name.
    """
    for name, count in Counter(plan.name for plan in plans).items():
        if count > 1:
            raise ModelFileError(f"{count} tensors of the checkpoint would become '{name}'; it is damaged or unknown")
    ordered = sorted(plans, key=lambda plan: file_order(plan.name))
    return [_output_tensor(plan, _type_of(plan, matrix_type, notes), n_threads) for plan in ordered]


def file_order(name: str) -> tuple[int, int, str]:
    """Sort key: tables, then layers by number, then the output side: the order in which a pass needs them."""
    match = re.match(r"blk\.(\d+)\.", name)
    if match:
        return 1, int(match[1]), name
    return (2 if name.startswith("output") else 0), 0, name


def _type_of(plan: TensorPlan, matrix_type: gguf.GGMLQuantizationType, notes: list[str]) -> gguf.GGMLQuantizationType:
    if plan.stored.is_integer:
        return I64
    if plan.keeps_f32:
        return F32
    block_size, _ = gguf.GGML_QUANT_SIZES[matrix_type]
    if plan.ne[0] % block_size:
        notes.append(f"{plan.name}: rows of {plan.ne[0]} do not divide into blocks of {block_size}, so it stays f16")
        return F16
    return matrix_type


def _output_tensor(plan: TensorPlan, tensor_type: gguf.GGMLQuantizationType, n_threads: int) -> OutputTensor:
    def pieces() -> Iterator[np.ndarray]:
        n_rows = math.prod(plan.ne[1:])
        if tensor_type == I64:
            table = plan.stored.mapped().astype(np.int64)
            return iter([table if plan.change is None else plan.change(table)])
        return encode_rows(plan.rows, n_rows, plan.ne[0], tensor_type, plan.stored.name, n_threads)

    if 0 in plan.ne:
        raise ModelFileError(f"tensor '{plan.stored.name}' of '{plan.stored.path}' is empty; download it again")
    return OutputTensor(plan.name, plan.ne, tensor_type, pieces)
