"""Reading a requantised file back: is everything there, and how far are the new values from the old ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from pyggml_spec.convert.encode import PIECE_VALUES
from pyggml_spec.convert.output_file import Progress
from pyggml_spec.convert.requantise import Requantisation, n_rows, read_rows
from pyggml_spec.errors import ModelFileError
from pyggml_spec.gguf_io import GgufFile, TensorInfo, open_gguf

_MAY_DIFFER = ("general.file_type", "general.quantization_version")


@dataclass(frozen=True)
class TensorError:
    """How far a tensor moved: root of the mean squared difference over that of the values."""

    name: str
    old_type: gguf.GGMLQuantizationType
    new_type: gguf.GGMLQuantizationType
    relative_error: float


def verify_requantisation(plan: Requantisation, path: Path, on_progress: Progress | None = None) -> list[TensorError]:
    """The error of every tensor that changed its type, in file order.

    Raises ModelFileError when a key, a shape or a copied tensor differs, or when a new value is not finite.
    """
    errors, n_done, n_total = [], 0, plan.source.n_bytes
    with open_gguf(path) as written:
        _check_keys(plan, written)
        _check_names(plan, written)
        for name, old in plan.source.tensors.items():
            new = written.tensors[name]
            if name in plan.changed:
                errors.append(TensorError(name, old.type, new.type, _relative_error(old, new, path)))
            elif not np.array_equal(old.data, new.data):
                raise ModelFileError(f"tensor '{name}' of '{path}' is not the copy it should be; write the file again")
            n_done += old.n_bytes
            if on_progress is not None:
                on_progress(n_done, n_total)
    return errors


def _check_keys(plan: Requantisation, written: GgufFile) -> None:
    for key in plan.source.metadata:
        if key in _MAY_DIFFER or key.startswith("split."):
            continue
        if key not in written.metadata or written.metadata.stored_value(key) != plan.source.metadata.stored_value(key):
            raise ModelFileError(f"key '{key}' of '{written.path}' is not the copy it should be; write the file again")
    if written.alignment != plan.source.alignment:
        raise ModelFileError(
            f"'{written.path}' aligns tensors to {written.alignment}, not {plan.source.alignment} bytes"
        )


def _check_names(plan: Requantisation, written: GgufFile) -> None:
    wanted = {tensor.name: (tensor.ne, tensor.type) for tensor in plan.file.tensors}
    found = {name: (tensor.ne, tensor.type) for name, tensor in written.tensors.items()}
    if wanted != found:
        odd = next(name for name in {**wanted, **found} if wanted.get(name) != found.get(name))
        raise ModelFileError(f"tensor '{odd}' of '{written.path}' has another shape or type than planned")


def _relative_error(old: TensorInfo, new: TensorInfo, path: Path) -> float:
    squared_error = squared_values = 0.0
    step = max(1, PIECE_VALUES // old.ne[0])
    for begin in range(0, n_rows(old), step):
        end = min(begin + step, n_rows(old))
        before = read_rows(old, begin, end)
        difference = read_rows(new, begin, end) - before
        squared_error += float(np.square(difference).sum(dtype=np.float64))
        squared_values += float(np.square(before).sum(dtype=np.float64))
    if not math.isfinite(squared_error):
        raise ModelFileError(f"tensor '{new.name}' of '{path}' holds values that are not finite; choose another type")
    return math.sqrt(squared_error / squared_values) if squared_values else math.sqrt(squared_error)
