"""Turning a stream of tokens into text that never ends inside a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable


class StreamDecoder:
    """Feeds on token ids and yields text as soon as its characters are complete; each token costs its own length.

    The pieces, with `flush` at the end, concatenate to what decoding all ids at once gives: bytes that are not UTF-8
    become U+FFFD.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; an unfinished character waits for the next call."""
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def flush(self) -> str:
        """What is left at the end: U+FFFD when a character stayed unfinished, else nothing. Starts afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
