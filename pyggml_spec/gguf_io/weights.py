"""Weights of a model file on a device, with projections of one input stacked where their types allow it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

import gguf
import numpy as np

from pyggml_spec.errors import ModelFileError
from pyggml_spec.ggml import F32, Backend, Context, Tensor
from pyggml_spec.ggml.types import type_by_number
from pyggml_spec.gguf_io.reader import TensorInfo

_UPLOAD_BYTES = 16 << 20  # progress granularity
_SMALL_F32 = ("norm.weight", "dt.bias", "ssm_a", "conv1d.weight", "conv_base", "conf_proj.weight", "conf_proj.bias")


@dataclass(frozen=True)
class Run:
    """Consecutive parts of a stack that share a type: one tensor, the parts one below the other."""

    tensor: Tensor  # [n_in, sum(n_rows)], or [sum(n_rows)] for vectors
    n_rows: tuple[int, ...]


class Weights:
    """Every tensor of a model, by name; `stacks[name]` are the runs of a stack.

    A stack puts matrices that read the same input one below the other, so that one product serves all of them.
    `generation` differs between any two loads, in the order of loading: a graph is only valid for the weights of the
    generation it was built on, even when a reload lands at the same address.
    """

    _generations: ClassVar[Iterator[int]] = count(1)

    def __init__(
        self,
        backend: Backend,
        infos: Mapping[str, TensorInfo],
        names: Iterable[str],
        stacks: Mapping[str, Sequence[str]],
        what: str,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.generation = next(self._generations)
        infos = {name: _as_stored(infos[name]) for name in names}
        stacked = {part for parts in stacks.values() for part in parts}
        self._context = Context(len(infos) + 1)
        self._uploads: list[tuple[Tensor, list[TensorInfo]]] = []
        self._tensors = {name: self._new([info]) for name, info in infos.items() if name not in stacked}
        self.stacks = {
            name: tuple(Run(self._new(run), tuple(part.ne[-1] for part in run)) for run in _runs(parts, infos))
            for name, parts in stacks.items()
        }
        self._buffer = backend.allocate(self._context, f"the weights of '{what}'")
        self._upload(on_progress)
        if backend.device.kind == "cpu":
            self._pack()

    def _new(self, parts: list[TensorInfo]) -> Tensor:
        first = parts[0]
        ne = [*first.ne[:-1], sum(part.ne[-1] for part in parts)]
        tensor = self._context.new_tensor(type_by_number(int(first.type)), ne, first.name[:63])
        self._uploads.append((tensor, parts))
        return tensor

    def _upload(self, on_progress: Callable[[int, int], None] | None) -> None:
        n_total = sum(tensor.n_bytes for tensor, _ in self._uploads)
        n_done = 0
        for tensor, parts in self._uploads:
            offset = 0
            for part in parts:
                for begin in range(0, part.n_bytes, _UPLOAD_BYTES):
                    piece = np.ascontiguousarray(part.data[begin : begin + _UPLOAD_BYTES])
                    tensor.set(piece, offset + begin)
                    n_done += piece.nbytes
                    if on_progress is not None:
                        on_progress(n_done, n_total)
                offset += part.n_bytes
        self._uploads.clear()

    def _pack(self) -> None:
        runs = (run.tensor for stack in self.stacks.values() for run in stack)
        for tensor in (*runs, *self._tensors.values()):
            tensor.pack()

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def find(self, name: str) -> Tensor | None:
        """The tensor, or None when the model has none of this name."""
        return self._tensors.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def n_bytes(self) -> int:
        return self._buffer.n_bytes

    def close(self) -> None:
        """Free the device memory; safe to call twice."""
        self._buffer.close()
        self._context.close()


def _as_stored(info: TensorInfo) -> TensorInfo:
    """Small tensors that enter elementwise kernels are f32 on the device and ids are i32, whatever the file holds."""
    if info.type == gguf.GGMLQuantizationType.I64:
        ids = info.data.view(np.int64).astype(np.int32).view(np.uint8)
        return TensorInfo(info.name, info.ne, gguf.GGMLQuantizationType.I32, ids.nbytes, ids)
    if info.type == gguf.GGMLQuantizationType.F32 or not info.name.endswith(_SMALL_F32):
        return info
    try:
        values = gguf.quants.dequantize(info.data.reshape(info.ne[:0:-1] + (-1,)), info.type).astype(np.float32)
    except (NotImplementedError, ValueError) as error:
        raise ModelFileError(f"tensor '{info.name}' of type {info.type.name} cannot be read as f32: {error}") from error
    data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    return TensorInfo(info.name, info.ne, gguf.GGMLQuantizationType.F32, data.nbytes, data)


def _runs(parts: Sequence[str], infos: Mapping[str, TensorInfo]) -> list[list[TensorInfo]]:
    runs: list[list[TensorInfo]] = []
    for info in (infos[part] for part in parts):
        if runs and runs[-1][0].type == info.type and runs[-1][0].ne[:-1] == info.ne[:-1]:
            runs[-1].append(info)
        else:
            runs.append([info])
    return runs


assert F32.number == int(gguf.GGMLQuantizationType.F32), "the gguf package and ggml number types differently"
