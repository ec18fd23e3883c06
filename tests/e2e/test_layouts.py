"""Other layouts of the same weights give the same tokens: shards, an output head of its own, a mixture of types."""

from __future__ import annotations

from pathlib import Path

import pytest
from reference.model_files import write_shards, write_with_own_head

from pyggml_spec import Engine, ModelFileError, assets

pytestmark = pytest.mark.native

PROMPT = "def area(width, height):\n"


def tokens_of(target: Path, drafter: Path | None = None, spec: str = "auto") -> list[int]:
    """64 greedy tokens."""
    with Engine.load(target, drafter, n_ctx=256, n_threads=1) as engine:
        return engine.generate(PROMPT, max_tokens=64, ignore_eos=True, spec=spec).tokens


@pytest.fixture(scope="module")
def wanted() -> list[int]:
    """What the one file says."""
    return tokens_of(assets.embedded_target_path())


def test_shards_load_as_one_model(tmp_path: Path, wanted: list[int]) -> None:
    """Any shard's name opens all of them; a missing one is named."""
    shards = write_shards(assets.embedded_target_path(), tmp_path / "minnow.gguf", n_tensors=60)

    assert len(shards) == 4
    assert tokens_of(shards[0], assets.embedded_drafter_path()) == wanted
    assert tokens_of(shards[2]) == wanted
    shards[1].unlink()
    with pytest.raises(ModelFileError, match=r"minnow-00002-of-00004\.gguf' .* is missing"):
        tokens_of(shards[0])


def test_an_own_output_head_is_used(tmp_path: Path, wanted: list[int]) -> None:
    """Target and drafter both predict with `output.weight`."""
    path = write_with_own_head(assets.embedded_target_path(), tmp_path / "untied.gguf")

    assert tokens_of(path) == wanted
    assert tokens_of(path, assets.embedded_drafter_path(), "chain") == wanted


def test_a_mixture_of_types_drafts_too() -> None:
    """q4_k_m: stacks split by type; tokens with and without drafts part only where kernels differ by width."""
    path = Path(__file__).parents[1] / "data" / "minnow-q4_k_m.gguf"
    plain, drafted = tokens_of(path), tokens_of(path, assets.embedded_drafter_path(), "chain")

    assert plain[:8] == drafted[:8]
