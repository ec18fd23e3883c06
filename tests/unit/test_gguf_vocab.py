"""Vocabularies as files carry them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf_samples import write_gguf, write_target

from pyggml_spec.assets import embedded_target_path
from pyggml_spec.errors import ModelFileError
from pyggml_spec.gguf_io import find_vocabulary, open_gguf, read_vocabulary
from pyggml_spec.records import Vocabulary


def read(path: Path) -> Vocabulary:
    """The vocabulary of a file."""
    with open_gguf(path) as file:
        return read_vocabulary(file)


def test_embedded_vocabulary() -> None:
    """Sizes, special ids and template of the embedded model; the lists outlive the closed file."""
    vocabulary = read(embedded_target_path())

    assert (vocabulary.model, vocabulary.pre_tokenizer, vocabulary.n_tokens) == ("gpt2", "qwen35", 8192)
    assert (vocabulary.eos_id, vocabulary.pad_id, vocabulary.mask_id) == (8184, 8188, 8187)
    assert (vocabulary.bos_id, vocabulary.eot_id, vocabulary.add_bos) == (None, None, False)
    assert (len(vocabulary.tokens), len(vocabulary.merges)) == (8192, 7928)
    assert vocabulary.tokens[8184] == b"<|endoftext|>"
    assert vocabulary.token_types.count(3) == 8
    assert vocabulary.chat_template is not None and "<|im_start|>" in vocabulary.chat_template


def test_lists_are_decoded_once() -> None:
    """Asking again gives the same object."""
    vocabulary = read(embedded_target_path())
    assert vocabulary.tokens is vocabulary.tokens


def test_missing_parts(tmp_path: Path) -> None:
    """Without types every token is normal; without merges, template and special ids there are none."""
    changes = dict.fromkeys(("tokenizer.ggml.token_type", "tokenizer.ggml.merges", "tokenizer.ggml.eos_token_id"))
    vocabulary = read(write_target(tmp_path / "a.gguf", changes))

    assert vocabulary.token_types == [1] * 40
    assert (vocabulary.merges, vocabulary.eos_id, vocabulary.chat_template) == ([], None, None)


def test_no_vocabulary(tmp_path: Path) -> None:
    """find_vocabulary says None where read_vocabulary raises."""
    path = write_gguf(tmp_path / "a.gguf", "qwen35", {}, {})
    with open_gguf(path) as file:
        assert find_vocabulary(file) is None
    with pytest.raises(ModelFileError, match="'tokenizer.ggml.tokens' of .* is missing"):
        read(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer.ggml.tokens": 3},
        {"tokenizer.ggml.tokens": [1, 2]},
        {"tokenizer.ggml.merges": [1, 2]},
        {"tokenizer.ggml.model": None},
        {"tokenizer.ggml.pre": 3},
        {"tokenizer.ggml.token_type": [1] * 39},
        {"tokenizer.ggml.token_type": ["x"] * 40},
        {"tokenizer.ggml.token_type": [1.0] * 40},
        {"tokenizer.ggml.eos_token_id": 40},
        {"tokenizer.ggml.bos_token_id": -1},
        {"tokenizer.ggml.mask_token_id": "x"},
        {"tokenizer.ggml.add_bos_token": 1},
        {"tokenizer.chat_template": 5},
    ],
)
def test_bad_parts(tmp_path: Path, changes: dict[str, Any]) -> None:
    """What does not fit together is refused, by key."""
    with pytest.raises(ModelFileError, match=f"'{next(iter(changes))}'"):
        read(write_target(tmp_path / "a.gguf", changes))
