"""Stops: the token ids and strings that end a generation, found token by token inside whatever block a round yields.

Text is withheld while it may be the beginning of a stop string, so what was emitted never has to be taken back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from pyggml_spec.errors import OptionError


class StreamDecoder(Protocol):
    """Turns token ids into text and never emits half a character."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that became complete with these tokens."""

    def flush(self) -> str:
        """Text of what is still incomplete."""


@dataclass(frozen=True)
class Cut:
    """What of a block may be emitted: its first `n_keep` tokens, their text, and whether the last one was a stop."""

    n_keep: int
    text: str
    stopped: bool


class StopScanner:
    """Finds stop strings in text that arrives in pieces."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        is_list = isinstance(stop_strings, Sequence) and not isinstance(stop_strings, str)
        if not is_list or not all(isinstance(s, str) and s for s in stop_strings):
            raise OptionError(f"`stop` is {stop_strings!r}: it must be a list of strings, none of them empty")
        self._stops = tuple(stop_strings)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Text that may be emitted now, and whether a stop string ended it (the stop string itself is dropped).

        The stop string that is complete first wins, of those the longest: where pieces begin and end makes no
        difference.
        """
        if not self._stops:
            return text, False
        buffer = self._held + text
        hits = [(at + len(stop), at) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if hits:
            self._held = ""
            return buffer[: min(hits)[1]], True
        n_held = max(_n_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - n_held :]
        return buffer[: len(buffer) - n_held], False

    def flush(self) -> str:
        """The withheld text: nothing follows it any more, so it begins no stop string."""
        held, self._held = self._held, ""
        return held


class StopTracker:
    """Cuts blocks of tokens exactly where one-token decoding would have stopped."""

    def __init__(self, stop_ids: Collection[int], stop_strings: Sequence[str], decoder: StreamDecoder | None) -> None:
        self._scanner = StopScanner(stop_strings)
        if stop_strings and decoder is None:
            raise OptionError(
                f"`stop` is {list(stop_strings)!r}: stop strings need a decoder that turns tokens into text"
            )
        self._stop_ids = frozenset(int(token_id) for token_id in stop_ids)
        self._decoder = decoder

    def feed(self, token_ids: Sequence[int]) -> Cut:
        """Take tokens until a stop: that token is kept, its text is not; nothing after it is looked at."""
        pieces: list[str] = []
        for n_done, token_id in enumerate(token_ids, start=1):
            if token_id in self._stop_ids:
                return Cut(n_done, "".join(pieces) + self.finish(), True)
            if self._decoder is not None:
                text, stopped = self._scanner.feed(self._decoder.feed((token_id,)))
                pieces.append(text)
                if stopped:
                    return Cut(n_done, "".join(pieces), True)
        return Cut(len(token_ids), "".join(pieces), False)

    def finish(self) -> str:
        """The text still withheld when a generation ends without completing a stop string."""
        if self._decoder is None:
            return ""
        text, stopped = self._scanner.feed(self._decoder.flush())
        return text if stopped else text + self._scanner.flush()


def _n_overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
