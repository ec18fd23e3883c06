"""Tokenizers of checkpoints: what the keys say, and that the ids are those of the checkpoint's own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from convert_samples import TARGET_FILE, write_tiny_checkpoint
from reference.checkpoints import QWEN35_SPLIT, read_keys, write_tokenizer
from tokenizers import Tokenizer as ReferenceTokenizer

from pyggml_spec.convert import plan_conversion
from pyggml_spec.convert.vocabulary import split_expression, vocabulary_keys
from pyggml_spec.errors import ModelFileError
from pyggml_spec.gguf_io import open_gguf, read_vocabulary
from pyggml_spec.records import Vocabulary
from pyggml_spec.tokenizer import Tokenizer

N_TINY = 40
TEXTS = (
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "I'm they'll DON'T 3 33 333 -- ... \t\t x\r\n\r\n  y",
    "naïve café नमस्ते e\u0301 ＡＢ 日本語 🙂 <|im_start|>user\nhi<|im_end|>",
)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path)


def change(directory: Path, name: str, **changes: Any) -> None:
    """Change keys of a JSON file; "__" in a name goes into a section."""
    path = directory / name
    document = json.loads(path.read_text()) if path.exists() else {}
    for key, value in changes.items():
        *sections, last = key.split("__")
        inner = document
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    path.write_text(json.dumps(document))


def converted(directory: Path) -> Vocabulary:
    """The vocabulary of the converted model."""
    path = directory.with_name("out.gguf")
    plan_conversion(directory, outtype="f32").write(path)
    with open_gguf(path) as file:
        vocabulary = read_vocabulary(file)
        assert vocabulary.tokens and vocabulary.merges and vocabulary.token_types  # decoded while the file is open
        return vocabulary


def test_ids_of_the_checkpoints_own_tokenizer(tmp_path: Path) -> None:
    """The embedded model's tokenizer.json and our tokenizer on the converted keys give the same ids."""
    write_tokenizer(tmp_path, read_keys(TARGET_FILE))
    reference = ReferenceTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    keys = vocabulary_keys(tmp_path, 8192)
    with open_gguf(TARGET_FILE) as file:
        assert {key: file.metadata.stored_value(key) for key in keys} == keys
        tokenizer = Tokenizer(read_vocabulary(file))
        for text in TEXTS:
            assert tokenizer.encode(text) == reference.encode(text).ids


def test_split_expressions() -> None:
    """What is recognised is what releases hold, letter for letter."""
    assert split_expression(r"[\p{L}\p{M}]") == QWEN35_SPLIT
    assert split_expression(r"\p{L}") == QWEN35_SPLIT.replace(r"[\p{L}\p{M}]", r"\p{L}").replace(r"\p{M}", "")


@pytest.mark.parametrize(("letters", "name"), [(r"\p{L}", "qwen2"), (r"[\p{L}\p{M}]", "qwen35")])
def test_split_rule_is_recognised(tiny: Path, letters: str, name: str) -> None:
    """Both Qwen rules get llama.cpp's name."""
    step = {"type": "Split", "pattern": {"Regex": split_expression(letters)}}
    change(tiny, "tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": [step, {"type": "ByteLevel"}]})

    assert converted(tiny).pre_tokenizer == name


def test_merges_as_pairs(tiny: Path) -> None:
    """Newer tokenizer.json files hold pairs instead of texts."""
    change(tiny, "tokenizer.json", model__merges=[["!", '"']])

    assert converted(tiny).merges == [b'! "']


def test_kinds_of_tokens(tiny: Path) -> None:
    """Special tokens control, other added ones are the user's unless they look like control, gaps are unused."""
    added = [
        {"id": 39, "content": "<|end|>", "special": True},
        {"id": 40, "content": "<think>", "special": False},
        {"id": 41, "content": "<|fim_prefix|>", "special": False},
    ]
    change(tiny, "tokenizer.json", added_tokens=added)
    keys = vocabulary_keys(tiny, 44)

    assert keys["tokenizer.ggml.token_type"].hex().endswith("".join(f"0{kind}000000" for kind in (1, 3, 4, 3, 5, 5)))
    assert keys["tokenizer.ggml.tokens"].endswith(b"[PAD42]" + (7).to_bytes(8, "little") + b"[PAD43]")


def test_special_ids(tiny: Path) -> None:
    """The tokenizer's texts come first, as text or object; the model's numbers fill in; ids off the table do not."""
    change(tiny, "tokenizer_config.json", eos_token={"content": "<|end|>"}, pad_token=None, mask_token="unknown text")
    change(tiny, "config.json", eos_token_id=3, pad_token_id=5, mask_token_id=7, bos_token_id=4000)
    vocabulary = converted(tiny)

    assert (vocabulary.eos_id, vocabulary.pad_id, vocabulary.mask_id, vocabulary.bos_id) == (39, 5, 7, None)


def test_byte_level_post_processor_adds_nothing(tiny: Path) -> None:
    """A tokenizer that only trims offsets says so."""
    change(tiny, "tokenizer.json", post_processor={"type": "ByteLevel"})
    keys = vocabulary_keys(tiny, N_TINY)

    assert keys["tokenizer.ggml.add_bos_token"] == keys["tokenizer.ggml.add_eos_token"] == b"\x07\x00\x00\x00\x00"


def test_chat_templates(tiny: Path) -> None:
    """A template file counts more than the settings; of named ones the default is the model's."""
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    change(tiny, "tokenizer_config.json", chat_template=named)
    keys = vocabulary_keys(tiny, N_TINY)

    assert keys["tokenizer.chat_template"].endswith(b"a")
    assert keys["tokenizer.chat_template.tool_use"].endswith(b"b")
    (tiny / "chat_template.jinja").write_text("{{ messages }} ü", encoding="utf-8")
    assert converted(tiny).chat_template == "{{ messages }} ü"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__type": "Unigram"}, r"only byte-level BPE tokenizers"),
        ({"model__vocab": []}, r"must map tokens to ids"),
        ({"model__vocab": {"a": "x"}}, r"token 'a' .* has id x"),
        ({"model__merges": ["a b c"]}, r"must be a list of pairs"),
        ({"model__merges": None}, r"'model.merges' .* is missing"),
        ({"added_tokens": [{"id": 1}]}, r"must be a list of objects with 'id' and 'content'"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, r"splits text by no expression; only the rules of Qwen2"),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\w+"}}}, r"splits text by '\\\\w\+'; only"),
        ({"post_processor": {"type": "TemplateProcessing"}}, r"add no tokens of their own"),
    ],
)
def test_refused(tiny: Path, changes: dict[str, Any], message: str) -> None:
    """Tokenizers of other kinds are refused with what was found."""
    change(tiny, "tokenizer.json", **changes)
    with pytest.raises(ModelFileError, match=message):
        vocabulary_keys(tiny, N_TINY)


def test_no_tokenizer(tiny: Path) -> None:
    """The way out names the file."""
    (tiny / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"has no tokenizer.json; give a directory"):
        vocabulary_keys(tiny, N_TINY)


def test_template_that_is_no_text(tiny: Path) -> None:
    """A template file in another encoding is named."""
    (tiny / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelFileError, match=r"chat_template.jinja' cannot be read as UTF-8"):
        vocabulary_keys(tiny, N_TINY)
