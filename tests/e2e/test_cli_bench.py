"""`pyggml-spec bench` with the embedded models: documents, not speeds."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pyggml_spec import Engine
from pyggml_spec.assets import embedded_target_path
from pyggml_spec.cli import bench_parity, main
from pyggml_spec.decode.parity import Parity
from pyggml_spec.errors import ModelFileError, OptionError

from .conftest import DRAFTERS

pytestmark = pytest.mark.native

SMALL = ("-p", "class Stack:", "-n", "12", "--repeats", "1", "--widths", "1,4")
ONE = ("-p", "class Stack:", "-n", "192", "-c", "512")


def invoke(*arguments: str | Path) -> Result:
    """Run `bench` in this process."""
    result = CliRunner().invoke(main, ["bench", "-t", "1", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def document(*arguments: str | Path) -> dict[str, Any]:
    """What it prints with --json."""
    result = invoke("--json", *arguments)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_contenders() -> None:
    """Plain, chain, chains of chosen lengths and trees of chosen budgets, all with the same text."""
    report = document(*SMALL, "--draft-max", "2,3", "--budget", "5,33")
    rows = report["contenders"]

    assert list(rows) == ["off", "chain", "chain of 2", "chain of 3", "tree of 5", "tree of 33"]
    assert all(row["committed"] == 12 and row["tok_s"] > 0 for row in rows.values())
    assert [row["same_tokens_as_off"] for row in rows.values()] == [None] + [True] * 5
    assert len(rows["chain of 2"]["offered_per_depth"]) == 2
    assert not rows["off"]["engaged"] and rows["chain"]["engaged"]
    assert list(report["verify_ms"]) == ["1", "4"]
    assert report["memory"]["snapshots_instead_of_banks"] > report["memory"]["factor_banks"]


def test_tables_end_with_the_document() -> None:
    """People read the tables, programs the last line."""
    result = invoke(*SMALL)
    lines = result.stdout.splitlines()

    assert result.exit_code == 0 and "tokens/s" in result.stdout
    assert json.loads(lines[-1])["contenders"]["off"]["rounds"] == 12 and lines[-2] == ""


def test_target_alone() -> None:
    """Without a drafter there is one way of decoding."""
    assert list(document("-m", embedded_target_path(), *SMALL)["contenders"]) == ["off"]


def test_chat() -> None:
    """Prompts in the model's own form are longer, so other texts come out."""
    report = document(*SMALL, "--chat")
    assert report["chat"] and "1 chat messages" in report["method"] and report["contenders"]["off"]["committed"] == 12


def test_small_context() -> None:
    """Verifies are timed behind as many tokens as it has room for; texts may fill it to its end."""
    report = document("-p", "class Stack:", "-n", "37", "-c", "40", "--repeats", "1", "--widths", "4,32")
    assert report["verify_context"] == 8 and report["contenders"]["off"]["committed"] == 37


@pytest.mark.parametrize("flags", [(), ("--parity",), ("--drafter-check",)])
def test_texts_that_the_context_would_cut(flags: tuple[str, ...]) -> None:
    """Are refused with the number that fits: a report must not speak of tokens that nobody generated."""
    result = invoke("-p", "class Stack:", "-n", "38", "-c", "40", *flags)

    assert (result.exit_code, result.stdout) == (1, "")
    assert "-n is 38, but the prompt has 4 tokens and the context 40: give -n 37 at most" in result.stderr


def test_prompts_from_a_file(tmp_path: Path) -> None:
    """Several in one file."""
    file = tmp_path / "prompts.txt"
    file.write_text("def f():\n---\nclass A:\n")
    report = document("-f", file, *SMALL[2:])
    assert report["contenders"]["off"]["committed"] == 24 and "2 prompts" in report["method"]


def test_parity() -> None:
    """On a CPU all runs are equal."""
    report = document("--parity", "-p", "class Stack:", "-n", "12")

    assert (report["n_equal"], report["n_faults"]) == (2, 0)
    assert [row["mode"] for row in report["prompts"]] == ["chain", "tree of 22"]
    assert all(row["n_tokens"] == 12 and row["smallest_gap"] > 0 for row in report["prompts"])


@pytest.mark.parametrize(("gap", "exit_code"), [(0.05, 0), (0.15, 1)])
def test_parity_decides_the_exit_code(monkeypatch: pytest.MonkeyPatch, gap: float, exit_code: int) -> None:
    """A near-tie is no fault; parting where the target was sure is."""
    parted = Parity(5, 0.3, 5, 17, 18, gap, 0.01)
    monkeypatch.setattr(bench_parity, "compare_with_plain", lambda *_, **__: parted)
    result = invoke("--parity", "-p", "class Stack:", "-n", "12")

    assert result.exit_code == exit_code and "parts at token 5" in result.stdout
    assert json.loads(result.stdout.splitlines()[-1])["n_faults"] == 2 * exit_code


def with_mask_token(path: Path, drafter: Path, old: int, new: int) -> Path:
    """A drafter with another mask token in its keys."""
    data = drafter.read_bytes()
    key = b"tokenizer.ggml.mask_token_id"
    at = data.index(key) + len(key) + 4  # behind the type of the value
    assert struct.unpack_from("<I", data, at) == (old,)
    path.write_bytes(data[:at] + struct.pack("<I", new) + data[at + 4 :])
    return path


@pytest.mark.parametrize(
    ("kind", "symptom"), [("dflash", "first drafted token is accepted in only"), ("dflash2", "acceptance falls to")]
)
def test_drafter_check_finds_a_wrong_mask_token(tmp_path: Path, kind: str, symptom: str) -> None:
    """A file that names the end token as the mask drafts badly; the trial that mends it is recommended."""
    broken = with_mask_token(tmp_path / "broken.gguf", DRAFTERS[kind], 8187, 8184)
    report = document("--drafter-check", "-m", embedded_target_path(), "-md", broken, *ONE)
    base, *others = report["trials"]

    assert 4 * base["mean_accepted"] < max(row["mean_accepted"] for row in others)
    assert any("the mask token should be 8187" in text for text in report["findings"]), report["findings"]
    assert any(symptom in text for text in report["findings"]), report["findings"]


def test_drafter_check_of_a_good_drafter() -> None:
    """Nothing to change; the tables name the settings, and what was not checked is said."""
    result = invoke("--drafter-check", *ONE)

    assert result.exit_code == 0, result.output
    assert "no setting that was tried does clearly better" in result.stdout and "not checked" in result.stdout
    assert json.loads(result.stdout.splitlines()[-1])["drafter_settings"]["mask_token_id"] == 8187


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"target_layer_ids": (1, 5, 9, 16)}, ModelFileError, "1, 5, 9, 16"),
        ({"n_layers": 2}, OptionError, "'n_layers'"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    """What replaces a file's settings is held to the same rules."""
    with pytest.raises(error, match=text):
        Engine.load(drafter_settings=settings)
    with pytest.raises(OptionError, match="without a drafter"):
        Engine.load(embedded_target_path(), drafter_settings={"causal": True})
