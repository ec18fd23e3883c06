"""GGUF to GGUF of another type: every key kept, tensors read and written a piece at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from pyggml_spec.convert.encode import encode_rows
from pyggml_spec.convert.model_keys import QUANTIZATION_VERSION, file_type_of
from pyggml_spec.convert.output_file import (
    OutputFile,
    OutputTensor,
    Progress,
    check_outline,
    refuse_input,
    write_file,
)
from pyggml_spec.convert.recipes import (
    ModelShape,
    Override,
    check_recipe,
    choose_type,
    fitting_type,
    is_matrix,
)
from pyggml_spec.convert.stored_keys import store_int
from pyggml_spec.errors import OptionError
from pyggml_spec.gguf_io import GgufFile, TensorInfo, open_gguf

_COPY_BYTES = 16 << 20
_SHARD_ENDING = re.compile(r"-\d{5}-of-\d{5}\.gguf")
_EXACT = ("F32", "F16", "BF16")
_Q8_0 = gguf.GGMLQuantizationType.Q8_0


@dataclass(frozen=True)
class Requantisation:
    """A planned requantisation; nothing is written yet."""

    source: GgufFile  # open while this is used
    file: OutputFile
    changed: Mapping[str, TensorInfo]  # tensors that get another type, as the source has them
    notes: tuple[str, ...]

    def check(self) -> None:
        """Raise ModelFileError unless the file would be readable."""
        check_outline(self.file, "the requantised model", _check_readable)

    @property
    def inputs(self) -> tuple[Path, ...]:
        """The files that are read."""
        return self.source.paths

    def write(self, path: Path, on_progress: Progress | None = None, *, replace: bool = True) -> None:
        """Write the file; an interrupted run leaves nothing under its name. `replace`: a file of that name may go."""
        refuse_input(path, self.inputs)
        if _SHARD_ENDING.search(path.name):
            raise OptionError(f"'{path.name}' is named like a part of a model; the output is one file: rename it")
        write_file(self.file, path, _check_readable, on_progress, replace=replace)


def plan_requantisation(
    source: GgufFile, recipe: str, overrides: Sequence[Override] = (), *, n_threads: int = 1
) -> Requantisation:
    """The requantisation of an open file (all its shards become one file).

    Raises OptionError for an unknown recipe or an override that matches no matrix.
    """
    recipe = check_recipe(recipe)
    matrices = {name: tensor for name, tensor in source.tensors.items() if is_matrix(tensor)}
    for override in overrides:
        if not any(map(override.pattern.search, matrices)):
            raise OptionError(f"override '{override.pattern.pattern}' matches no matrix of '{source.path}'")
    shape = _model_shape(source)
    wanted = {name: choose_type(tensor, recipe, shape, overrides) for name, tensor in matrices.items()}
    types = {name: fitting_type(matrices[name].ne[0], wanted_type) for name, wanted_type in wanted.items()}
    changed = {name: matrices[name] for name, new_type in types.items() if new_type != matrices[name].type}
    tensors = [
        _output_tensor(tensor, types.get(name, tensor.type), n_threads) for name, tensor in source.tensors.items()
    ]
    file = OutputFile(_keys(source, recipe), tensors, source.alignment)
    notes = [*_fallback_notes(matrices, wanted, types), *_quality_notes(source, types, changed)]
    return Requantisation(source, file, changed, tuple(notes))


def _check_readable(path: Path) -> None:
    with open_gguf(path):
        pass


def _model_shape(source: GgufFile) -> ModelShape:
    keys, prefix = source.metadata, f"{source.architecture}."
    n_heads = keys.find_int(prefix + "attention.head_count", 1, 1 << 16, default=1)
    n_heads_kv = keys.find_int(prefix + "attention.head_count_kv", 1, 1 << 16, default=n_heads)
    return ModelShape(
        n_layers=keys.find_int(prefix + "block_count", 0, 1 << 16, default=0),
        n_queries_per_value=n_heads // n_heads_kv,
        has_output_head="output.weight" in source.tensors,
    )


def _keys(source: GgufFile, recipe: str) -> dict[str, bytes]:
    """Every key as stored, but for what the new file is, and for its parts, of which there is one."""
    keys = {key: source.metadata.stored_value(key) for key in source.metadata if not key.startswith("split.")}
    return keys | {
        "general.quantization_version": store_int(QUANTIZATION_VERSION),
        "general.file_type": store_int(file_type_of(recipe)),
    }


def _output_tensor(tensor: TensorInfo, new_type: gguf.GGMLQuantizationType, n_threads: int) -> OutputTensor:
    def copied() -> Iterator[np.ndarray]:
        return (tensor.data[at : at + _COPY_BYTES] for at in range(0, tensor.n_bytes, _COPY_BYTES))

    def encoded() -> Iterator[np.ndarray]:
        def read(begin: int, end: int) -> np.ndarray:
            return read_rows(tensor, begin, end)

        return encode_rows(read, n_rows(tensor), tensor.ne[0], new_type, tensor.name, n_threads)

    return OutputTensor(tensor.name, tensor.ne, new_type, copied if new_type == tensor.type else encoded)


def n_rows(tensor: TensorInfo) -> int:
    """Rows of a tensor, all its axes but the fastest together."""
    return math.prod(tensor.ne[1:])


def read_rows(tensor: TensorInfo, begin: int, end: int) -> np.ndarray:
    """Rows begin .. end of a tensor of any floating type as (n_rows, n_values) f32."""
    from pyggml_spec.ggml.quantise import dequantise_rows  # native code: not needed to plan and check a file

    raw = np.ascontiguousarray(tensor.data.reshape(n_rows(tensor), -1)[begin:end])
    return dequantise_rows(raw, int(tensor.type), tensor.ne[0])


def _fallback_notes(
    matrices: Mapping[str, TensorInfo],
    wanted: Mapping[str, gguf.GGMLQuantizationType],
    types: Mapping[str, gguf.GGMLQuantizationType],
) -> Iterator[str]:
    for name, new_type in types.items():
        if new_type != wanted[name]:
            block_size, _ = gguf.GGML_QUANT_SIZES[wanted[name]]
            yield (
                f"{name}: rows of {matrices[name].ne[0]} do not divide into {wanted[name].name.lower()}'s blocks of "
                f"{block_size}, so it becomes {new_type.name.lower()}"
            )


def _quality_notes(
    source: GgufFile, types: Mapping[str, gguf.GGMLQuantizationType], changed: Mapping[str, TensorInfo]
) -> Iterator[str]:
    lossy = sorted({tensor.type.name.lower() for tensor in changed.values() if tensor.type.name not in _EXACT})
    if lossy:
        yield f"the input is quantised already ({', '.join(lossy)}): losses add up, start from f16 or bf16 if you can"
    if "dflash" in source.architecture and any(_bits(types[name]) < _bits(_Q8_0) for name in changed):
        yield "a drafter below q8_0 drafts worse and hardly faster: measure its acceptance before you keep it"


def _bits(tensor_type: gguf.GGMLQuantizationType) -> float:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
    return 8.0 * block_bytes / block_size
