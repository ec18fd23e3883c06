"""Typed getters: a wrong value names its key, the file, what was found, the rule and who writes it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from gguf_samples import raw_gguf, text, write_gguf

from pyggml_spec.errors import ModelFileError
from pyggml_spec.gguf_io import open_gguf
from pyggml_spec.gguf_io.metadata import Metadata

KEYS = {
    "int": 7,
    "negative": -7,
    "float": 0.5,
    "infinite": float("inf"),
    "text": "seven",
    "flag": True,
    "equal": [4, 4, 4],
    "ints": [1, 2, 3],
    "floats": [0.5, 1.5],
    "flags": [True, False],
    "texts": ["a", "b"],
}


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Metadata:
    """A file with a key of every kind."""
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "kinds.gguf", "qwen35", KEYS, {})
    return open_gguf(path).metadata


def test_right_values(metadata: Metadata) -> None:
    """Every getter returns the stored value; llama.cpp's per-layer arrays of equal numbers count as one."""
    assert metadata.require_int("int", 0, 10) == 7
    assert metadata.require_int("negative", -10, 0) == -7
    assert metadata.require_int("equal", 0, 10) == 4
    assert metadata.require_float("float", 0, 1) == 0.5
    assert metadata.require_float("int", 0, 10) == 7.0
    assert metadata.require_string("text") == "seven"
    assert metadata.require_ints("ints", 0, 3, n_items=3) == (1, 2, 3)
    assert metadata.require_bools("flags", 2) == (True, False)
    assert metadata.require_bools("ints", 3) == (True, True, True)
    assert len(metadata) == len(KEYS) + 1


def test_defaults_only_for_missing_keys(metadata: Metadata) -> None:
    """A present but wrong value never falls back to the default."""
    assert metadata.find_int("none", 1, 2, default=9) == 9
    assert metadata.find_float("none", 1, 2, default=0.0) == 0.0
    assert metadata.find_string("none", default="x") == "x"
    assert metadata.find_bool("none", True) is True
    assert metadata.find_string_array("none") is None
    with pytest.raises(ModelFileError):
        metadata.find_int("text", 1, 2, default=9)


WRONG: list[tuple[str, Callable[[Metadata], object]]] = [
    ("int", lambda m: m.require_int("int", 8, 10)),
    ("float", lambda m: m.require_int("float", 0, 10)),
    ("flag", lambda m: m.require_int("flag", 0, 10)),
    ("text", lambda m: m.require_int("text", 0, 10)),
    ("ints", lambda m: m.require_int("ints", 0, 10)),
    ("texts", lambda m: m.require_int("texts", 0, 10)),
    ("missing", lambda m: m.require_int("missing", 0, 10)),
    ("infinite", lambda m: m.require_float("infinite", 0, 10)),
    ("float", lambda m: m.require_float("float", 1, 10)),
    ("text", lambda m: m.require_float("text", 0, 10)),
    ("missing", lambda m: m.require_float("missing", 0, 10)),
    ("int", lambda m: m.require_string("int")),
    ("missing", lambda m: m.require_string("missing")),
    ("int", lambda m: m.find_bool("int", False)),
    ("int", lambda m: m.require_ints("int", 0, 10)),
    ("ints", lambda m: m.require_ints("ints", 2, 10)),
    ("ints", lambda m: m.require_ints("ints", 0, 10, n_items=4)),
    ("floats", lambda m: m.require_ints("floats", 0, 10)),
    ("texts", lambda m: m.require_ints("texts", 0, 10)),
    ("flags", lambda m: m.require_bools("flags", 3)),
    ("texts", lambda m: m.require_bools("texts", 2)),
    ("ints", lambda m: m.find_string_array("ints")),
]


@pytest.mark.parametrize(("key", "get"), WRONG)
def test_wrong_values(metadata: Metadata, key: str, get: Callable[[Metadata], object]) -> None:
    """One sentence with the key, the file, the value and the program that writes it."""
    with pytest.raises(ModelFileError) as caught:
        get(metadata)

    message = str(caught.value)
    assert f"'{key}'" in message and "kinds.gguf" in message and "convert_hf_to_gguf.py" in message
    assert ("is missing" in message) == (key == "missing")
    assert "\n" not in message and len(message) < 400


def test_sentences_have_parts() -> None:
    """Who made a file tells its reader's finding without the name of the file and what to do about it."""
    error = ModelFileError.about("a.gguf", "has type I8", part="tensor 'x'", way_out="convert it again")
    whole = ModelFileError.about(Path("a.gguf"), "is damaged")

    assert str(error) == "tensor 'x' of 'a.gguf' has type I8; convert it again"
    assert error.finding == "tensor 'x' has type I8"
    assert (str(whole), whole.finding) == ("'a.gguf' is damaged", "the file is damaged")
    assert pickle.loads(pickle.dumps(error)).finding == error.finding
    assert ModelFileError("something else").finding is None


def test_the_writer_of_lucebox_files(tmp_path: Path) -> None:
    """Errors about a dialect-B drafter point at its converter."""
    path = write_gguf(tmp_path / "b.gguf", "qwen35-dflash-draft", {}, {})
    with open_gguf(path) as file, pytest.raises(ModelFileError, match="lucebox"):
        file.metadata.require_int("x", 0, 1)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    """Such a value fails when it is asked for, and by name."""
    path = tmp_path / "model.gguf"
    value = text(b"x") + int(gguf.GGUFValueType.STRING).to_bytes(4, "little") + text(b"\xff")
    path.write_bytes(raw_gguf([value], []))
    with open_gguf(path) as file, pytest.raises(ModelFileError, match="'x' of .* is not UTF-8"):
        file.metadata.require_string("x")


def test_long_values_are_shortened(tmp_path: Path) -> None:
    """An error message does not print a whole chat template."""
    path = write_gguf(tmp_path / "long.gguf", "qwen35", {"x": "y" * 5000, "ids": list(range(200))}, {})
    with open_gguf(path) as file:
        for key in ("x", "ids"):
            with pytest.raises(ModelFileError) as caught:
                file.metadata.require_int(key, 0, 1)
            assert len(str(caught.value)) < 400
