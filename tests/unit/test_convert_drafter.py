"""Drafter checkpoints to GGUF in both dialects, whatever the spelling of their settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from convert_samples import DATA, TARGET_FILE, add_tensors, change_config, copy_drafter
from reference.checkpoints import read_keys, write_checkpoint, write_tokenizer

from pyggml_spec.convert import Conversion, plan_conversion
from pyggml_spec.errors import ModelFileError, OptionError
from pyggml_spec.gguf_io import GgufFile, canonical_tensors, open_gguf, read_drafter_config
from pyggml_spec.records import DrafterConfig, RopeScaling

KINDS = ("dflash", "dspark", "dflash2")


def plan(directory: Path, **options: Any) -> Conversion:
    """A plan for f32 in llama.cpp's dialect with the shared target, or as told; it is checked."""
    conversion = plan_conversion(directory, **({"outtype": "f32", "target_path": TARGET_FILE} | options))
    conversion.check()
    return conversion


def config_of(conversion: Conversion, path: Path) -> DrafterConfig:
    """What the reader makes of the written file."""
    conversion.write(path)
    with open_gguf(path) as file:
        return read_drafter_config(file)


@pytest.fixture(scope="module")
def target_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's directory without its weights: config.json and tokenizer are enough."""
    directory = tmp_path_factory.mktemp("target")
    config = {"architectures": ["Qwen3_5ForCausalLM"], "rope_parameters": {"mrope_section": [3, 3, 2]}}
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory, read_keys(TARGET_FILE))
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_target_as_directory_or_file(kind: str, target_directory: Path) -> None:
    """The target's GGUF file serves as well as its directory: every key is the same."""
    from_file = plan(DATA / f"minnow-{kind}").file.keys
    from_directory = plan(DATA / f"minnow-{kind}", target_path=target_directory).file.keys

    assert dict(from_file) == dict(from_directory)


@pytest.mark.parametrize("kind", KINDS)
def test_dialects_hold_the_same(kind: str, tmp_path: Path) -> None:
    """Both dialects read back as the same configuration and the same tensors."""
    files = {}
    for dialect in ("llama.cpp", "lucebox"):
        path = tmp_path / f"{dialect}.gguf"
        plan(DATA / f"minnow-{kind}", dialect=dialect).write(path)
        files[dialect] = open_gguf(path)
    ours, theirs = (_comparable(file) for file in files.values())

    assert theirs == ours
    assert files["lucebox"].architecture == "qwen35-dflash-draft"
    assert not {"fc.weight", "markov_w1.weight", "selector_hidden.weight"} & files["lucebox"].tensors.keys()


def _comparable(file: GgufFile) -> tuple[dict[str, Any], dict[str, bytes]]:
    config = {k: v for k, v in vars(read_drafter_config(file)).items() if k != "dialect"}
    tensors = {name: tensor.data.tobytes() for name, tensor in canonical_tensors(file).items()}
    return config, tensors


def test_lucebox_needs_no_target() -> None:
    """Files without a vocabulary can be made without the target."""
    keys = plan(DATA / "minnow-dflash", dialect="lucebox", target_path=None).file.keys

    assert not [key for key in keys if key.startswith("tokenizer.")]


def test_llama_cpp_needs_a_target() -> None:
    """The vocabulary has to come from somewhere."""
    with pytest.raises(OptionError, match=r"give the target's directory or GGUF file with target_path"):
        plan(DATA / "minnow-dflash", target_path=None)


@pytest.mark.parametrize("dialect", ["llama.cpp", "lucebox"])
def test_mask_token_is_the_drafters_own(dialect: str, tmp_path: Path) -> None:
    """An id the target calls something else entirely is what the file says and the reader returns."""
    directory = copy_drafter("dflash", tmp_path, dflash_config__mask_token_id=17)

    assert config_of(plan(directory, dialect=dialect), tmp_path / "out.gguf").mask_token_id == 17


SAME = {
    "block size in the section": {"block_size": None, "dflash_config__block_size": 8},
    "mask and layers at the top": {
        "dflash_config": None,
        "mask_token_id": 8187,
        "target_layer_ids": [1, 5, 9, 13],
    },
    "layers as inputs": {"dflash_config__target_layer_ids": None, "aux_hidden_state_layer_ids": [2, 6, 10, 14]},
    "new rope section": {
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    },
    "rope by kind of layer": {
        "rope_theta": None,
        "rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}},
    },
    "no head size": {"head_dim": None},
    "no layer types": {"layer_types": None},
    "unused window": {"sliding_window": 64, "use_sliding_window": False},
}


@pytest.mark.parametrize("changes", SAME.values(), ids=SAME.keys())
def test_spellings(changes: dict[str, Any], tmp_path: Path) -> None:
    """Every spelling of the same settings gives the same keys."""
    directory = copy_drafter("dflash", tmp_path, **changes)

    assert dict(plan(directory).file.keys) == dict(plan(DATA / "minnow-dflash").file.keys)


def test_nested_speculator_settings(tmp_path: Path) -> None:
    """A release whose transformer is described in a section of its own; it does not sample from the anchor."""
    config = json.loads((DATA / "minnow-dspark" / "config.json").read_text())
    outer = {key: config.pop(key) for key in ("mask_token_id", "block_size", "markov_rank")}
    del config["target_layer_ids"], config["sample_from_anchor"]
    changes = dict.fromkeys(json.loads((DATA / "minnow-dspark" / "config.json").read_text()))
    directory = copy_drafter("dspark", tmp_path, **changes)
    change_config(
        directory,
        architectures=["DSparkSpeculator"],
        transformer_layer_config=config,
        aux_hidden_state_layer_ids=[2, 6, 10, 14],
        **outer,
    )
    expected = dict(plan(DATA / "minnow-dspark").file.keys)
    found = dict(plan(directory).file.keys)

    assert {key for key in expected if expected[key] != found[key]} == {"dflash.sample_from_anchor"}


YARN = {"factor": 4.0, "original_max_position_embeddings": 2048, "beta_fast": 16, "attention_factor": 1.5}


@pytest.mark.parametrize("dialect", ["llama.cpp", "lucebox"])
@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_yarn_in_both_spellings(spelling: str, dialect: str, tmp_path: Path) -> None:
    """Rope scaling is kept whether its kind is called rope_type or type."""
    directory = copy_drafter("dflash", tmp_path, rope_scaling={spelling: "yarn", **YARN})
    scaling = config_of(plan(directory, dialect=dialect), tmp_path / "out.gguf").rope_scaling

    assert isinstance(scaling, RopeScaling)
    assert (scaling.factor, scaling.n_ctx_original, scaling.beta_fast, scaling.beta_slow) == (4.0, 2048, 16.0, 1.0)
    assert scaling.attention_factor == pytest.approx(1.5 / (1 + 0.1 * np.log(4.0)))


@pytest.mark.parametrize("dialect", ["llama.cpp", "lucebox"])
def test_options_of_drafters(dialect: str, tmp_path: Path) -> None:
    """Windows per layer, causality, scales and a partial rotation come back as they went in."""
    directory = copy_drafter(
        "dflash2",
        tmp_path,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        use_sliding_window=True,
        sliding_window=48,
        is_causal=True,
        dflash_config__output_multiplier=0.25,
        dflash_config__final_logit_softcapping=30,
        input_embedding_scale=16,
        rope_parameters__partial_rotary_factor=0.5,
    )
    config = config_of(plan(directory, dialect=dialect), tmp_path / "out.gguf")

    assert (config.sliding_window, config.sliding_layers) == (48, (True, False, True))
    assert config.causal
    assert (config.logit_scale, config.final_logit_softcapping, config.embedding_scale) == (0.25, 30, 16)
    assert config.rope_dims == 32


def test_window_for_every_layer(tmp_path: Path) -> None:
    """DFlash's own switch makes every layer slide."""
    directory = copy_drafter("dflash", tmp_path, dflash_config__use_swa=True, dflash_config__swa_window_size=32)

    assert config_of(plan(directory), tmp_path / "out.gguf").sliding_layers == (True, True, True)


def test_reduced_vocabulary(tmp_path: Path) -> None:
    """A draft vocabulary of 64 rows: offsets become the target's ids, the table back to draft ids is not needed."""
    ids = np.sort(np.random.default_rng(0).choice(8192, 64, replace=False))
    head = np.ones((64, 256), np.float32)
    directory = copy_drafter("dflash", tmp_path)
    add_tensors(directory, d2t=ids - np.arange(64), t2d=np.zeros(8192, np.int64), lm_head__weight=head)
    path = tmp_path / "out.gguf"
    config = config_of(plan(directory), path)

    assert (config.n_vocab, config.n_vocab_target, config.has_reduced_vocabulary) == (64, 8192, True)
    with open_gguf(path) as file:
        assert file.tensors["d2t"].data.view(np.int64).tolist() == ids.tolist()


def test_offsets_that_leave_the_vocabulary(tmp_path: Path) -> None:
    """A table that points outside the target's vocabulary is refused before anything is written."""
    directory = copy_drafter("dflash", tmp_path)
    add_tensors(directory, d2t=np.full(64, 8190), lm_head__weight=np.ones((64, 256), np.float32))
    with pytest.raises(ModelFileError, match=r"must be different ids below 8192"):
        plan(directory)


@pytest.fixture
def own_tables(tmp_path: Path) -> tuple[Path, Path]:
    """(drafter, target) directories: the drafter repeats the target's embeddings and has a head of its own."""
    embeddings = np.arange(8192 * 256, dtype=np.uint16).reshape(8192, 256) >> 2  # finite as bf16
    drafter = copy_drafter("dflash", tmp_path)
    add_tensors(drafter, embed_tokens__weight=embeddings, lm_head__weight=embeddings[::-1])
    config = {"hidden_size": 256, "num_hidden_layers": 16, "tie_word_embeddings": True}
    target = write_checkpoint(tmp_path / "target", config, {"model.embed_tokens.weight": embeddings})
    write_tokenizer(target, read_keys(TARGET_FILE))
    return drafter, target


def test_tables_that_repeat_the_targets(own_tables: tuple[Path, Path]) -> None:
    """Embeddings equal to the target's are left out, a head of its own is kept."""
    drafter, target = own_tables
    conversion = plan(drafter, target_path=target)
    names = {tensor.name for tensor in conversion.file.tensors}

    assert "output.weight" in names and "token_embd.weight" not in names
    assert conversion.notes == ("left out: embed_tokens.weight, equal to the target's",)


def test_tables_without_a_comparison(own_tables: tuple[Path, Path], tmp_path: Path) -> None:
    """Where the target's tables are unknown, the drafter keeps its own."""
    config = config_of(plan(own_tables[0]), tmp_path / "out.gguf")

    assert config.has_own_embeddings and config.has_own_head


def test_last_layer_is_noted(tmp_path: Path) -> None:
    """llama.cpp reads inputs of layers, so the last output has no name there."""
    directory = copy_drafter("dflash", tmp_path, dflash_config__target_layer_ids=[1, 5, 9, 15])

    assert "reads the output of the target's last layer (15)" in plan(directory).notes[0]
    assert plan(directory, dialect="lucebox").notes == ()


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("dflash", {"block_size": None}, r"'dflash_config.block_size' or 'block_size' of '.*' is missing"),
        ("dflash", {"dflash_config__mask_token_id": None}, r"'mask_token_id' of '.*' is missing"),
        ("dflash", {"dflash_config__mask_token_id": 8192}, r"is 8192, but must be an integer in 0 to 8191"),
        ("dflash", {"dflash_config__target_layer_ids": None}, r"must name the target layers it reads"),
        ("dflash", {"dflash_config__target_layer_ids": [1, 5]}, r"features of 1024 values .* 2 layers .* give 512"),
        ("dflash", {"dflash_config__target_layer_ids": [1, 5, 9, 16]}, r"\[1, 5, 9, 16\], the target has 16"),
        ("dflash", {"dflash_config__target_layer_ids": [1, 5, 5, 9]}, r"must name every layer once"),
        ("dflash", {"rope_theta": None}, r"'rope_theta' .* is missing"),
        ("dflash", {"rope_scaling": {"type": "longrope", "factor": 2}}, r"only 'yarn' and 'default'"),
        ("dflash", {"rope_scaling": {"type": "yarn", "factor": 2}}, r"'original_max_position_.* is missing"),
        (
            "dflash",
            {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": None},
            r"'sliding_window' .* is missing",
        ),
        ("dflash", {"rope_is_neox_style": False}, r"interleaved rotary embeddings"),
        ("dflash", {"dflash_config__attention_value_scale": 0.5}, r"scaled values are not supported"),
        ("dflash", {"architectures": ["Gemma4DSparkModel"]}, r"holds a Gemma4DSparkModel .*; supported are"),
        ("dspark", {"markov_head_type": "gated"}, r"only 'vanilla' Markov heads"),
        ("dspark", {"confidence_head_with_markov": False}, r"must read the Markov embedding"),
        ("dflash2", {"dflash_config__conv_group_size": 0}, r"is 0, but must be an integer in 1 to"),
        ("dflash2", {"dflash_config__conv_group_size": 24}, r"must divide embedding_length = 256"),
        ("dflash2", {"dflash_config__selector_rank": None}, r"'dflash_config.selector_rank' .* is missing"),
        ("dflash2", {"dflash_config__selector_rank": 32}, r"the keys imply ne=\[32, 8192\]"),
        ("dflash2", {"vocab_size": 8000}, r"is 8187, but must be an integer in 0 to 7999"),
    ],
)
def test_refused(kind: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A missing key is named in all its spellings, a wrong one with its value and rule."""
    with pytest.raises(ModelFileError, match=message):
        plan(copy_drafter(kind, tmp_path, **changes))


def test_missing_confidence_head(tmp_path: Path) -> None:
    """Settings that promise a head the checkpoint lacks are refused."""
    directory = copy_drafter("dflash", tmp_path, enable_confidence_head=True)
    with pytest.raises(ModelFileError, match=r"no tensor 'confidence_head.proj.weight'"):
        plan(directory)


def test_unknown_tensor(tmp_path: Path) -> None:
    """A tensor nobody knows stops the conversion."""
    directory = copy_drafter("dflash", tmp_path)
    add_tensors(directory, layers__0__self_attn__q_proj__bias=np.zeros(4, np.float32))
    with pytest.raises(ModelFileError, match=r"'layers.0.self_attn.q_proj.bias' that DFlash"):
        plan(directory)


def test_pickled_mask_embedding(tmp_path: Path) -> None:
    """A mask embedding in a file of its own would be lost silently."""
    directory = copy_drafter("dflash", tmp_path)
    (directory / "mask_embedding.pt").touch()
    with pytest.raises(ModelFileError, match=r"replaces the mask token's embedding"):
        plan(directory)


def test_drafter_as_its_own_target() -> None:
    """A drafter's file is no target."""
    with pytest.raises(ModelFileError, match=r"is a drafter; give the drafter's target"):
        plan(DATA / "minnow-dflash", target_path=DATA / "minnow-dspark-q8_0.gguf")
