"""Typed access to the metadata of a GGUF file; every error names the key, the file, the value and its writer."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import gguf
import numpy as np

from pyggml_spec.errors import ModelFileError

_REPORT_CHARS = 60


@dataclass(frozen=True)
class MetadataArray:
    """An array of the metadata, decoded when asked; `payload` is a (n_bytes,) uint8 view of the mapped file."""

    item_type: gguf.GGUFValueType
    n_items: int
    payload: np.ndarray

    @property
    def holds_strings(self) -> bool:
        """Whether the items are strings; otherwise they are numbers or booleans."""
        return self.item_type == gguf.GGUFValueType.STRING

    @property
    def holds_integers(self) -> bool:
        """Whether the items are whole numbers; booleans do not count."""
        return not self.holds_strings and self.numbers().dtype.kind in "iu"

    def strings(self) -> list[bytes]:
        """Every item as bytes; texts of byte-level vocabularies need not be UTF-8."""
        raw, position, items = self.payload.tobytes(), 0, []
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(self.n_items):
            start = position + 8
            position = start + length_at(raw, position)[0]
            items.append(raw[start:position])
        return items

    def numbers(self) -> np.ndarray:
        """The items as an (n_items,) array of the stored type; booleans as bool."""
        if self.item_type == gguf.GGUFValueType.BOOL:
            return self.payload.astype(np.bool_)
        stored = gguf.GGUFReader.gguf_scalar_to_np[self.item_type]
        return np.frombuffer(self.payload, dtype=np.dtype(stored).newbyteorder("<"))


class Metadata(Mapping[str, Any]):
    """The keys of a GGUF file. Scalars and strings are Python values, arrays are MetadataArray."""

    def __init__(self, fields: Mapping[str, gguf.ReaderField | MetadataArray], *, file: str) -> None:
        self._fields = fields
        self.file = file

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __getitem__(self, key: str) -> Any:
        field = self._fields[key]
        if isinstance(field, MetadataArray):
            return field
        try:
            return field.contents()
        except UnicodeDecodeError:
            raise ModelFileError.about(
                self.file, "is not UTF-8 text", part=f"key '{key}'", way_out=f"{self.written_by} writes it"
            ) from None

    def stored_value(self, key: str) -> bytes:
        """The value of an existing key as the file has it, type number first: for writing it elsewhere unchanged."""
        field = self._fields[key]
        if isinstance(field, MetadataArray):
            head = struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, field.item_type, field.n_items)
            return head + field.payload.tobytes()
        return b"".join(part.tobytes() for part in field.parts[2:])  # after the key's length and text

    @property
    def written_by(self) -> str:
        """The program that writes files of this architecture, for error messages."""
        field = self._fields.get("general.architecture")
        if isinstance(field, gguf.ReaderField) and b"dflash-draft" in field.parts[-1].tobytes():
            return "lucebox's drafter converter"
        return "llama.cpp's convert_hf_to_gguf.py"

    def fail(self, key: str, rule: str, way_out: str = "") -> NoReturn:
        """Raise ModelFileError saying what key holds, which rule that breaks, and who can mend it."""
        found = f"is {self._show(key)}" if key in self._fields else "is missing"
        writer = f"{self.written_by} writes it"
        raise ModelFileError.about(
            self.file,
            f"{found}, but {rule}",
            part=f"key '{key}'",
            way_out=f"{way_out} ({writer})" if way_out else writer,
        )

    def require_int(self, key: str, low: int, high: int) -> int:
        """An integer in low..high; an array of equal integers counts as one (llama.cpp writes both)."""
        rule = f"must be an integer in {low} to {high}"
        value = self._scalar(key, rule)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.fail(key, rule)
        return value

    def find_int(self, key: str, low: int, high: int, default: int) -> int:
        """Like require_int, with a default for a missing key."""
        return self.require_int(key, low, high) if key in self._fields else default

    def require_float(self, key: str, low: float, high: float) -> float:
        """A finite number in low..high."""
        rule = f"must be a number in {low:g} to {high:g}"
        value = self._scalar(key, rule)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            self.fail(key, rule)
        if not low <= value <= high:
            self.fail(key, rule)
        return float(value)

    def find_float(self, key: str, low: float, high: float, default: float) -> float:
        """Like require_float, with a default for a missing key."""
        return self.require_float(key, low, high) if key in self._fields else default

    def require_string(self, key: str) -> str:
        """A text."""
        value = self.get(key)
        if not isinstance(value, str):
            self.fail(key, "must be a text")
        return value

    def find_string(self, key: str, default: str = "") -> str:
        """A text, with a default for a missing key."""
        return self.require_string(key) if key in self._fields else default

    def require_name(self, key: str) -> str:
        """A text that identifies something: at most one short printable word or phrase."""
        value = self.require_string(key)
        if not value.isprintable() or not 0 < len(value) <= _REPORT_CHARS:
            self.fail(key, f"must be a printable name of at most {_REPORT_CHARS} characters")
        return value

    def find_bool(self, key: str, default: bool) -> bool:
        """A truth value, with a default for a missing key."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.fail(key, "must be true or false")
        return value

    def require_ints(self, key: str, low: int, high: int, *, n_items: int | None = None) -> tuple[int, ...]:
        """An array of integers in low..high, of n_items entries when given, else of at least one and at most 4096."""
        rule = f"must be an array of {n_items or 'some'} integers in {low} to {high}"
        array = self._array(key, rule, n_items)
        if not array.holds_integers:
            self.fail(key, rule)
        items = tuple(int(item) for item in array.numbers())
        if any(not low <= item <= high for item in items):
            self.fail(key, rule)
        return items

    def require_bools(self, key: str, n_items: int) -> tuple[bool, ...]:
        """An array of n_items truth values, stored as booleans or as integers."""
        rule = f"must be an array of {n_items} truth values"
        array = self._array(key, rule, n_items)
        if not array.holds_integers and array.item_type != gguf.GGUFValueType.BOOL:
            self.fail(key, rule)
        return tuple(bool(item) for item in array.numbers())

    def find_string_array(self, key: str) -> MetadataArray | None:
        """An array of strings, not yet decoded; None when the key is missing."""
        array = self.get(key)
        if array is None or (isinstance(array, MetadataArray) and array.holds_strings):
            return array
        self.fail(key, "must be an array of strings")

    def _array(self, key: str, rule: str, n_items: int | None) -> MetadataArray:
        array = self.get(key)
        if not isinstance(array, MetadataArray):
            self.fail(key, rule)
        if array.n_items != n_items if n_items is not None else not 1 <= array.n_items <= 4096:
            self.fail(key, rule)
        return array

    def _scalar(self, key: str, rule: str) -> Any:
        value = self.get(key)
        if not isinstance(value, MetadataArray):
            return value
        if value.holds_strings or value.n_items == 0 or (value.numbers() != value.numbers()[0]).any():
            self.fail(key, rule)
        return value.numbers()[0].item()

    def _show(self, key: str) -> str:
        value = self[key]
        if not isinstance(value, MetadataArray):
            shown = repr(value)
        elif value.holds_strings or value.n_items > 64:
            shown = f"an array of {value.n_items} {value.item_type.name} items"
        else:
            shown = str(value.numbers().tolist())
        return shown if len(shown) <= _REPORT_CHARS else shown[: _REPORT_CHARS - 3] + "..."
