"""Checkpoints whose JSON or headers make no sense, from a seed: planned, or refused with one sentence."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from convert_samples import copy_drafter, write_tiny_checkpoint

from pyggml_spec.convert import plan_conversion
from pyggml_spec.errors import ModelFileError, OptionError

N_MUTANTS = 150
VALUES = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    1e308,
    0.5,
    "",
    "x",
    "linear_attention",
    [],
    [0],
    ["a"],
    {},
    {"a": 1},
)


def change_node(rng: random.Random, document: Any) -> None:
    """One value somewhere in the document becomes another, is gone, or occurs elsewhere."""
    node = document
    while True:
        places = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not places:
            return
        place = rng.choice(places)
        inner = node[place]
        if isinstance(inner, (dict, list)) and inner and rng.random() < 0.7:
            node = inner
            continue
        if rng.random() < 0.2:
            del node[place]
        else:
            node[place] = copy.deepcopy(rng.choice(VALUES))
        return


def mutate_json(rng: random.Random, whole: bytes) -> bytes:
    """The document with one to three damages."""
    document = json.loads(whole)
    for _ in range(rng.choice((1, 1, 2, 3))):
        change_node(rng, document)
    return json.dumps(document).encode()


def mutate_weights(rng: random.Random, whole: bytes) -> bytes:
    """A safetensors file whose header is another document of the same length, or whose bytes are."""
    n_header = int.from_bytes(whole[:8], "little")
    if rng.random() < 0.5:
        header = mutate_json(rng, whole[8 : 8 + n_header])
        return len(header).to_bytes(8, "little") + header + whole[8 + n_header :]
    content = bytearray(whole)
    for _ in range(rng.randint(1, 3)):
        content[rng.randrange(8 + n_header)] = rng.randrange(256)
    return bytes(content[: rng.choice((len(content), len(content), rng.randrange(len(content))))])


def try_mutants(directory: Path, name: str, mutate: Any, **options: Any) -> int:
    """How many mutants of a file could be planned; anything but a plan or a refusal fails."""
    path, n_planned = directory / name, 0
    whole = path.read_bytes()
    for seed in range(N_MUTANTS):
        path.write_bytes(mutate(random.Random(seed), whole))
        try:
            plan_conversion(directory, **options).check()
            n_planned += 1
        except (ModelFileError, OptionError) as error:
            assert "\n" not in str(error), f"seed {seed}: {error}"
        except Exception as error:
            raise AssertionError(f"seed {seed} raised {error!r}") from error
    return n_planned


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_settings_of_targets(tmp_path: Path, name: str) -> None:
    """Values of other types, missing and misplaced ones."""
    assert 0 < try_mutants(write_tiny_checkpoint(tmp_path), name, mutate_json) < N_MUTANTS


@pytest.mark.parametrize("n_shards", [1, 2])
def test_weights_of_targets(tmp_path: Path, n_shards: int) -> None:
    """Headers that claim what the file does not hold, and indices of other files."""
    directory = write_tiny_checkpoint(tmp_path, n_shards=n_shards)
    if n_shards == 1:
        assert try_mutants(directory, "model.safetensors", mutate_weights) < N_MUTANTS
    else:
        assert try_mutants(directory, "model.safetensors.index.json", mutate_json) < N_MUTANTS


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2"])
def test_settings_of_drafters(tmp_path: Path, kind: str) -> None:
    """Values of other types, missing and misplaced ones."""
    assert 0 < try_mutants(copy_drafter(kind, tmp_path), "config.json", mutate_json, dialect="lucebox") < N_MUTANTS
