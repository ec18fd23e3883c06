"""Typed access to a checkpoint's JSON settings; every error names the key, the file, the value and the rule."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from pyggml_spec.errors import ModelFileError

_MAX_JSON_BYTES = 256 << 20  # tokenizers of large vocabularies take some 20 MB
_REPORT_CHARS = 60


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelFileError when it is missing, too large, or no JSON object."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelFileError(f"'{path}' has {path.stat().st_size} bytes, too many for a file of settings")
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelFileError(f"'{path}' does not exist; give a directory in Hugging Face layout") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"'{path}' cannot be read as JSON: {error}; download it again") from error
    if not isinstance(document, dict):
        raise ModelFileError(f"'{path}' holds {type(document).__name__} instead of an object; download it again")
    return document


class Settings:
    """Settings of one file. A key may have several spellings, "section.key" for nested ones: the first found counts.

    Keys whose value is null count as missing, as `transformers` treats them.
    """

    def __init__(self, values: Mapping[str, Any], *, file: str) -> None:
        self.values = values
        self.file = file

    def merged(self, *sections: str) -> Settings:
        """The same settings with nested sections laid over them, those that exist."""
        values = dict(self.values)
        for section in sections:
            inner = self.find(section)
            if isinstance(inner, Mapping):
                values |= inner
        return Settings(values, file=self.file)

    def find(self, *keys: str) -> Any:
        """The value under the first of the spellings that exists, or None."""
        return next((value for key in keys if (value := self._lookup(key)) is not None), None)

    def _lookup(self, key: str) -> Any:
        value: Any = self.values
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def fail(self, keys: tuple[str, ...], rule: str) -> NoReturn:
        """Raise ModelFileError with what the key holds and the rule that breaks."""
        value = self.find(*keys)
        shown = repr(value)
        found = "is missing" if value is None else f"is {shown[:_REPORT_CHARS]}"
        names = " or ".join(f"'{key}'" for key in keys)
        raise ModelFileError(f"{names} of '{self.file}' {found}, but {rule}")

    def require_int(self, *keys: str, low: int, high: int) -> int:
        """An integer in low..high."""
        value = self.find(*keys)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.fail(keys, f"must be an integer in {low} to {high}")
        return value

    def find_int(self, *keys: str, low: int, high: int, default: int) -> int:
        """Like require_int, with a default for a missing key."""
        return default if self.find(*keys) is None else self.require_int(*keys, low=low, high=high)

    def require_float(self, *keys: str, low: float, high: float) -> float:
        """A finite number in low..high."""
        value = self.find(*keys)
        rule = f"must be a number in {low:g} to {high:g}"
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            self.fail(keys, rule)
        if not low <= value <= high:
            self.fail(keys, rule)
        return float(value)

    def find_float(self, *keys: str, low: float, high: float) -> float | None:
        """Like require_float, or None for a missing key."""
        return None if self.find(*keys) is None else self.require_float(*keys, low=low, high=high)

    def find_bool(self, *keys: str) -> bool | None:
        """A truth value, or None for a missing key."""
        value = self.find(*keys)
        if value is not None and not isinstance(value, bool):
            self.fail(keys, "must be true or false")
        return value

    def find_text(self, *keys: str) -> str | None:
        """A text, or None for a missing key."""
        value = self.find(*keys)
        if value is not None and not isinstance(value, str):
            self.fail(keys, "must be a text")
        return value

    def find_ints(self, *keys: str, low: int, high: int) -> list[int] | None:
        """A list of at least one integer in low..high, or None for a missing key."""
        value = self.find(*keys)
        if value is None:
            return None
        if not isinstance(value, list) or not value or not all(_is_int(item, low, high) for item in value):
            self.fail(keys, f"must be a list of integers in {low} to {high}")
        return value

    def find_texts(self, *keys: str) -> list[str] | None:
        """A list of texts, or None for a missing key."""
        value = self.find(*keys)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            self.fail(keys, "must be a list of texts")
        return value

    def refuse_unless(self, key: str, *allowed: Any, why: str) -> None:
        """Fail unless the key is missing or holds one of the allowed values."""
        value = self.find(key)
        if value is not None and value not in allowed:
            self.fail((key,), why)


def _is_int(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
