"""A checkpoint in Hugging Face layout: config.json and safetensors, single or sharded, read row by row."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pyggml_spec.convert.settings import Settings, read_json
from pyggml_spec.errors import ModelFileError

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"

_STORED_TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # NumPy has no such type: widened by hand
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "BOOL": np.dtype("?"),
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint; nothing of it is read before its values are asked for."""

    name: str
    shape: tuple[int, ...]  # slowest first
    dtype: str  # as safetensors spells it
    path: Path
    offset: int  # bytes from the start of the file

    @property
    def is_integer(self) -> bool:
        return self.dtype in ("I64", "I32")

    def mapped(self) -> np.ndarray:
        """The values in place, of shape `shape` and the stored type (bf16 as uint16); unmapped when let go."""
        stored = _STORED_TYPES[self.dtype]
        if 0 in self.shape:
            return np.empty(self.shape, stored)
        return np.memmap(self.path, stored, mode="r", offset=self.offset, shape=self.shape or (1,))

    def widened(self, selection: slice | np.ndarray) -> np.ndarray:
        """The rows of a selection as f32, exact for every 16-bit type."""
        values = np.asarray(self.mapped()[selection])
        if self.dtype == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)


class Checkpoint:
    """A directory with a config.json and its tensors by name."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise ModelFileError(f"'{directory}' is no directory; give the directory with config.json and safetensors")
        self.directory = directory
        self.settings = Settings(read_json(directory / "config.json"), file=str(directory / "config.json"))

    @property
    def architecture(self) -> str:
        """The class name config.json gives."""
        names = self.settings.find_texts("architectures")
        if not names:
            self.settings.fail(("architectures",), "must name the model's class")
        return names[0]

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every tensor by name. Raises ModelFileError when a file is missing, damaged, or holds another type."""
        tensors: dict[str, StoredTensor] = {}
        for path in self._files():
            for tensor in _list_tensors(path):
                if tensor.name in tensors:
                    raise ModelFileError(f"tensor '{tensor.name}' is in '{path}' and in another file of the checkpoint")
                tensors[tensor.name] = tensor
        if not tensors:
            raise ModelFileError(f"'{self.directory}' holds no tensors; download it again")
        return tensors

    def files(self) -> tuple[Path, ...]:
        """Every file of the directory that a conversion does not make: settings, vocabulary, tensors."""
        return tuple(path for path in self.directory.iterdir() if path.is_file() and path.suffix != ".gguf")

    def _files(self) -> list[Path]:
        index = self.directory / INDEX_FILE
        if index.exists():
            return self._shards(index)
        if (self.directory / SINGLE_FILE).exists():
            return [self.directory / SINGLE_FILE]
        only = sorted(self.directory.glob("*.safetensors"))
        if len(only) != 1:
            raise ModelFileError(
                f"'{self.directory}' has {len(only)} safetensors files and neither '{SINGLE_FILE}' nor '{INDEX_FILE}' "
                "says which to read; download it again"
            )
        return only

    def _shards(self, index: Path) -> list[Path]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelFileError(f"'{index}' has no 'weight_map' of file names; download it again")
        shards = [self.directory / name for name in sorted(set(weight_map.values()))]
        for shard in shards:
            if shard.parent != self.directory or not shard.exists():
                raise ModelFileError(f"'{shard}' named by '{index.name}' is missing; download all files of the model")
        return shards


def _list_tensors(path: Path) -> list[StoredTensor]:
    entries, data_start = _read_checked_header(path)
    tensors = [
        StoredTensor(name, tuple(entry["shape"]), entry["dtype"], path, data_start + entry["data_offsets"][0])
        for name, entry in entries.items()
        if name != "__metadata__"
    ]
    odd = next((tensor for tensor in tensors if tensor.dtype not in _STORED_TYPES), None)
    if odd is not None:
        raise ModelFileError(
            f"tensor '{odd.name}' of '{path}' has type {odd.dtype}; quantised checkpoints are not supported: "
            "convert the original one"
        )
    return tensors


def _read_checked_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """(entries, offset of the data) of a file the `safetensors` package accepts.

    The package checks every count, shape and offset; it cannot hand out bf16 to NumPy, so places are read here.
    """
    import safetensors

    try:
        with safetensors.safe_open(str(path), framework="np"):
            pass
        with path.open("rb") as file:
            (n_bytes,) = struct.unpack("<Q", file.read(8))
            return json.loads(file.read(n_bytes)), 8 + n_bytes
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise ModelFileError(f"'{path}' cannot be read as safetensors: {error}; download it again") from error
