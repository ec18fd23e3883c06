"""Writing a file: other writers beside it lose nothing, and what ends it early leaves nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from pyggml_spec.convert.output_file import OutputFile, OutputTensor, write_file
from pyggml_spec.errors import ModelFileError


def file_of(value: float, at_pieces: object = None) -> OutputFile:
    """A file of one tensor; `at_pieces` is called when its values are asked for."""

    def pieces() -> Iterator[np.ndarray]:
        if callable(at_pieces):
            at_pieces()
        yield np.full(32, value, np.float32)

    return OutputFile({}, [OutputTensor("x.weight", (32,), gguf.GGMLQuantizationType.F32, pieces)])


def check(_: Path) -> None:
    """Nothing to say against any file."""


def test_a_writer_that_fails_leaves_the_files_of_others(tmp_path: Path) -> None:
    """Two processes of one number (containers that share a folder) write one name at once."""
    path = tmp_path / "out.gguf"
    seen: list[set[str]] = []

    def second() -> None:
        with pytest.raises(ModelFileError, match="yielded"):
            broken = file_of(2)
            tensor = broken.tensors[0]
            short = OutputTensor(tensor.name, tensor.ne, tensor.type, lambda: iter([np.zeros(1, np.float32)]))
            write_file(OutputFile({}, [short]), path, check)
        seen.append({each.name for each in tmp_path.iterdir()})

    write_file(file_of(1, second), path, check)

    assert len(seen[0]) == 1
    assert os.listdir(tmp_path) == ["out.gguf"]


def test_a_name_taken_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    """Unless it may be."""
    path = tmp_path / "out.gguf"
    with pytest.raises(ModelFileError, match="was made by somebody else meanwhile; choose another name"):
        write_file(file_of(1, lambda: path.write_text("theirs")), path, check, replace=False)
    assert path.read_text() == "theirs"
    assert os.listdir(tmp_path) == ["out.gguf"]

    write_file(file_of(1), path, check)
    assert path.read_bytes()[:4] == b"GGUF"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """One sentence, before anything is computed."""
    with pytest.raises(ModelFileError, match="does not exist: make it, or write elsewhere"):
        write_file(file_of(1), tmp_path / "no" / "out.gguf", check)
