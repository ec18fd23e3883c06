"""Qwen3.5 checkpoints to `qwen35` files: the same tensors whatever the layout, and sentences for the rest."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from convert_samples import change_config, write_tiny_checkpoint, write_tiny_target
from reference.checkpoints import read_keys, write_checkpoint, write_safetensors
from reference.compare import differences

from pyggml_spec.convert import plan_conversion
from pyggml_spec.errors import ModelFileError, OptionError
from pyggml_spec.gguf_io import open_gguf, read_target_config


def convert(directory: Path, outtype: str = "f32") -> Path:
    """The converted file, beside the checkpoint."""
    path = directory.with_name("converted.gguf")
    plan_conversion(directory, outtype=outtype).write(path)
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path)


@pytest.mark.parametrize("n_shards", [1, 3])
def test_every_tensor_and_key(tmp_path: Path, n_shards: int) -> None:
    """The file a checkpoint was derived from comes back: heads in tiled order, norms around one, decays negative."""
    directory = write_tiny_checkpoint(tmp_path, n_shards=n_shards)

    assert differences(convert(directory), tmp_path / "tiny-source.gguf") == set()


def test_another_reader(tmp_path: Path, tiny: Path) -> None:
    """The `gguf` package reads the same keys and values out of the file."""
    ours, theirs = gguf.GGUFReader(convert(tiny)), gguf.GGUFReader(tmp_path / "tiny-source.gguf")
    tensors = [{t.name: (t.tensor_type, t.data.tolist()) for t in reader.tensors} for reader in (ours, theirs)]

    assert read_keys(tmp_path / "converted.gguf") == read_keys(tmp_path / "tiny-source.gguf")
    assert tensors[0] == tensors[1]


def test_the_result_depends_on_the_head_order(tmp_path: Path, tiny: Path) -> None:
    """The comparison is no tautology: with value heads left as they are, every tensor of a recurrent layer differs."""
    change_config(tiny, linear_num_key_heads=1)
    plan = plan_conversion(tiny, outtype="f32")
    source = {t.name: t for t in open_gguf(tmp_path / "tiny-source.gguf").tensors.values()}
    moved = ("attn_gate.weight", "ssm_out.weight", "ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias")
    tensors = [tensor for tensor in plan.file.tensors if tensor.name.endswith(moved)]
    equal = [t.name for t in tensors if b"".join(p.tobytes() for p in t.pieces()) == source[t.name].data.tobytes()]

    assert len(tensors) == 18
    assert equal == []


def test_multimodal_layout(tmp_path: Path, tiny: Path) -> None:
    """Nested settings, longer names, a vision tower and a block that predicts several tokens: the same text model."""
    config = json.loads((tiny / "config.json").read_text())
    del config["architectures"]
    tensors = {f"model.language_{name}": values for name, values in _tensors_of(tiny).items()}
    extra = {name: np.zeros((4, 8), np.float32) for name in ("model.visual.blocks.0.norm.weight", "mtp.fc.weight")}
    tied = {"lm_head.weight": np.zeros((40, 16), np.float32)}
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config}
    write_checkpoint(tiny, config, tensors | extra | tied)
    plan = plan_conversion(tiny, outtype="f32")

    assert differences(convert(tiny), tmp_path / "tiny-source.gguf") == set()
    assert plan.notes == (
        "left out: the block that predicts several tokens (1 tensors)",
        "left out: the vision tower (1 tensors)",
    )


def test_own_output_head(tiny: Path) -> None:
    """Without tied embeddings the head is a tensor of its own."""
    head = np.full((40, 16), 0.5, np.float32)
    write_safetensors(tiny / "model.safetensors", _tensors_of(tiny) | {"lm_head.weight": head})
    change_config(tiny, tie_word_embeddings=False)
    with open_gguf(convert(tiny)) as file:
        assert file.tensors["output.weight"].data.tobytes() == head.tobytes()
        assert not read_target_config(file).tied_embeddings


def test_interval_instead_of_a_list(tmp_path: Path, tiny: Path) -> None:
    """Older settings count the layers between two with full attention."""
    change_config(tiny, layer_types=None, full_attention_interval=4)

    assert differences(convert(tiny), tmp_path / "tiny-source.gguf") == set()


def _tensors_of(directory: Path) -> dict[str, np.ndarray]:
    """The tensors of a single-file checkpoint without bf16: decays are widened, which changes none."""
    path = directory / "model.safetensors"
    raw = path.read_bytes()
    n_header = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n_header])
    kinds = {"F32": np.float32, "BF16": np.uint16}
    return {
        name: np.frombuffer(raw[8 + n_header :][slice(*entry["data_offsets"])], kinds[entry["dtype"]]).reshape(
            entry["shape"]
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3_5MoeForCausalLM"]}, r"mixture-of-experts models are not supported yet"),
        ({"architectures": ["LlamaForCausalLM"]}, r"holds a LlamaForCausalLM; supported are Qwen3_5ForCausalLM"),
        ({"architectures": None}, r"'architectures' of '.*' is missing, but must name the model's class"),
        ({"hidden_size": "16"}, r"'hidden_size' of '.*' is '16', but must be an integer"),
        ({"rms_norm_eps": None}, r"'rms_norm_eps' of '.*' is missing, but must be a number"),
        ({"layer_types": ["full_attention"]}, r"'layer_types' .* must have 4 entries"),
        ({"linear_value_head_dim": 4}, r"must equal linear_key_head_dim = 8"),
        ({"linear_num_value_heads": 5}, r"must be a multiple of linear_num_key_heads = 2"),
        ({"hidden_act": "gelu"}, r"only the activation 'silu'"),
        ({"attention_bias": True}, r"biases are not supported"),
        ({"attn_output_gate": False}, r"without an output gate"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised checkpoints are not supported"),
        ({"rope_parameters__rope_type": "yarn"}, r"targets with rope scaling are not supported"),
        ({"rope_parameters__partial_rotary_factor": None}, r"must say which share of a head rotates"),
        ({"rope_parameters__mrope_section": [1]}, r"three sections"),
        ({"rope_parameters__rope_theta": None}, r"'rope_theta' .* is missing"),
        ({"vocab_size": 30}, r"has id \d+, but the model's tables have 30 rows"),
        ({"intermediate_size": 32}, r"the keys imply ne=\[16, 32\]"),
        ({"num_hidden_layers": 5, "layer_types": None, "full_attention_interval": 4}, r"has no tensor 'blk.4"),
    ],
)
def test_refused(tiny: Path, changes: dict[str, Any], message: str) -> None:
    """Every setting that does not fit is named with its value and the rule, before anything is written."""
    change_config(tiny, **changes)
    with pytest.raises(ModelFileError, match=message):
        plan_conversion(tiny).check()


def test_settings_that_the_reader_refuses(tiny: Path) -> None:
    """The sentence names config.json, which can be mended; neither the file not yet written nor another converter."""
    path = change_config(tiny, head_dim=2048) / "config.json"
    with pytest.raises(ModelFileError) as caught:
        plan_conversion(tiny).check()

    assert str(caught.value) == (
        f"'{path}' does not fit the tensors beside it: key 'qwen35.attention.key_length' is 2048, "
        "but must be an integer in 1 to 1024; correct it or download it again"
    )


def test_unknown_tensor(tiny: Path) -> None:
    """A tensor nobody knows stops the conversion: without it the model would be another one."""
    write_safetensors(tiny / "model.safetensors", _tensors_of(tiny) | {"model.extra.weight": np.zeros(2, np.float32)})
    with pytest.raises(ModelFileError, match=r"has a tensor 'model.extra.weight' that Qwen3.5 text models do not have"):
        plan_conversion(tiny)


def test_unknown_type(tiny: Path) -> None:
    """Output types are listed."""
    with pytest.raises(OptionError, match=r"outtype is 'q2_k': it must be one of f32, f16, bf16, q8_0"):
        plan_conversion(tiny, outtype="q2_k")


def test_damaged_files(tiny: Path) -> None:
    """Missing, truncated and garbled files give one sentence each."""
    weights = tiny / "model.safetensors"
    whole = weights.read_bytes()
    for content in (b"", whole[:7], whole[:200], whole[:-1], b"\xff" * 64, whole.replace(b'"F32"', b'"F99"')):
        weights.write_bytes(content)
        with pytest.raises(ModelFileError, match=r"model.safetensors' (cannot be read|has type F99)") as failure:
            plan_conversion(tiny)
        assert "\n" not in str(failure.value)
    weights.unlink()
    with pytest.raises(ModelFileError, match=r"has 0 safetensors files"):
        plan_conversion(tiny)
    (tiny / "config.json").write_text("[1, 2")
    with pytest.raises(ModelFileError, match=r"cannot be read as JSON"):
        plan_conversion(tiny)
    (tiny / "config.json").unlink()
    with pytest.raises(ModelFileError, match=r"does not exist"):
        plan_conversion(tiny)


def test_missing_shard(tmp_path: Path) -> None:
    """A shard that the index names has to be there, and inside the directory."""
    directory = write_tiny_checkpoint(tmp_path, n_shards=2)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"model-00002-of-00002.safetensors' named by .* is missing"):
        plan_conversion(directory)
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../tiny-source.gguf"}}')
    with pytest.raises(ModelFileError, match=r"is missing"):
        plan_conversion(directory)


def test_empty_checkpoint(tiny: Path) -> None:
    """No tensors, no file."""
    write_safetensors(tiny / "model.safetensors", {})
    with pytest.raises(ModelFileError, match=r"holds no tensors"):
        plan_conversion(tiny)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_nothing_left_behind(tiny: Path, failure: BaseException) -> None:
    """An interrupted or failed run leaves neither the file nor a part of it, and an older file as it was."""
    path = tiny.with_name("out.gguf")
    path.write_bytes(b"older")

    def fail_half_way(n_done: int, n_total: int) -> None:
        if n_done > n_total // 2:
            raise failure

    before = sorted(tiny.parent.iterdir())
    with pytest.raises(type(failure)):
        plan_conversion(tiny, outtype="f32").write(path, fail_half_way)

    assert sorted(tiny.parent.iterdir()) == before
    assert path.read_bytes() == b"older"


def test_progress_counts_every_byte(tiny: Path) -> None:
    """Progress ends at the total."""
    plan, seen = plan_conversion(tiny, outtype="f32"), []
    plan.write(tiny.with_name("out.gguf"), lambda n_done, n_total: seen.append((n_done, n_total)))

    assert seen[-1] == (plan.file.n_bytes, plan.file.n_bytes)
    assert seen == sorted(seen)


def test_no_room(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that cannot hold the file is noticed at once."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(ModelFileError, match=r"takes [\d,]+ bytes but its disk has 10 left"):
        plan_conversion(tiny, outtype="f32").write(tiny.with_name("out.gguf"))


def test_source_sample_is_random(tmp_path: Path) -> None:
    """The tiny target has distinct values everywhere, so that a swap of any two rows shows."""
    tensors = open_gguf(write_tiny_target(tmp_path / "a.gguf")).tensors.values()

    assert all(np.unique(t.data.view(np.float32)).size > 0.9 * t.n_bytes / 4 for t in tensors)


def test_failing_200_times_leaks_nothing(tiny: Path) -> None:
    """Refused and interrupted conversions leave no open file and no mapping behind."""

    def interrupt(n_done: int, n_total: int) -> None:
        raise KeyboardInterrupt

    def fail() -> None:
        change_config(tiny, intermediate_size=32)
        with pytest.raises(ModelFileError):
            plan_conversion(tiny, outtype="f32").check()
        change_config(tiny, intermediate_size=24)
        with pytest.raises(KeyboardInterrupt):
            plan_conversion(tiny, outtype="f32").write(tiny.with_name("out.gguf"), interrupt)

    fail()
    gc.collect()
    before = _held()
    for _ in range(100):
        fail()
    gc.collect()

    assert _held() <= before


def _held() -> int:
    """Open files and mapped model files of this process."""
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if ".safetensors" in line]
    return len(list(Path("/proc/self/fd").iterdir())) + len(mapped)
