"""`inspect` and `devices` on the command line, with small files written here. No native code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner, Result

from pyggml_spec.assets import embedded_drafter_path, embedded_target_path
from pyggml_spec.cli import main


def invoke(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def write_gguf(path: Path, architecture: str, **strings: str) -> Path:
    """A GGUF with one small tensor."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in strings.items():
        writer.add_string(f"general.{key}", value)
    writer.add_float32("general.strange", float("nan"))
    writer.add_tensor("weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_embedded_pair() -> None:
    """Without arguments the embedded pair is described and fits."""
    result = invoke("inspect")

    assert result.exit_code == 0
    assert "18,982,592 parameters" in result.output
    assert "+++-+++-+++-+++-" in result.output
    assert "the drafter fits the target" in result.output


def test_json_document() -> None:
    """--json has the same facts for programs, metadata included."""
    document = json.loads(invoke("inspect", embedded_target_path(), embedded_drafter_path(), "--json").stdout)
    target, drafter = document["files"]

    assert (target["role"], target["supported"], target["config"]["n_layers"]) == ("target", True, 16)
    assert (drafter["role"], drafter["config"]["kind"]) == ("drafter", "dflash2")
    assert sum(row["tensors"] for row in target["types"].values()) == target["n_tensors"] == 214
    assert target["metadata"]["tokenizer.ggml.tokens"] == "array of 8192 string items"
    assert document["fit"]["fits"] and all(row["ok"] for row in document["fit"]["checks"])


def test_tensor_list() -> None:
    """--tensors names every tensor with type and shape."""
    result = invoke("inspect", embedded_target_path(), "--tensors")

    assert "token_embd.weight" in result.output
    assert "256, 8192" in result.output


def test_a_file_that_cannot_run_is_shown_with_the_reason(tmp_path: Path) -> None:
    """Another architecture is described all the same; values JSON has no word for become text."""
    path = write_gguf(tmp_path / "other.gguf", "llama")
    document = json.loads(invoke("inspect", path, "--json").stdout)["files"][0]

    assert (document["supported"], document["config"]) == (False, None)
    assert "has architecture 'llama'" in document["why_not"]
    assert document["metadata"]["general.strange"] == "nan"


def test_control_characters_stay_out_of_the_terminal(tmp_path: Path) -> None:
    """A name made of escape sequences is printed as its escapes."""
    path = write_gguf(tmp_path / "name.gguf", "llama", name="\x1b[2Jgone")
    result = invoke("inspect", path, "--metadata")

    assert "\x1b" not in result.output
    assert r"\x1b[2Jgone" in result.output


def test_two_targets_do_not_fit() -> None:
    """A target in the drafter's place is a mismatch, not a crash."""
    result = invoke("inspect", embedded_target_path(), embedded_target_path())

    assert result.exit_code == 1
    assert "the drafter does not fit the target" in result.output
    assert "neither file is a drafter: give a target and its drafter" in result.output
    assert "both files are drafters" in invoke("inspect", embedded_drafter_path(), embedded_drafter_path()).output


def test_the_order_of_a_pair_is_of_no_matter() -> None:
    """The files tell which of them is the drafter."""
    pair = embedded_target_path(), embedded_drafter_path()
    results = [invoke("inspect", *files, "--json") for files in (pair, pair[::-1])]
    documents = [json.loads(result.stdout) for result in results]

    assert [result.exit_code for result in results] == [0, 0]
    assert documents[0]["fit"] == documents[1]["fit"]
    assert documents[0]["files"] == documents[1]["files"][::-1]


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_pair_that_does_not_fit_is_a_failure(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Said in full, in whatever order the files come, and for scripts in the exit code."""
    other = write_gguf(tmp_path / "other.gguf", "llama")
    for files in ((other, embedded_drafter_path()), (embedded_drafter_path(), other)):
        result = invoke("inspect", *files, *flags)

        assert (result.exit_code, result.stderr) == (1, "")
        assert "has architecture 'llama'" in result.stdout


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "missing.gguf"),
        (b"", "'"),
        (b"PK\x03\x04 this is a zip", "'"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, "'"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes | None, text: str) -> None:
    """Missing, empty, foreign and damaged files are one sentence and exit code 1."""
    path = tmp_path / "missing.gguf"
    if content is not None:
        path.write_bytes(content)
    result = invoke("inspect", path)

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    assert text in result.stderr


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_devices(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    """`devices` lists what can be used and what is here in vain."""
    row: dict[str, Any] = {"name": "cpu", "kind": "cpu", "description": "A processor", "is_default": True}
    row |= {"memory_free": 1_000_000_000, "memory_total": 2_000_000_000}
    monkeypatch.setattr(sys.modules["pyggml_spec.cli.devices"], "list_device_rows", lambda: [row])
    monkeypatch.setattr(sys.modules["pyggml_spec.cli.machine"], "find_gpu_vendors", lambda: ["AMD"])
    output = invoke("devices", *arguments).stdout

    if arguments:
        assert json.loads(output)["devices"] == [row]
        assert json.loads(output)["unusable"][0]["device"] == "AMD GPU"
    else:
        assert "* cpu  cpu  1.0 GB of 2.0 GB free  A processor" in output
        assert "AMD GPU is here but cannot be used" in output
