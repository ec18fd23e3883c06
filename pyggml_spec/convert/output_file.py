"""Writing a GGUF file tensor by tensor: the pieces of one are on their way before the next is looked at."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np

from pyggml_spec.convert.stored_keys import text_bytes
from pyggml_spec.errors import ModelFileError, OptionError

VERSION = 3
MAX_NAME_BYTES = 63  # what a ggml tensor can hold

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to write: its place in the file is known before its values are."""

    name: str
    ne: tuple[int, ...]  # fastest first
    type: gguf.GGMLQuantizationType
    pieces: Callable[[], Iterator[np.ndarray]]  # its bytes in order, as contiguous arrays of any type

    @property
    def n_values(self) -> int:
        """Values of all rows."""
        return math.prod(self.ne)

    @property
    def n_bytes(self) -> int:
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[self.type]
        return self.n_values // block_size * block_bytes


@dataclass(frozen=True)
class OutputFile:
    """Everything a GGUF file will hold."""

    keys: Mapping[str, bytes]  # metadata in file order: type number and value as stored
    tensors: Sequence[OutputTensor]
    alignment: int = gguf.GGUF_DEFAULT_ALIGNMENT  # bytes; the caller keeps general.alignment in step

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.n_bytes for tensor in self.tensors)


def is_one_of(path: Path, inputs: Iterable[Path]) -> bool:
    """Whether writing to `path` would change one of these files, by whatever name or link."""
    return path.exists() and any(each.exists() and path.samefile(each) for each in inputs)


def refuse_input(path: Path, inputs: Iterable[Path]) -> None:
    """Raise OptionError when the file to write is one of those that are read."""
    if is_one_of(path, inputs):
        raise OptionError(f"'{path}' is the input, or a part of it: give the output another name")


def write_file(
    file: OutputFile,
    path: Path,
    check: Callable[[Path], None],
    on_progress: Progress | None = None,
    *,
    replace: bool = True,
) -> None:
    """Write the file under a temporary name, then give it its name; whatever fails or interrupts leaves neither.

    `check` sees the file before the slow part: header and integer tables as they will be, other values still zero.
    Raises ModelFileError when there is nothing to write, no folder, no space, a tensor yields other bytes than it
    announced, or the name is taken at the end and may not be replaced.
    """
    if path.exists() and not path.is_file():
        raise ModelFileError(f"'{path}' is no ordinary file and would be replaced by one; choose another name")
    path = path.resolve()  # a link stays one, what it names is replaced
    if not path.parent.is_dir():
        raise ModelFileError(f"the folder '{path.parent}' does not exist: make it, or write elsewhere")
    with _temporary_beside(path) as (temporary, out):
        n_free = shutil.disk_usage(path.parent).free
        if n_free < file.n_bytes:
            raise ModelFileError(f"'{path}' takes {file.n_bytes:,} bytes but its disk has {n_free:,} left; free some")
        offsets = _write_outline(file, out, path)
        check(temporary)
        _write_tensors(file, offsets, out, on_progress)
        out.flush()
        os.fsync(out.fileno())
        out.close()
        _rename(temporary, path, replace=replace)


def check_outline(file: OutputFile, name: str, check: Callable[[Path], None]) -> None:
    """What write_file does before the slow part, in a directory that is removed again; `name` is for errors."""
    with tempfile.TemporaryDirectory() as directory:
        outline = Path(directory) / name
        with outline.open("xb") as out:
            _write_outline(file, out, outline)
            check(outline)


@contextlib.contextmanager
def _temporary_beside(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    # in the same directory, because a file gets its name in one step only within a file system; process numbers repeat
    # between containers that share a folder
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(6)}.part")
    with temporary.open("xb") as out:
        try:
            yield temporary, out
        finally:
            temporary.unlink(missing_ok=True)


def _rename(temporary: Path, path: Path, *, replace: bool) -> None:
    """Give the file its name; ModelFileError when another has it by now and may not be replaced."""
    if not replace:
        try:
            os.link(temporary, path)  # unlike a replacement, fails in one step where the name is taken
            return
        except OSError as error:  # the name is taken, or the file system has no links
            if path.exists():
                raise ModelFileError(f"'{path}' was made by somebody else meanwhile; choose another name") from error
    os.replace(temporary, path)


def _write_outline(file: OutputFile, out: BinaryIO, path: Path) -> list[int]:
    """Header and integer tables, the rest a hole; returns where each tensor starts."""
    if not file.tensors:
        raise ModelFileError(f"'{path}' would hold no tensors; check the input")
    header, offsets = _header(file)
    out.write(header)
    for tensor, offset in zip(file.tensors, offsets, strict=True):
        if tensor.type == gguf.GGMLQuantizationType.I64:
            sum(_write_tensor(tensor, offset, out))
    out.truncate(_padded(offsets[-1] + file.tensors[-1].n_bytes, file.alignment))
    out.flush()
    return offsets


def _header(file: OutputFile) -> tuple[bytes, list[int]]:
    parts = [b"GGUF", struct.pack("<IQQ", VERSION, len(file.tensors), len(file.keys))]
    parts += [text_bytes(key) + value for key, value in file.keys.items()]
    offsets = [0]
    for tensor in file.tensors:
        parts.append(_tensor_entry(tensor, offsets[-1]))
        offsets.append(offsets[-1] + _padded(tensor.n_bytes, file.alignment))
    header = b"".join(parts)
    data_start = _padded(len(header), file.alignment)
    return header, [data_start + offset for offset in offsets[:-1]]


def _tensor_entry(tensor: OutputTensor, offset: int) -> bytes:
    if len(tensor.name.encode()) > MAX_NAME_BYTES:
        raise ModelFileError(f"tensor name '{tensor.name}' is longer than the {MAX_NAME_BYTES} bytes GGUF allows")
    n_dims = len(tensor.ne)
    return text_bytes(tensor.name) + struct.pack(f"<I{n_dims}QIQ", n_dims, *tensor.ne, tensor.type, offset)


def _write_tensors(file: OutputFile, offsets: list[int], out: BinaryIO, on_progress: Progress | None) -> None:
    n_done, n_total = 0, file.n_bytes
    for tensor, offset in zip(file.tensors, offsets, strict=True):
        for n_bytes in _write_tensor(tensor, offset, out):
            n_done += n_bytes
            if on_progress is not None:
                on_progress(n_done, n_total)


def _write_tensor(tensor: OutputTensor, offset: int, out: BinaryIO) -> Iterator[int]:
    """Write at an offset, yielding the bytes of each piece."""
    out.seek(offset)
    n_written = 0
    for piece in tensor.pieces():
        out.write(piece.data)
        n_written += piece.nbytes
        yield piece.nbytes
    if n_written != tensor.n_bytes:
        raise ModelFileError(f"tensor '{tensor.name}' yielded {n_written} bytes instead of {tensor.n_bytes}")


def _padded(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment
