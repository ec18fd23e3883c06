"""Arguments of the public calls: of the right kind, or refused in a sentence before anything is done with them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from pyggml_spec.errors import ContextLimitError, OptionError

_MAX_SHOWN = 80  # characters of a value


def refusal(name: str, value: object, rule: str) -> OptionError:
    """The error to raise when an argument breaks its rule."""
    shown = " ".join(repr(value).split())
    return OptionError(f"`{name}` is {shown:.{_MAX_SHOWN}}: it must be {rule}")


def as_int(value: Any) -> Any:
    """The int that an integer of any type stands for, NumPy's too; anything else comes back as it is, for the
    argument's own check to refuse."""
    if isinstance(value, bool):
        return value
    try:
        return index(value)
    except TypeError:
        return value


def is_int(value: object) -> bool:
    """Whether this is an int, which a truth value is not meant to be."""
    return isinstance(value, int) and not isinstance(value, bool)


def as_limit(max_tokens: Any) -> Any:
    """The argument `max_tokens` with None for -1, llama.cpp's way to say no limit."""
    number = as_int(max_tokens)
    return None if is_int(number) and number == -1 else number


def check_integer(name: str, value: Any, low: int, high: int, note: str = "") -> int:
    """The argument as an int of low .. high; raises OptionError."""
    number = as_int(value)
    if not is_int(number) or not low <= number <= high:
        raise refusal(name, value, f"an integer from {low} to {high}{note}")
    return int(number)


def check_length(n_tokens: int, n_ctx: int, n_ctx_train: int) -> None:
    """Raise ContextLimitError for more tokens than the context holds, and say what can be done about it."""
    if n_tokens > n_ctx:
        more = f"load with a larger `n_ctx` (at most {n_ctx_train}, what the model was trained with)"
        way_out = f" or {more}" if n_ctx < n_ctx_train else ", for the model was trained with no larger context"
        raise ContextLimitError(
            f"the text to continue has {n_tokens} tokens but the context holds {n_ctx}: shorten the prompt{way_out}"
        )


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise OptionError unless the argument is None or an object of this class."""
    if value is not None and not isinstance(value, kind):
        raise refusal(name, value, f"{kind.__name__}(...) or None")


def check_flags(**flags: object) -> None:
    """Raise OptionError unless every argument is a truth value: an "off" would count as true."""
    for name, value in flags.items():
        number = as_int(value)
        if not isinstance(value, bool | np.bool_) and not (is_int(number) and number in (0, 1)):
            raise refusal(name, value, "True or False")


def check_path(name: str, value: object) -> Path:
    """The argument as a path; raises OptionError."""
    if not isinstance(value, str | PathLike) or not str(value) or "\0" in str(value):
        raise refusal(name, value, "the path of a GGUF file")
    return Path(value)


def check_text(name: str, value: object, rule: str) -> str:
    """The argument, a text; raises OptionError."""
    if not isinstance(value, str):
        raise refusal(name, value, rule)
    return value


def check_callback(name: str, value: object) -> None:
    """Raise OptionError unless the argument can report progress."""
    if value is not None and not callable(value):
        raise refusal(name, value, "a function of (done, total), or None")


def check_stops(stop: object) -> tuple[str, ...]:
    """The argument `stop` as texts; raises OptionError."""
    if isinstance(stop, str):
        return (stop,)
    if not isinstance(stop, Collection) or not all(isinstance(text, str) for text in stop):
        raise refusal("stop", stop, "a text or a list of texts; for none leave it out")
    return tuple(stop)


def check_messages(messages: object) -> list[Any]:
    """The argument `messages` as a list; raises OptionError."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise refusal("messages", messages, 'a list of mappings with "role" and "content"')
    return list(messages)
