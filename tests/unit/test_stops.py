"""Stops: the same cut wherever tokens and blocks begin and end."""

from __future__ import annotations

import itertools

import pytest
from decode_fakes import FakeDecoder

from pyggml_spec.decode.stops import StopScanner, StopTracker
from pyggml_spec.errors import OptionError

PIECES = [b"a", b"b", b"c", b"ab", b"\n", b"\nU", b"ser:", b"\xc3", b"\xa9", b"", b"END", b"EN", b"D"]


def cut_of(text: str, stops: list[str]) -> str | None:
    """Text before the stop string that is complete first, reading one character at a time; None without a hit."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(len(stop) for stop in done)]
    return None


@pytest.mark.parametrize("stops", [["aba"], ["ab", "ba"], ["abba", "bb"], ["a"], ["abab", "babb", "bbbb"]])
def test_scanner_at_every_border(stops: list[str]):
    """However a text is cut into pieces, the same text comes out, and never a character too much on the way."""
    for text in map("".join, itertools.product("ab", repeat=6)):
        expected = cut_of(text, stops)
        for border in range(len(text)):
            scanner, out, hit = StopScanner(stops), "", False
            for piece in (text[:border], text[border:]):
                emitted, hit = scanner.feed(piece)
                out += emitted
                assert (text if expected is None else expected).startswith(out)
                if hit:
                    break
            assert hit == (expected is not None)
            assert out + ("" if hit else scanner.flush()) == (text if expected is None else expected)


def run_blocks(
    token_ids: list[int], n_block: int, stop_ids: list[int], stops: list[str]
) -> tuple[list[int], str, bool]:
    tracker, kept, text = StopTracker(stop_ids, stops, FakeDecoder(PIECES)), [], ""
    for begin in range(0, len(token_ids), n_block):
        cut = tracker.feed(token_ids[begin : begin + n_block])
        kept += token_ids[begin : begin + n_block][: cut.n_keep]
        text += cut.text
        if cut.stopped:
            return kept, text, True
    return kept, text + tracker.finish(), False


@pytest.mark.parametrize(
    ("token_ids", "stop_ids", "stops", "kept", "text"),
    [
        ([0, 1, 12, 2, 0], [12], [], 3, "ab"),  # a stop id: kept as a token, not as text
        ([12, 1], [12], [], 1, ""),
        ([0, 11, 12, 2], [], ["END"], 3, "a"),  # a stop string over two tokens
        ([0, 10, 2], [], ["END"], 2, "a"),
        ([0, 5, 6, 1, 2], [], ["\nUser:"], 3, "a"),
        ([3, 5, 0, 1], [], ["\nUser:"], None, "ab\nUab"),  # looked like a stop, was none
        ([0, 11, 2, 1], [], ["END"], None, "aENcb"),
        ([0, 11], [], ["END"], None, "aEN"),  # withheld text comes out at the end
        ([0, 7, 8, 1], [], ["é"], 3, "a"),  # the stop string is one character of two tokens
        ([0, 7, 8, 1], [], [], None, "aéb"),
        ([0, 7], [], [], None, "a\ufffd"),  # half a character at the end
        ([0, 11, 12], [12], ["END"], 3, "aEN"),  # the stop id wins over the string it would complete
        ([3, 2], [], ["c", "ab"], 1, ""),
        ([0, 9, 9, 1], [], ["b"], 4, "a"),  # tokens without text
    ],
)
def test_every_block_size_cuts_alike(token_ids, stop_ids, stops, kept, text):
    """One-token decoding and blocks of any size keep the same tokens and text."""
    for n_block in range(1, len(token_ids) + 1):
        expected = (token_ids if kept is None else token_ids[:kept], text, kept is not None)

        assert run_blocks(token_ids, n_block, stop_ids, stops) == expected


def test_without_decoder():
    """Token ids alone can stop a generation, and there is no text."""
    tracker = StopTracker([3], [], None)

    assert tracker.feed([1, 2]).n_keep == 2
    cut = tracker.feed([1, 3, 2])
    assert (cut.n_keep, cut.text, cut.stopped) == (2, "", True)
    assert tracker.finish() == ""


@pytest.mark.parametrize("stops", [[""], ["a", ""], "abc", [b"a"], [None], None, 5, {"a": 1}])
def test_stop_strings_are_checked(stops: object):
    """An empty stop string would stop everything; a bare string would be taken letter by letter."""
    with pytest.raises(OptionError, match="stop is"):
        StopScanner(stops)


def test_stop_strings_need_text():
    """Refused rather than ignored."""
    with pytest.raises(OptionError, match="need a decoder"):
        StopTracker([], ["a"], None)
