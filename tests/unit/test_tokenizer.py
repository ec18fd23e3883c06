"""Text to ids and back: equal to Hugging Face's file of the same vocabulary, and safe to stream."""

from __future__ import annotations

import json
import threading
import time
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml_spec.assets import embedded_target_path
from pyggml_spec.errors import ModelFileError, OptionError
from pyggml_spec.gguf_io import open_gguf, read_vocabulary
from pyggml_spec.records import Vocabulary
from pyggml_spec.tokenizer import StreamDecoder, Tokenizer
from pyggml_spec.tokenizer.byte_alphabet import byte_of_character

GOLDEN = Path(__file__).parent.parent / "golden" / "tokenizer.json"
SAMPLES = json.loads(GOLDEN.read_text())["samples"]
END_OF_TEXT, IM_END = 8184, 8186


def embedded_tokenizer() -> Tokenizer:
    """The embedded model's tokenizer."""
    with open_gguf(embedded_target_path()) as file:
        return Tokenizer(read_vocabulary(file))


TOKENIZER = embedded_tokenizer()
FEW = settings(max_examples=100, deadline=None)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def toy(**changes: Any) -> Vocabulary:
    """A vocabulary of the 256 bytes, one merge, a user-defined and a control token."""
    tokens = [character.encode() for character in byte_of_character()] + [b"ab", b"<think>", b"<|end|>"]
    lists = {"tokens": tokens, "merges": [b"a b"], "types": [1] * 257 + [4, 3]} | changes
    return Vocabulary(
        file="toy.gguf",
        model=changes.get("model", "gpt2"),
        pre_tokenizer=changes.get("pre_tokenizer", "qwen2"),
        n_tokens=len(lists["tokens"]),
        load_tokens=lambda: lists["tokens"],
        load_merges=lambda: lists["merges"],
        load_token_types=lambda: lists["types"],
        eos_id=changes.get("eos_id"),
    )


@pytest.mark.parametrize("number", range(len(SAMPLES)))
def test_equal_to_hugging_face(number: int) -> None:
    """Ids of tricky and random texts, with control tokens recognised and, where it matters, read as text."""
    sample = SAMPLES[number]
    assert TOKENIZER.encode(sample["text"]) == sample["ids"]
    if "ids_as_text" in sample:
        assert TOKENIZER.encode(sample["text"], parse_special=False) == sample["ids_as_text"]


@FEW
@given(texts)
def test_round_trip(text: str) -> None:
    """Decoding gives back the text, normalised to NFC."""
    ids = TOKENIZER.encode(text, parse_special=False)
    assert TOKENIZER.decode(ids) == unicodedata.normalize("NFC", text)


@FEW
@given(texts, st.randoms(use_true_random=False))
def test_streaming_in_any_pieces(text: str, random: Any) -> None:
    """Pieces concatenate to the whole text, and no piece has half a character."""
    ids, stream, pieces = TOKENIZER.encode(text), TOKENIZER.stream(), []
    while ids:
        n_next = random.randint(0, 3)
        pieces.append(stream.feed(ids[:n_next]))
        ids = ids[n_next:]

    assert "".join(pieces) == TOKENIZER.decode(TOKENIZER.encode(text))
    assert stream.flush() == ""


@FEW
@given(st.lists(st.binary(max_size=5), max_size=20))
def test_streaming_bytes_that_are_no_text(chunks: list[bytes]) -> None:
    """Whatever the bytes, streaming and decoding at once agree; the flush starts afresh."""
    stream = StreamDecoder(chunks.__getitem__)
    for _ in range(2):
        streamed = "".join(stream.feed([index]) for index in range(len(chunks))) + stream.flush()
        assert streamed == b"".join(chunks).decode("utf-8", errors="replace")


def test_a_character_waits_for_its_last_byte() -> None:
    """An emoji spelled in four tokens appears with the fourth."""
    stream = StreamDecoder(lambda byte: bytes([byte]))
    assert [stream.feed([byte]) for byte in "👍".encode()] == ["", "", "", "👍"]
    assert (stream.feed([0xF0]), stream.flush()) == ("", "\ufffd")


def test_control_tokens_have_no_text_unless_asked() -> None:
    """They steer the model; user-defined tokens are ordinary text."""
    ids = TOKENIZER.encode("a<|im_end|>b")
    assert IM_END in ids
    assert TOKENIZER.decode(ids) == "ab"
    assert TOKENIZER.decode(ids, with_special=True) == "a<|im_end|>b"
    assert TOKENIZER.stream(with_special=True).feed(ids) == "a<|im_end|>b"

    tokenizer = Tokenizer(toy())
    assert tokenizer.encode("ab<think>ab<|end|>") == [256, 257, 256, 258]
    assert tokenizer.encode("<think>", parse_special=False) == [257]
    assert tokenizer.decode([256, 257, 258]) == "ab<think>"


def test_threads_do_not_disturb_each_other() -> None:
    """One reads control tokens as such while the other one reads them as text."""
    text, found = "ab<|im_end|>" * 200, {True: set(), False: set()}
    expected = {parse: {tuple(TOKENIZER.encode(text, parse_special=parse))} for parse in found}

    def work(parse: bool) -> None:
        for _ in range(100):
            found[parse].add(tuple(TOKENIZER.encode(text, parse_special=parse)))

    threads = [threading.Thread(target=work, args=(parse,)) for parse in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == expected


def test_control_tokens_that_begin_alike() -> None:
    """The longest one counts, wherever it stands in the vocabulary."""
    tokens = toy().tokens + [b"<|end|>more"]
    tokenizer = Tokenizer(toy(tokens=tokens, types=[*toy().token_types, 3]))

    assert tokenizer.encode("<|end|>more<|end|>mor") == [259, 258, *tokenizer.encode("mor")]
    assert Tokenizer(toy(types=[1] * 259)).encode("ab<|end|>")[0] == 256


def test_end_ids() -> None:
    """The file's end token and the known ends of an answer."""
    assert TOKENIZER.end_ids == {END_OF_TEXT, IM_END}
    assert Tokenizer(toy(eos_id=258)).end_ids == {258}
    assert Tokenizer(toy()).end_ids == frozenset()


def test_begin_of_text() -> None:
    """It is added when the file or the caller wants it."""
    tokenizer = Tokenizer(replace(toy(), bos_id=258, add_bos=True))
    assert tokenizer.encode("ab") == [258, 256]
    assert tokenizer.encode("ab", add_bos=False) == [256]
    assert Tokenizer(toy()).encode("ab", add_bos=True) == [256]


def test_token_bytes() -> None:
    """Every token of the byte part is its byte; ids outside the vocabulary are refused."""
    tokenizer = Tokenizer(toy())
    assert sorted(tokenizer.token_bytes(token_id) for token_id in range(256)) == [bytes([byte]) for byte in range(256)]
    for token_id in (-1, 259):
        with pytest.raises(OptionError, match=f"token id {token_id} .* 259"):
            tokenizer.token_bytes(token_id)


def test_combining_marks_by_generation() -> None:
    """Qwen3.5 keeps a combining mark in its word, Qwen2 cuts before it."""
    word = "ne\u0301\u0302"
    merges = [b"n \xc3\x83", "nÃ ©".encode(), "Ì Ĥ".encode()]
    tokens = toy().tokens + [b"n\xc3\x83", "nÃ©".encode(), "ÌĤ".encode(), "nÃ©ÌĤ".encode()]
    changes = {"tokens": tokens, "types": [1] * 257 + [4, 3] + [1] * 4, "merges": [*merges, "nÃ© ÌĤ".encode()]}
    assert Tokenizer(toy(pre_tokenizer="qwen35", **changes)).encode(word) == [262]
    assert Tokenizer(toy(pre_tokenizer="qwen2", **changes)).encode(word) == [260, 261]


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"model": "llama"}, "kind 'llama'"),
        ({"pre_tokenizer": "gpt-4o"}, "'gpt-4o'"),
        ({"merges": [b"a b", b"x zz"]}, "do not fit"),
        ({"merges": [b"ab"]}, "do not fit"),
        ({"tokens": [b"a", b"a"], "types": [1, 1], "merges": []}, "same token twice"),
        ({"tokens": [b"a", b"\xff"], "types": [1, 1], "merges": []}, "not UTF-8"),
    ],
)
def test_bad_vocabularies(changes: dict[str, Any], hint: str) -> None:
    """One sentence that names the file and what is wrong."""
    with pytest.raises(ModelFileError, match="'toy.gguf'") as caught:
        Tokenizer(toy(**changes)).encode("ab")
    assert hint in str(caught.value) and "\n" not in str(caught.value)


def test_text_that_is_not_unicode() -> None:
    """A lone surrogate, which Python makes of an undecodable byte on the command line, is refused."""
    with pytest.raises(OptionError, match="valid Unicode"):
        TOKENIZER.encode("a\udc80b")


def test_streaming_costs_linear_time() -> None:
    """A hundred thousand tokens stream in a moment."""
    stream, start = TOKENIZER.stream(), time.perf_counter()
    n_chars = sum(len(stream.feed([token_id % 8000])) for token_id in range(100_000))
    assert n_chars > 100_000
    assert time.perf_counter() - start < 2.0
