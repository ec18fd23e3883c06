"""Checkpoints converted here and by llama.cpp: the same bytes.

The reference files were made by llama.cpp's own converter from the same checkpoints, and by its quantiser.
Allowed differences: the order of keys and of tensors in the file, and nothing else.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from reference.checkpoints import to_bf16, write_safetensors, write_target_checkpoint
from reference.compare import differences

from pyggml_spec import assets
from pyggml_spec.cli import main
from pyggml_spec.convert import plan_conversion
from pyggml_spec.errors import ModelFileError, OptionError
from pyggml_spec.gguf_io import open_gguf

from .conftest import DATA, DRAFTERS

pytestmark = pytest.mark.native

TARGET_FILE = DATA / "minnow-f16.gguf"


def invoke(*arguments: str | Path) -> Result:
    """Run the program in this process; anything but a clean exit is a failure of the test."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture(scope="module")
def target_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's checkpoint, in three shards."""
    return write_target_checkpoint(TARGET_FILE, tmp_path_factory.mktemp("hf") / "minnow", n_shards=3)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafters(kind: str, tmp_path: Path, target_directory: Path) -> None:
    """Every drafter equals llama.cpp's conversion of the same checkpoint."""
    path = tmp_path / "out.gguf"
    done = invoke("convert", DATA / f"minnow-{kind}", "--target-model-dir", target_directory, "-o", path, "-t", 1)

    assert done.exit_code == 0, done.output
    assert differences(path, DRAFTERS[kind]) == set()


@pytest.mark.parametrize(("outtype", "reference"), [("f16", TARGET_FILE), ("q8_0", assets.embedded_target_path())])
def test_target(outtype: str, reference: Path, tmp_path: Path, target_directory: Path) -> None:
    """The target equals llama.cpp's conversion of the same checkpoint."""
    path = tmp_path / "out.gguf"
    plan_conversion(target_directory, outtype=outtype, n_threads=2).write(path)

    assert differences(path, reference) == set()


def test_default_name_and_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without -o the file is called after the directory and the type; --dry-run only lists what it would hold."""
    monkeypatch.chdir(tmp_path)
    arguments = ("convert", DATA / "minnow-dflash", "--target-model-dir", TARGET_FILE, "-t", 1)
    listed = invoke(*arguments, "--dry-run")

    assert listed.exit_code == 0
    assert "would write minnow-dflash-q8_0.gguf: drafter (dflash), 2,623,872 parameters, 36 tensors" in listed.stdout
    assert "fc.weight                 Q8_0  1024 x 256" in listed.stdout
    assert list(tmp_path.iterdir()) == []
    assert invoke(*arguments).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["minnow-dflash-q8_0.gguf"]


def test_an_existing_file_is_replaced_only_when_told_so(tmp_path: Path) -> None:
    """Nobody loses a file over a name; a dry run touches none and may use any."""
    path = tmp_path / "mine.gguf"
    path.write_text("precious")
    arguments = ("convert", DATA / "minnow-dflash", "--target-model-dir", TARGET_FILE, "-t", 1, "-o", path)
    refused, listed = invoke(*arguments), invoke(*arguments, "--dry-run")

    assert (refused.exit_code, refused.stderr.count("\n"), listed.exit_code) == (1, 1, 0)
    assert "exists already: give --force" in refused.stderr
    assert "without --dry-run this would be refused" in listed.stderr
    assert path.read_text() == "precious"
    assert invoke(*arguments, "--force").exit_code == 0
    assert path.read_bytes()[:4] == b"GGUF"


def test_inputs_are_never_replaced(tmp_path: Path) -> None:
    """Told so or not, and by whatever name: a file of the checkpoint, one beside it, the target's file."""
    checkpoint, target = tmp_path / "CK", tmp_path / "target.gguf"
    shutil.copytree(DATA / "minnow-dflash", checkpoint)
    target.symlink_to(TARGET_FILE)
    (checkpoint / "link.gguf").symlink_to(checkpoint / "model.safetensors")
    (tmp_path / "hard.gguf").hardlink_to(checkpoint / "config.json")
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    arguments = ("convert", checkpoint, "--target-model-dir", target, "-t", 1, "-o")
    for name in ("CK/config.json", "CK/model.safetensors", "CK/link.gguf", "hard.gguf", "target.gguf"):
        done = invoke(*arguments, tmp_path / name, "--force")
        listed = invoke(*arguments, tmp_path / name, "--force", "--dry-run")

        assert (done.exit_code, "is the input" in done.stderr) == (1, True), done.output
        assert (listed.exit_code, "this would be refused" in listed.stderr) == (0, True), listed.output
    with pytest.raises(OptionError, match="is the input"):
        plan_conversion(checkpoint, target_path=target).write(checkpoint / "config.json")
    assert before == {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    assert invoke(*arguments, checkpoint / "new.gguf").exit_code == 0
    assert invoke(*arguments, checkpoint / "new.gguf", "--force").exit_code == 0


@pytest.mark.parametrize("name", ["", "-"])
def test_what_is_no_name(name: str, tmp_path: Path) -> None:
    """Nothing is written under it."""
    done = invoke("convert", DATA / "minnow-dflash", "--target-model-dir", TARGET_FILE, "-o", name)

    assert (done.exit_code, "is no name of a file" in done.stderr) == (2, True)


def test_mistakes(tmp_path: Path) -> None:
    """Wrong usage exits with 2, a wrong checkpoint with 1 and one sentence."""
    (tmp_path / "config.json").write_text("{}")
    for arguments, code, text in (
        ((tmp_path / "none",), 1, "is no directory"),
        ((tmp_path, "--outtype", "q4_k_m"), 2, "is not one of 'f32', 'f16', 'bf16', 'q8_0'"),
        ((tmp_path,), 1, "'architectures' of"),
        ((DATA / "minnow-dflash",), 1, "with --target-model-dir"),
        ((DATA / "minnow-dflash", "--target-model-dir", tmp_path / "none"), 1, "does not exist"),
        ((DATA / "minnow-dflash", "--target-model-dir", TARGET_FILE, "-o", tmp_path), 1, "is a directory"),
    ):
        done = invoke("convert", *arguments)

        assert (done.exit_code, text in done.output) == (code, True), done.output


def test_settings_that_do_not_fit_the_tensors(tmp_path: Path) -> None:
    """It is config.json that is wrong, not a temporary file that nobody has heard of."""
    checkpoint = tmp_path / "CK"
    shutil.copytree(DATA / "minnow-dflash", checkpoint)
    settings = checkpoint / "config.json"
    settings.write_text(settings.read_text().replace('"hidden_size": 256', '"hidden_size": 128'))
    arguments = ("convert", checkpoint, "--target-model-dir", TARGET_FILE, "-o", tmp_path / "out.gguf")
    for flags in ((), ("--dry-run",)):
        done = invoke(*arguments, *flags)

        assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
        assert f"'{settings}' does not fit the tensors beside it: tensor 'fc.weight' has ne=[1024, 256]" in done.stderr
        assert ".part" not in done.stderr and "convert" not in done.stderr


@pytest.fixture
def small_drafter(tmp_path: Path) -> Path:
    """A copy of the DFlash drafter whose projection can be replaced."""
    directory = tmp_path / "minnow-dflash"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        (directory / name).write_bytes((DATA / "minnow-dflash" / name).read_bytes())
    return directory


@pytest.mark.parametrize(
    ("value", "outtype", "message"),
    [
        (np.nan, "q8_0", "infinite or not a number"),
        (np.inf, "bf16", "infinite or not a number"),
        (1e6, "f16", "is beyond f16's 65504"),
    ],
)
def test_values_that_cannot_be_stored(small_drafter: Path, value: float, outtype: str, message: str) -> None:
    """A weight that the type cannot hold stops the conversion, with the tensor's name, and leaves no file."""
    fc = np.zeros((256, 1024), np.float32)
    fc[200, 7] = value
    write_safetensors(small_drafter / "more.safetensors", {"fc.weight": to_bf16(fc) if value == 1e6 else fc})
    _replace_projection(small_drafter)
    path = small_drafter.with_name("out.gguf")
    plan = plan_conversion(small_drafter, outtype=outtype, target_path=TARGET_FILE)
    with pytest.raises(ModelFileError, match=rf"tensor 'fc.weight' cannot become {outtype}: a weight .*{message}"):
        plan.write(path)

    assert not path.exists() and not list(path.parent.glob(".*.part"))


def _replace_projection(directory: Path) -> None:
    """Let the second file's fc.weight count: the first one's gets a name that is never read."""
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"fc.weight"', b'"fcabc.t2d"'))
    index = '{"weight_map": {"a": "model.safetensors", "b": "more.safetensors"}}'
    (directory / "model.safetensors.index.json").write_text(index)


def test_bf16_is_exact(tmp_path: Path) -> None:
    """A bf16 checkpoint keeps every bit of its matrices as bf16."""
    path = tmp_path / "out.gguf"
    plan_conversion(DATA / "minnow-dflash", outtype="bf16", target_path=TARGET_FILE).write(path)
    raw = (DATA / "minnow-dflash" / "model.safetensors").read_bytes()
    with open_gguf(path) as file:
        matrices = [tensor for tensor in file.tensors.values() if tensor.type.name == "BF16"]

        assert len(matrices) == 22
        assert all(tensor.data.tobytes() in raw for tensor in matrices)


def test_odd_rows_stay_f16(small_drafter: Path) -> None:
    """A matrix whose rows do not divide into blocks is stored as f16, and that is said."""
    plan = plan_conversion(DATA / "minnow-dspark", target_path=TARGET_FILE)
    assert plan.notes == ()

    weights = small_drafter / "model.safetensors"
    write_safetensors(
        small_drafter / "more.safetensors", {"confidence_head.proj.weight": np.ones((1, 300), np.float32)}
    )
    _replace_projection(small_drafter)
    weights.write_bytes(weights.read_bytes().replace(b'"fcabc.t2d"', b'"fc.weight"'))
    notes = plan_conversion(small_drafter, target_path=TARGET_FILE).notes

    assert notes == ("conf_proj.weight: rows of 300 do not divide into blocks of 32, so it stays f16",)
