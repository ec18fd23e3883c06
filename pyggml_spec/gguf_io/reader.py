"""Opening GGUF files: one or several shards, memory-mapped, checked before anything they claim is used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

import gguf
import numpy as np

from pyggml_spec.errors import ModelFileError
from pyggml_spec.gguf_io.header import ArraySpan, HeaderLayout, check_header
from pyggml_spec.gguf_io.metadata import Metadata, MetadataArray

_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_MAX_SHARDS = 1000


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file."""

    name: str
    ne: tuple[int, ...]  # fastest first, as stored (1 to 4 entries)
    type: gguf.GGMLQuantizationType
    n_bytes: int
    data: np.ndarray  # (n_bytes,) uint8 view of the mapped file, in ggml's layout of `type`


class GgufFile:
    """A GGUF model, all its shards as one: `metadata` (of the first shard) and `tensors` by name.

    Use it as a context manager; after `close` the mapping lives only as long as views that somebody still holds.
    """

    def __init__(
        self, paths: tuple[Path, ...], metadata: Metadata, tensors: dict[str, TensorInfo], alignment: int
    ) -> None:
        self.path = paths[0]
        self.paths = paths
        self.metadata = metadata
        self.tensors = tensors
        self.alignment = alignment  # bytes

    @property
    def architecture(self) -> str:
        """`general.architecture`; ModelFileError when the key is missing."""
        return self.metadata.require_name("general.architecture")

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.n_bytes for tensor in self.tensors.values())

    def close(self) -> None:
        """Drop the views of the mapped file; closing twice is harmless."""
        self.tensors = {}
        self.metadata = Metadata({}, file=self.metadata.file)

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_gguf(path: str | PathLike[str]) -> GgufFile:
    """Open a GGUF file; of a sharded model (`-00001-of-000NN.gguf`) any shard's path opens all of it.

    Raises ModelFileError with one sentence when a file is missing, damaged, or not a GGUF of version 2 or 3.
    """
    paths = shard_paths(Path(path))
    shards = [_open_shard(shard_path) for shard_path in paths]
    _check_split_keys(shards)
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        twice = next((name for name in shard.tensors if name in tensors), None)
        if twice is not None:
            raise ModelFileError.about(
                shard.path, "is in an earlier shard", part=f"tensor '{twice}'", way_out="split the model again"
            )
        tensors |= shard.tensors
    return GgufFile(paths, shards[0].metadata, tensors, shards[0].alignment)


def shard_paths(path: Path) -> tuple[Path, ...]:
    """All parts of the model that a file belongs to; ModelFileError when one is missing."""
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= _MAX_SHARDS:
        raise ModelFileError.about(path, f"is named shard {match['number']} of {match['count']}, which cannot be")
    paths = tuple(path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1))
    missing = [shard for shard in paths if not shard.exists()]
    if missing and path.exists():
        raise ModelFileError(f"shard '{missing[0]}' of '{path.name}' is missing; put all {count} files side by side")
    return paths if path.exists() else (path,)


def _open_shard(path: Path) -> GgufFile:
    layout = check_header(path)
    try:
        reader = _LazyArrayReader(path, layout)
    except (ValueError, KeyError, IndexError, OverflowError, ArithmeticError, OSError) as error:
        raise ModelFileError.about(path, f"is damaged: {error}", way_out="download or convert it again") from error
    metadata = Metadata(reader.metadata_fields(), file=str(path))
    return GgufFile((path,), metadata, reader.tensor_infos(), layout.alignment)


def _check_split_keys(shards: list[GgufFile]) -> None:
    for number, shard in enumerate(shards):
        count = shard.metadata.find_int("split.count", 0, 65535, default=1)
        if count not in (0, len(shards)) and len(shards) == 1:
            shard.metadata.fail("split.count", "this name does not end in -00001-of-000NN.gguf: restore the file name")
        if len(shards) > 1 and (count, shard.metadata.find_int("split.no", 0, 65535, default=-1)) != (
            len(shards),
            number,
        ):
            shard.metadata.fail("split.no", f"this file is named shard {number + 1} of {len(shards)}")
    n_tensors = sum(len(shard.tensors) for shard in shards)
    claimed = shards[0].metadata.find_int("split.tensors.count", 0, 1 << 31, default=n_tensors)
    if len(shards) > 1 and claimed != n_tensors:
        shards[0].metadata.fail("split.tensors.count", f"the shards hold {n_tensors} tensors")


class _LazyArrayReader(gguf.GGUFReader):
    """gguf's reader over a checked header, leaving arrays undecoded: it spends 25 us per element on them."""

    def __init__(self, path: Path, layout: HeaderLayout) -> None:
        self._spans = layout.arrays
        super().__init__(path)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[np.ndarray[Any, Any]], list[int], list[gguf.GGUFValueType]]:
        span = self._spans.get(int(orig_offs)) if raw_type == gguf.GGUFValueType.ARRAY else None
        if span is None:
            return super()._get_field_parts(orig_offs, raw_type)
        types = [gguf.GGUFValueType.ARRAY, span.item_type]
        return span.offset + span.n_bytes - int(orig_offs), [self._view(span.offset, span.n_bytes)], [0], types

    def _view(self, offset: int, n_bytes: int) -> np.ndarray[Any, Any]:
        return self.data[offset : offset + n_bytes].view(np.ndarray)

    def metadata_fields(self) -> Mapping[str, gguf.ReaderField | MetadataArray]:
        """Fields by key, without the package's own `GGUF.*` entries."""
        return {
            key: _as_array(field, self._spans) if field.types[0] == gguf.GGUFValueType.ARRAY else field
            for key, field in self.fields.items()
            if not key.startswith("GGUF.")
        }

    def tensor_infos(self) -> dict[str, TensorInfo]:
        """Tensors by name, each with a flat view of its bytes."""
        return {
            tensor.name: TensorInfo(
                tensor.name,
                tuple(int(extent) for extent in tensor.shape),
                tensor.tensor_type,
                int(tensor.n_bytes),
                self._view(int(tensor.data_offset), int(tensor.n_bytes)),
            )
            for tensor in self.tensors
        }


def _as_array(field: gguf.ReaderField, spans: Mapping[int, ArraySpan]) -> MetadataArray:
    key_bytes = 8 + int(field.parts[1].nbytes) + 4
    span = spans[int(field.offset) + key_bytes]
    return MetadataArray(span.item_type, span.n_items, field.parts[-1])
