"""`doctor` on installs that are not well, made up here. No native code."""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pyggml_spec import assets
from pyggml_spec.assets import DRAFTER_NAME, TARGET_NAME, embedded_target_path
from pyggml_spec.cli import main
from pyggml_spec.errors import NativeLibraryError

doctor = import_module("pyggml_spec.cli.doctor")
machine = import_module("pyggml_spec.cli.machine")

CPU = {"name": "cpu", "kind": "cpu", "description": "A", "is_default": True, "memory_free": 1, "memory_total": 2}


class FakeCompletion:
    def __init__(self, tokens: list[int], engaged: bool) -> None:
        self.tokens = tokens
        why = None if engaged else "it was asleep"
        self.stats = {"spec": {"engaged": engaged, "why": why}, "acceptance_length": 2.5, "decode_tok_s": 10.0}


class FakeEngine:
    """Answers with the tokens the test wants of speculative and of plain decoding."""

    answers: dict[str, FakeCompletion] = {}

    @classmethod
    def load(cls) -> FakeEngine:
        return cls()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def generate(self, prompt: str, *, max_tokens: int, spec: str) -> FakeCompletion:
        return self.answers[spec]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A quiet machine with a CPU whose engine works; tests break one thing each."""
    module = type("FakeModule", (), {"Engine": FakeEngine})
    monkeypatch.setitem(sys.modules, "pyggml_spec.decode.engine", module)
    monkeypatch.setattr(
        FakeEngine, "answers", {"auto": FakeCompletion([1, 2], True), "off": FakeCompletion([1, 2], False)}
    )
    monkeypatch.setattr(doctor, "list_device_rows", lambda: [CPU])
    monkeypatch.setattr(machine, "find_gpu_vendors", lambda: [])
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)
    return monkeypatch


def examine() -> tuple[Result, dict[str, Any]]:
    """The text for people and the report for programs."""
    text, document = (CliRunner().invoke(main, ["doctor", *flags]) for flags in ([], ["--json"]))
    return text, json.loads(document.stdout)


def test_healthy(install: pytest.MonkeyPatch) -> None:
    """Nothing to report, exit code 0."""
    text, report = examine()

    assert (text.exit_code, report["problems"], report["warnings"]) == (0, [], [])
    assert text.stdout.endswith("All is well.\n")
    assert "same text" in text.stdout


def test_no_usable_flavour(install: pytest.MonkeyPatch) -> None:
    """The examination goes on after the native library failed to load."""

    def fail() -> None:
        raise NativeLibraryError("no flavour of the native extension can be used")

    install.setattr(doctor, "list_device_rows", fail)
    text, report = examine()

    assert text.exit_code == 1
    assert "Problem: no flavour of the native extension can be used." in text.stdout
    assert (report["devices"], report["self_check"]) == ([], None)
    assert report["embedded"]["target"]["bytes"] > 20_000_000


@pytest.mark.parametrize("name", [TARGET_NAME, DRAFTER_NAME])
def test_damaged_models(install: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """One changed byte is found, and the file named; so is a file that is missing, once."""
    shutil.copytree(embedded_target_path().parent, tmp_path, dirs_exist_ok=True)
    install.setattr(assets.resources, "files", lambda package: tmp_path)
    assert examine()[1]["problems"] == []
    with (tmp_path / name).open("r+b") as file:
        file.seek(-9, os.SEEK_END)
        file.write(b"\xa5")
    text, report = examine()

    assert (text.exit_code, len(report["problems"])) == (1, 1)
    assert f"{name}' is damaged" in report["problems"][0] and report["self_check"] is None
    (tmp_path / name).unlink()
    text, _ = examine()
    assert (text.exit_code, text.stdout.count("is not on disk")) == (1, 1)


def test_texts_differ(install: pytest.MonkeyPatch) -> None:
    """Speculation that changes the text is a problem."""
    install.setitem(FakeEngine.answers, "off", FakeCompletion([1, 3], False))
    text, _ = examine()

    assert text.exit_code == 1
    assert "Problem: greedy text with the drafter differs" in text.stdout


def test_drafter_asleep(install: pytest.MonkeyPatch) -> None:
    """Speculation that does not happen is a problem too."""
    install.setitem(FakeEngine.answers, "auto", FakeCompletion([1, 2], False))
    text, _ = examine()

    assert text.exit_code == 1
    assert "Problem: the embedded drafter was not used: it was asleep." in text.stdout


def test_warnings(install: pytest.MonkeyPatch) -> None:
    """An idle GPU and a busy machine are worth a word, not an exit code."""
    install.setattr(machine, "find_gpu_vendors", lambda: ["NVIDIA"])
    install.setattr(os, "getloadavg", lambda: (1e4, 0.0, 0.0), raising=False)
    text, report = examine()

    assert (text.exit_code, len(report["warnings"])) == (0, 2)
    assert "Warning: NVIDIA GPU is here but not used" in text.stdout
    assert "Warning: the load is 10000.0" in text.stdout
