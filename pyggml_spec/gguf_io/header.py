"""Bounded check of a GGUF header before the `gguf` package parses it.

The package trusts every count, length and offset of a file and decodes arrays element by element (a vocabulary of
250k tokens and merges took it 13 s and 840 MB on a 2 GHz core). This walk only measures: it proves that everything
a header claims lies inside the file, and notes where arrays start and end so that they can be decoded when asked for.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import gguf

from pyggml_spec.errors import ModelFileError

MAX_KEYS = 1 << 12  # models have about a hundred
MAX_TENSORS = 1 << 14  # the largest models have a few thousand; the package takes 0.1 ms for each
MAX_WALKED_STRINGS = 1 << 22  # bounds the time of the walk: about a second
MAX_KEY_BYTES = 1 << 10  # names longer than a line are no names
MAX_TENSOR_NAME_BYTES = 63  # what a ggml tensor can hold
MAX_STRING_BYTES = 1 << 24
MAX_DIMS = 4
READABLE_VERSIONS = (2, 3)

_SCALAR_BYTES = {
    gguf.GGUFValueType.UINT8: 1,
    gguf.GGUFValueType.INT8: 1,
    gguf.GGUFValueType.BOOL: 1,
    gguf.GGUFValueType.UINT16: 2,
    gguf.GGUFValueType.INT16: 2,
    gguf.GGUFValueType.UINT32: 4,
    gguf.GGUFValueType.INT32: 4,
    gguf.GGUFValueType.FLOAT32: 4,
    gguf.GGUFValueType.UINT64: 8,
    gguf.GGUFValueType.INT64: 8,
    gguf.GGUFValueType.FLOAT64: 8,
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class ArraySpan:
    """Where the elements of one metadata array lie in the file."""

    item_type: gguf.GGUFValueType
    n_items: int
    offset: int  # bytes from the start of the file to the first element
    n_bytes: int  # of all elements


@dataclass(frozen=True)
class TensorClaim:
    """What a tensor's header entry says; ne is fastest first."""

    name: str
    ne: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the data section
    n_bytes: int


@dataclass(frozen=True)
class HeaderLayout:
    """Result of the walk: arrays by the file offset of their value, tensors by name."""

    version: int
    alignment: int
    arrays: dict[int, ArraySpan]
    tensors: dict[str, TensorClaim]


def check_header(path: Path) -> HeaderLayout:
    """Walk the header of `path` and return its layout.

    Raises ModelFileError with one sentence when the file cannot be read, is no GGUF of version 2 or 3, or claims
    anything that its size cannot hold. Time and memory are bounded whatever the file says.
    """
    try:
        if not path.exists():
            raise ModelFileError(f"model file '{path}' does not exist; check the path")
        if not path.is_file():
            raise ModelFileError.about(path, "is not a regular file", way_out="give the path of a .gguf file")
        n_bytes = path.stat().st_size
        if n_bytes < 24:
            raise ModelFileError.about(
                path, f"has {n_bytes} bytes, too few for a GGUF header", way_out="download it again"
            )
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            return _HeaderWalk(path, buffer).run()
    except (OSError, ValueError) as error:
        raise ModelFileError.about(path, f"cannot be read: {error}") from error


class _HeaderWalk:
    """A cursor over the header; every read is checked against the size of the file."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.position = 0
        self.alignment = gguf.GGUF_DEFAULT_ALIGNMENT
        self.n_walked_strings = 0
        self.keys: set[str] = set()
        self.arrays: dict[int, ArraySpan] = {}

    def run(self) -> HeaderLayout:
        version = self._check_magic_and_version()
        n_tensors, n_keys = self._take_u64("the tensor count"), self._take_u64("the key count")
        self._check_count("tensors", n_tensors, MAX_TENSORS, least_bytes=32)
        self._check_count("keys", n_keys, MAX_KEYS, least_bytes=13)
        for _ in range(n_keys):
            self._walk_key()
        claims = self._walk_tensors(n_tensors)
        self._check_data_section(list(claims.values()))
        return HeaderLayout(version, self.alignment, self.arrays, claims)

    def fail(self, what: str) -> NoReturn:
        raise ModelFileError.about(self.path, f"is damaged: {what}", way_out="download or convert it again")

    def _check_magic_and_version(self) -> int:
        magic = bytes(self.buffer[:4])
        if magic != b"GGUF":
            raise ModelFileError.about(self.path, f"is not a GGUF file: it starts with {magic!r} instead of b'GGUF'")
        self.position = 4
        version = self._take_u32("the version")
        if version not in READABLE_VERSIONS and version & 0xFFFF == 0:
            raise ModelFileError.about(self.path, "is a big-endian GGUF file; only little-endian files are supported")
        if version not in READABLE_VERSIONS:
            raise ModelFileError.about(
                self.path, f"is GGUF version {version}, but supported are 2 and 3", way_out="convert it again"
            )
        return version

    def _check_count(self, what: str, count: int, most: int, *, least_bytes: int) -> None:
        if count > most or count * least_bytes > self.size - self.position:
            self.fail(f"it claims {count} {what}, more than its {self.size} bytes can hold or than {most}")

    def _skip(self, n_bytes: int, what: str) -> int:
        start = self.position
        if n_bytes > self.size - start:
            self.fail(f"{what} ends at byte {start + n_bytes} but the file has {self.size} (truncated?)")
        self.position = start + n_bytes
        return start

    def _take_u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.buffer, self._skip(4, what))[0])

    def _take_u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.buffer, self._skip(8, what))[0])

    def _take_string(self, what: str, most: int) -> bytes:
        n_bytes = self._take_u64(f"the length of {what}")
        if n_bytes > most:
            self.fail(f"{what} claims {n_bytes} bytes, the most is {most}")
        start = self._skip(n_bytes, what)
        return bytes(self.buffer[start : start + n_bytes])

    def _take_name(self, what: str, most: int) -> str:
        encoded = self._take_string(what, most)
        if not encoded:
            self.fail(f"{what} is empty")
        name = encoded.decode("utf-8", errors="backslashreplace")
        if not name.isprintable() or name.encode() != encoded:
            self.fail(f"{what} is no printable UTF-8 text: {encoded[:40]!r}")
        return name

    def _take_value_type(self, what: str) -> gguf.GGUFValueType:
        number = self._take_u32(f"the type of {what}")
        try:
            return gguf.GGUFValueType(number)
        except ValueError:
            self.fail(f"{what} has the unknown value type {number}")

    def _walk_key(self) -> None:
        name = self._take_name(f"key number {len(self.keys)}", MAX_KEY_BYTES)
        if name in self.keys or name.startswith("GGUF."):
            self.fail(f"key '{name}' occurs twice or uses the reserved prefix 'GGUF.'")
        self.keys.add(name)
        value_type = self._take_value_type(f"key '{name}'")
        if name == gguf.Keys.General.ALIGNMENT:
            self._take_alignment(value_type)
        elif value_type == gguf.GGUFValueType.STRING:
            n_bytes = self._take_u64(f"the length of key '{name}'")
            if n_bytes > MAX_STRING_BYTES:
                self.fail(f"key '{name}' claims a string of {n_bytes} bytes, the most is {MAX_STRING_BYTES}")
            self._skip(n_bytes, f"key '{name}'")
        elif value_type == gguf.GGUFValueType.ARRAY:
            self._walk_array(name)
        else:
            self._skip(_SCALAR_BYTES[value_type], f"key '{name}'")

    def _take_alignment(self, value_type: gguf.GGUFValueType) -> None:
        if value_type != gguf.GGUFValueType.UINT32:
            self.fail(f"general.alignment has type {value_type.name} instead of UINT32")
        self.alignment = self._take_u32("general.alignment")
        if self.alignment == 0 or self.alignment & (self.alignment - 1):
            self.fail(f"general.alignment is {self.alignment}, not a power of two")

    def _walk_array(self, name: str) -> None:
        value_offset = self.position
        item_type = self._take_value_type(f"the elements of key '{name}'")
        n_items = self._take_u64(f"the length of key '{name}'")
        start = self.position
        if item_type == gguf.GGUFValueType.ARRAY:
            self.fail(f"key '{name}' is an array of arrays, which no model uses")
        if item_type == gguf.GGUFValueType.STRING:
            self._skip_strings(name, n_items)
        else:
            self._skip(n_items * _SCALAR_BYTES[item_type], f"the array '{name}' of {n_items} items")
        self.arrays[value_offset] = ArraySpan(item_type, n_items, start, self.position - start)

    def _skip_strings(self, name: str, n_items: int) -> None:
        self.n_walked_strings += n_items
        self._check_count(f"strings in key '{name}'", n_items, MAX_WALKED_STRINGS, least_bytes=8)
        if self.n_walked_strings > MAX_WALKED_STRINGS:
            self.fail(f"its arrays hold more than {MAX_WALKED_STRINGS} strings")
        length_of, buffer, position, last = _U64.unpack_from, self.buffer, self.position, self.size - 8
        for _ in range(n_items):
            if position > last:
                break
            position += 8 + length_of(buffer, position)[0]
        if position > self.size or position < self.position + 8 * n_items:
            self.fail(f"the strings of key '{name}' run past the end of the file (truncated?)")
        self.position = position

    def _walk_tensors(self, n_tensors: int) -> dict[str, TensorClaim]:
        claims: dict[str, TensorClaim] = {}
        for number in range(n_tensors):
            claim = self._walk_tensor(number)
            if claim.name in claims:
                self.fail(f"tensor '{claim.name}' occurs twice")
            claims[claim.name] = claim
        return claims

    def _walk_tensor(self, number: int) -> TensorClaim:
        name = self._take_name(f"the name of tensor number {number}", MAX_TENSOR_NAME_BYTES)
        n_dims = self._take_u32(f"the dimensions of tensor '{name}'")
        if not 1 <= n_dims <= MAX_DIMS:
            self.fail(f"tensor '{name}' has {n_dims} dimensions instead of 1 to {MAX_DIMS}")
        ne = tuple(self._take_u64(f"the shape of tensor '{name}'") for _ in range(n_dims))
        tensor_type = self._take_tensor_type(name)
        offset = self._take_u64(f"the offset of tensor '{name}'")
        return TensorClaim(name, ne, tensor_type, offset, self._tensor_bytes(name, ne, tensor_type))

    def _take_tensor_type(self, name: str) -> gguf.GGMLQuantizationType:
        number = self._take_u32(f"the type of tensor '{name}'")
        try:
            return gguf.GGMLQuantizationType(number)
        except ValueError:
            raise ModelFileError.about(
                self.path,
                f"has type number {number}, unknown to gguf",
                part=f"tensor '{name}'",
                way_out="requantise the model to a standard type",
            ) from None

    def _tensor_bytes(self, name: str, ne: tuple[int, ...], tensor_type: gguf.GGMLQuantizationType) -> int:
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
        n_elements = 1
        for extent in ne:
            n_elements *= extent
        if n_elements == 0 or n_elements // block_size * block_bytes > self.size:
            self.fail(f"tensor '{name}' has shape {list(ne)}, which its {self.size} bytes cannot hold")
        if ne[0] % block_size:
            self.fail(f"tensor '{name}' has rows of {ne[0]}, but {tensor_type.name} packs {block_size} at a time")
        return n_elements // block_size * block_bytes

    def _check_data_section(self, claims: list[TensorClaim]) -> None:
        data_start = -(-self.position // self.alignment) * self.alignment
        end = 0
        for claim in sorted(claims, key=lambda claim: claim.offset):
            if claim.offset % self.alignment:
                self.fail(f"tensor '{claim.name}' is at offset {claim.offset}, no multiple of {self.alignment}")
            if claim.offset < end:
                self.fail(f"tensor '{claim.name}' at offset {claim.offset} overlaps the one that ends at {end}")
            end = claim.offset + claim.n_bytes
            if data_start + end > self.size:
                self.fail(
                    f"tensor '{claim.name}' ends at byte {data_start + end} but the file has {self.size} (truncated?)"
                )
