"""Damaged files of every kind, from a seed: each opens or fails with a ModelFileError, quickly."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_samples import write_drafter, write_target

from pyggml_spec.errors import ModelFileError, OptionError
from pyggml_spec.gguf_io import find_vocabulary, open_gguf, read_drafter_config, read_target_config
from pyggml_spec.gguf_io.reader import GgufFile
from pyggml_spec.tokenizer import Tokenizer

N_MUTANTS = 250  # of each kind of file
SLOWEST_S = 2.0
EXTREMES = (0, 1, 2**7, 2**15, 2**31 - 1, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def overwrite_number(rng: random.Random, content: bytearray, at: int) -> None:
    """Counts, lengths, offsets and dimensions at their limits."""
    content[at : at + 8] = rng.choice(EXTREMES).to_bytes(8, "little")


def flip_bits(rng: random.Random, content: bytearray, at: int) -> None:
    """A few neighbouring bytes changed."""
    for index in range(at, min(at + rng.randint(1, 4), len(content))):
        content[index] ^= 1 << rng.randrange(8)


def cut(rng: random.Random, content: bytearray, at: int) -> None:
    """The end is missing."""
    del content[at:]


def remove(rng: random.Random, content: bytearray, at: int) -> None:
    """A piece is missing."""
    del content[at : at + rng.randint(1, 16)]


def insert(rng: random.Random, content: bytearray, at: int) -> None:
    """A piece of rubbish is too many."""
    content[at:at] = rng.randbytes(rng.randint(1, 16))


def repeat(rng: random.Random, content: bytearray, at: int) -> None:
    """A piece occurs twice."""
    content[at:at] = content[at : at + rng.randint(4, 64)]


DAMAGES: tuple[Callable[[random.Random, bytearray, int], None], ...] = (
    overwrite_number,
    flip_bits,
    cut,
    remove,
    insert,
    repeat,
)


def mutant(rng: random.Random, whole: bytes, n_header_bytes: int) -> bytes:
    """The file with one to three damages, nearly all in its header."""
    content = bytearray(whole)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(min(n_header_bytes if rng.random() < 0.95 else len(whole), len(content)) or 1)
        rng.choice(DAMAGES)(rng, content, at)
    return bytes(content)


def use_everything(file: GgufFile) -> None:
    """What a program does with a model file before it computes."""
    read = read_target_config if file.architecture == "qwen35" else read_drafter_config
    vocabulary = find_vocabulary(file)
    if vocabulary is not None:
        tokenizer = Tokenizer(vocabulary)
        tokenizer.decode(tokenizer.encode('ab!"<|end|>'))
    read(file)
    assert all(tensor.data.nbytes == tensor.n_bytes for tensor in file.tensors.values())


@pytest.mark.parametrize("write", [write_target, write_drafter])
def test_mutants(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    """No mutant raises another exception, hangs, or makes a wrong claim about its tensors."""
    whole = write(tmp_path / "whole.gguf").read_bytes()
    n_header_bytes = whole.rindex(b"output_norm.weight") + 64
    n_opened, path = 0, tmp_path / "mutant.gguf"
    for seed in range(N_MUTANTS):
        path.write_bytes(mutant(random.Random(seed), whole, n_header_bytes))
        start = time.perf_counter()
        try:
            with open_gguf(path) as file:
                use_everything(file)
            n_opened += 1
        except (ModelFileError, OptionError) as error:
            assert "\n" not in str(error), f"seed {seed}"
        except Exception as error:
            raise AssertionError(f"seed {seed} raised {error!r}") from error
        assert time.perf_counter() - start < SLOWEST_S, f"seed {seed}"

    assert 0 < n_opened < N_MUTANTS
