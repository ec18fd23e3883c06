"""Opening GGUF files: what is there is found, and what is wrong is said in one sentence."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_samples import raw_gguf, target_weights, tensor_entry, text, u32_key, write_gguf, write_target

from pyggml_spec.errors import ModelFileError
from pyggml_spec.gguf_io import open_gguf

ARRAY, STRING, U32 = (int(kind) for kind in (gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING, 4))


def refusal(path: Path) -> str:
    """The message with which opening a file fails."""
    with pytest.raises(ModelFileError) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    assert path.name in message
    return message


def test_tensors_and_keys(tmp_path: Path) -> None:
    """Names, shapes in ggml's order, types, bytes and values are those that were written."""
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    keys = {"x.count": 7, "x.scale": 0.5, "x.name": "größe", "x.on": True, "x.ids": [3, 1, 2], "x.words": ["a", "bc"]}
    path = write_gguf(tmp_path / "model.gguf", "toy", keys, {"table.weight": table})

    with open_gguf(path) as file:
        tensor = file.tensors["table.weight"]
        assert (tensor.ne, tensor.type.name, tensor.n_bytes) == ((4, 3), "F32", 48)
        assert tensor.data.dtype == np.uint8
        assert np.array_equal(tensor.data.view(np.float32).reshape(3, 4), table)
        assert (file.architecture, file.n_bytes, file.alignment) == ("toy", 48, 32)
        metadata = file.metadata
        assert (metadata.require_int("x.count", 0, 9), metadata.require_float("x.scale", 0, 1)) == (7, 0.5)
        assert (metadata.require_string("x.name"), metadata.find_bool("x.on", False)) == ("größe", True)
        assert metadata.require_ints("x.ids", 1, 3) == (3, 1, 2)
        words = metadata.find_string_array("x.words")
        assert words is not None and words.strings() == [b"a", b"bc"]


def test_weights_are_mapped_and_read_only(tmp_path: Path) -> None:
    """No tensor is copied into memory, and none can be written through its view."""
    with open_gguf(write_target(tmp_path / "model.gguf")) as file:
        view = file.tensors["token_embd.weight"].data
        assert isinstance(view.base, np.memmap)
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1


def test_close_drops_the_file(tmp_path: Path) -> None:
    """After closing, twice even, nothing of the file is left."""
    file = open_gguf(write_target(tmp_path / "model.gguf"))

    file.close()
    file.close()

    assert not file.tensors and not file.metadata


def test_other_alignment(tmp_path: Path) -> None:
    """Any power of two is an alignment."""
    for alignment in (8, 64, 4096):
        with open_gguf(write_target(tmp_path / f"{alignment}.gguf", alignment=alignment)) as file:
            assert file.alignment == alignment
            assert not file.tensors["output_norm.weight"].data.any()


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    """A missing path, a directory and a pipe are told apart."""
    os.mkfifo(tmp_path / "pipe")

    assert "does not exist" in refusal(tmp_path / "missing.gguf")
    assert "not a regular file" in refusal(tmp_path)
    assert "not a regular file" in refusal(tmp_path / "pipe")


WEIGHT = tensor_entry(b"w", (4,))
DATA = bytes(32)
BAD_FILES = {
    "empty": (b"", "0 bytes"),
    "37 bytes": (b"GGUF" + b"\xff" * 33, "version"),
    "zip": (b"PK\3\4" + bytes(60), "not a GGUF file"),
    "version 1": (raw_gguf([], [], DATA, version=1), "version 1"),
    "version 4": (raw_gguf([], [], DATA, version=4), "version 4"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + DATA, "big-endian"),
    "too many keys": (raw_gguf([], [], DATA, n_keys=2**63), "keys"),
    "too many tensors": (raw_gguf([], [], DATA, n_tensors=2**40), "tensors"),
    "more keys than bytes": (raw_gguf([], [], DATA, n_keys=3), "keys"),
    "key longer than the file": (raw_gguf([struct.pack("<Q", 2**62) + b"k" * 20], [], DATA), "claims"),
    "empty key": (raw_gguf([u32_key(b"", 1)], [], DATA), "is empty"),
    "key that is no text": (raw_gguf([u32_key(b"\xff\xfe", 1)], [], DATA), "printable"),
    "key of two lines": (raw_gguf([u32_key(b"a\nb", 1)], [], DATA), "printable"),
    "same key twice": (raw_gguf([u32_key(b"a", 1), u32_key(b"a", 2)], [], DATA), "twice"),
    "reserved key": (raw_gguf([u32_key(b"GGUF.version", 1)], [], DATA), "reserved"),
    "unknown value type": (raw_gguf([text(b"a") + struct.pack("<II", 99, 0)], [], DATA), "value type 99"),
    "huge text": (raw_gguf([text(b"a") + struct.pack("<IQ", STRING, 2**63)], [], DATA), "claims a string"),
    "text past the end": (raw_gguf([text(b"a") + struct.pack("<IQ", STRING, 4000)], [], DATA), "truncated"),
    "huge array": (raw_gguf([text(b"a") + struct.pack("<IIQ", ARRAY, U32, 2**62)], [], DATA), "truncated"),
    "huge text array": (raw_gguf([text(b"a") + struct.pack("<IIQ", ARRAY, STRING, 2**61)], [], DATA), "strings"),
    "text array past the end": (
        raw_gguf([text(b"a") + struct.pack("<IIQQ", ARRAY, STRING, 1, 2**60)], [], DATA),
        "past the end",
    ),
    "array of arrays": (raw_gguf([text(b"a") + struct.pack("<IIQ", ARRAY, ARRAY, 1)], [], DATA), "array of arrays"),
    "alignment 0": (raw_gguf([u32_key(b"general.alignment", 0)], [], DATA), "power of two"),
    "alignment 24": (raw_gguf([u32_key(b"general.alignment", 24)], [], DATA), "power of two"),
    "alignment of another type": (
        raw_gguf([text(b"general.alignment") + struct.pack("<IQ", gguf.GGUFValueType.UINT64, 32)], [], DATA),
        "UINT64",
    ),
    "huge alignment": (raw_gguf([u32_key(b"general.alignment", 2**31)], [WEIGHT], DATA), "truncated"),
    "nameless tensor": (raw_gguf([], [tensor_entry(b"", (4,))], DATA), "is empty"),
    "long tensor name": (raw_gguf([], [tensor_entry(b"n" * 64, (4,))], DATA), "claims 64 bytes"),
    "no dimension": (raw_gguf([], [tensor_entry(b"weight", ())], DATA), "0 dimensions"),
    "five dimensions": (raw_gguf([], [tensor_entry(b"w", (1, 1, 1, 1, 1))], DATA), "5 dimensions"),
    "extent 0": (raw_gguf([], [tensor_entry(b"w", (4, 0))], DATA), "shape"),
    "extents that overflow": (raw_gguf([], [tensor_entry(b"w", (2**32, 2**32, 2**32))], DATA), "shape"),
    "unknown tensor type": (raw_gguf([], [tensor_entry(b"w", (4,), kind=77)], DATA), "type number 77"),
    "broken quantised row": (raw_gguf([], [tensor_entry(b"w", (33,), kind=8)], bytes(64)), "Q8_0"),
    "offset past the end": (raw_gguf([], [tensor_entry(b"w", (4,), offset=2**62)], DATA), "truncated"),
    "misaligned offset": (raw_gguf([], [tensor_entry(b"w", (4,), offset=4)], DATA), "multiple of 32"),
    "data missing": (raw_gguf([], [tensor_entry(b"w", (9,))], DATA), "truncated"),
    "overlap": (raw_gguf([], [tensor_entry(b"v", (9,)), tensor_entry(b"w", (4,), offset=32)], bytes(99)), "overlaps"),
    "same tensor twice": (raw_gguf([], [WEIGHT, tensor_entry(b"w", (4,), offset=32)], bytes(64)), "twice"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_damaged_file(tmp_path: Path, name: str) -> None:
    """Every kind of damage gives one sentence that names the file and what is wrong with it."""
    content, hint = BAD_FILES[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)

    assert hint in refusal(path)


def test_every_truncation(tmp_path: Path) -> None:
    """A file cut anywhere in its header or data never opens and never raises anything else."""
    content = write_gguf(tmp_path / "whole.gguf", "toy", {"a": ["xy", "z"], "b": 1.5}, {"w": np.ones(9, np.float32)})
    whole = content.read_bytes()
    path = tmp_path / "cut.gguf"
    for length in range(0, whole.rindex(b"\x80\x3f") + 1):
        path.write_bytes(whole[:length])
        refusal(path)


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """The tiny target in shards of at most 20 tensors."""
    write_target(tmp_path / "model.gguf", max_tensors_per_shard=20)
    return sorted(tmp_path.glob("model-*.gguf"))


def test_shards_are_one_model(shards: list[Path]) -> None:
    """Any shard's path opens the whole model."""
    assert len(shards) == 3
    for path in shards:
        with open_gguf(path) as file:
            assert file.tensors.keys() == target_weights().keys()
            assert file.paths == tuple(shards)
            assert file.architecture == "qwen35"


def test_missing_shard(shards: list[Path]) -> None:
    """The missing file is named."""
    shards[1].unlink()
    with pytest.raises(ModelFileError, match="model-00002-of-00003.gguf' of .* is missing"):
        open_gguf(shards[0])


def test_shards_in_the_wrong_order(shards: list[Path]) -> None:
    """A shard under another one's name is noticed."""
    third = shards[2].read_bytes()
    shards[2].write_bytes(shards[1].read_bytes())
    shards[1].write_bytes(third)
    with pytest.raises(ModelFileError, match="named shard 2 of 3"):
        open_gguf(shards[0])


def test_renamed_shard(shards: list[Path]) -> None:
    """A first shard without the others' names says what to restore."""
    path = shards[0].rename(shards[0].with_name("model.gguf"))
    assert "restore the file name" in refusal(path)


def test_damaged_shard(shards: list[Path]) -> None:
    """The damaged file is the one that is named."""
    shards[1].write_bytes(shards[1].read_bytes()[:-64])
    with pytest.raises(ModelFileError, match="model-00002-of-00003.gguf' is damaged"):
        open_gguf(shards[0])


def test_impossible_shard_name(tmp_path: Path) -> None:
    """Shard 4 of 3 cannot be."""
    path = write_target(tmp_path / "model-00004-of-00003.gguf")
    assert "cannot be" in refusal(path)


def test_large_vocabulary_opens_fast(tmp_path: Path) -> None:
    """250k tokens and as many merges: arrays are measured at load and decoded when asked for."""
    words = b"".join(text(b"token %d" % number) for number in range(250_000))
    arrays = [
        text(key) + struct.pack("<IIQ", ARRAY, STRING, 250_000) + words
        for key in (b"tokenizer.ggml.tokens", b"tokenizer.ggml.merges")
    ]
    path = tmp_path / "large.gguf"
    path.write_bytes(raw_gguf(arrays, []))

    start = time.perf_counter()
    with open_gguf(path) as file:
        opened_s = time.perf_counter() - start
        array = file.metadata.find_string_array("tokenizer.ggml.tokens")
        assert array is not None
        tokens = array.strings()

    assert (len(tokens), tokens[-1]) == (250_000, b"token 249999")
    assert opened_s < 1.5, f"opening took {opened_s:.2f} s"


def test_too_many_texts_are_refused_at_once(tmp_path: Path) -> None:
    """A file of nothing but empty texts does not keep the reader busy."""
    path = tmp_path / "texts.gguf"
    n_items = 5_000_000
    path.write_bytes(raw_gguf([text(b"a") + struct.pack("<IIQ", ARRAY, STRING, n_items) + bytes(8 * n_items)], []))

    start = time.perf_counter()
    assert "strings" in refusal(path)
    assert time.perf_counter() - start < 1.0
