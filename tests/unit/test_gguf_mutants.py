"""Damaged files of every kind, from a seed: each opens or fails with a ModelFileError, quickly and in little memory."""

from __future__ import annotations

import random
import re
import resource
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from gguf_samples import DRAFTER, write_drafter, write_target
from test_gguf_drafter import DFLASH2, DSPARK, write_lucebox

from pyggml_spec.convert import plan_requantisation
from pyggml_spec.errors import ModelFileError, OptionError
from pyggml_spec.gguf_io import find_vocabulary, open_gguf, read_drafter_config, read_target_config
from pyggml_spec.gguf_io.reader import GgufFile
from pyggml_spec.tokenizer import Tokenizer

N_MUTANTS = 300  # of each of the seven files: 2100
SLOWEST_S = 2.0  # of one mutant
MOST_MEMORY = 512 << 20  # bytes of address space beyond what the process had; the files have 20 kB
EXTREMES = (0, 1, 2**7, 2**15, 2**31 - 1, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
VALUES = (0, 1, 2, 3, 7, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
FLOATS = (0.0, -1.0, 1e-30, 1e30, float("inf"), float("nan"))
FILES: dict[str, Callable[[Path], Path]] = {
    "target": write_target,
    **{f"{d.kind} llama.cpp": partial(write_drafter, config=d) for d in (DRAFTER, DSPARK, DFLASH2)},
    **{f"{d.kind} lucebox": partial(write_lucebox, config=d) for d in (DRAFTER, DSPARK, DFLASH2)},
}


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


def change_value(rng: random.Random, content: bytearray, at: int) -> None:
    """A key after `at` has another value: a file in order whose numbers make no sense."""
    keys = list(re.finditer(rb"(?:qwen35(?:-dflash-draft)?|dflash|general|tokenizer)\.[a-z_.0-9]+", content))
    value = max(rng.choice(keys).end() + 4 if keys else at, 0)
    content[value : value + 4] = struct.pack("<f", rng.choice(FLOATS)) if rng.random() < 0.2 else _number(rng)


def change_type(rng: random.Random, content: bytearray, at: int) -> None:
    """A key has another type."""
    keys = list(re.finditer(rb"(?:qwen35(?:-dflash-draft)?|dflash|general|tokenizer)\.[a-z_.0-9]+", content))
    if keys:
        content[rng.choice(keys).end()] = rng.randrange(14)


def change_tensor(rng: random.Random, content: bytearray, at: int) -> None:
    """A tensor has other dimensions, another type or another place."""
    names = list(re.finditer(rb"[a-z_.0-9]+\.(?:weight|bias)|ssm_a|d2t", content))
    if names:
        at = names[rng.randrange(len(names))].end() + rng.choice((0, 4, 12, 20, 24, 28))
        content[at : at + 4] = _number(rng)


def _number(rng: random.Random) -> bytes:
    return rng.choice(VALUES).to_bytes(4, "little")


DAMAGES: tuple[Callable[[random.Random, bytearray, int], None], ...] = (
    *(overwrite_number, flip_bits, cut, remove, insert, repeat),
    *(change_value, change_value, change_type, change_tensor, change_tensor),
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
    vocabulary = find_vocabulary(file)
    if vocabulary is not None:
        tokenizer = Tokenizer(vocabulary)
        tokenizer.decode(tokenizer.encode('ab!"<|end|>'))
    read = read_target_config if file.architecture == "qwen35" else read_drafter_config
    read(file)
    plan_requantisation(file, "q4_k_m")
    assert all(tensor.data.nbytes == tensor.n_bytes for tensor in file.tensors.values())


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """More memory than the bound raises MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    n_pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (n_pages * resource.getpagesize() + MOST_MEMORY, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("write", FILES.values(), ids=FILES.keys())
def test_mutants(tmp_path: Path, write: Callable[[Path], Path], bounded_memory: None) -> None:
    """No mutant raises another exception, hangs, takes memory it claims, or makes a wrong claim about its tensors."""
    whole = write(tmp_path / "whole.gguf").read_bytes()
    n_header_bytes = max(match.end() for match in re.finditer(rb"\.weight|\.bias", whole)) + 32
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
