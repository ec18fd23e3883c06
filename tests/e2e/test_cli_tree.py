"""`pyggml-spec tree` with the embedded models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from pyggml_spec.assets import embedded_drafter_path, embedded_target_path
from pyggml_spec.cli import main

pytestmark = pytest.mark.native

PROMPT = "class Stack:\n    def push(self, item):"


def invoke(*arguments: str | Path) -> Result:
    """Run `tree` in this process; it has to succeed."""
    result = CliRunner().invoke(main, ["tree", "-t", "1", "-p", PROMPT, *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result


def test_document_agrees_with_run() -> None:
    """The text through the trees is the text that `run` writes; budgets hold."""
    document = json.loads(invoke("--rounds", "3", "--budget", "9", "--json").stdout)
    written = CliRunner().invoke(main, ["run", "-t", "1", "-p", PROMPT, "--json", "-n", "64", "--spec", "off"])
    taken = [
        node["token_id"]
        for each in document["rounds"]
        for node in sorted(each["nodes"], key=lambda node: node["depth"])
        if node["fate"] in ("accepted", "bonus")
    ]

    assert len(document["rounds"]) == 3 and all(each["n_offered"] <= 9 for each in document["rounds"])
    assert taken == json.loads(written.stdout)["tokens"][: len(taken)]
    assert len(taken) == sum(each["n_gained"] for each in document["rounds"])


def test_terminal() -> None:
    """A tree a round, with what was accepted and what the target chose."""
    text = invoke("--rounds", "2", "--budget", "40").stdout
    assert text.count("round ") == 2 and text.count("chosen by the target itself") == 2


def test_pictures(tmp_path: Path) -> None:
    """Both files are written and named on stderr; stdout stays empty."""
    svg, html = tmp_path / "trees.svg", tmp_path / "trees.html"
    result = invoke("--svg", svg, "--html", html)

    assert result.stdout == "" and str(svg) in result.stderr and str(html) in result.stderr
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert svg.read_text(encoding="utf-8") in html.read_text(encoding="utf-8")


def test_pictures_replace_nothing_unasked(tmp_path: Path) -> None:
    """An existing file needs --force; one that is read is never replaced, by whatever name; no two share a file."""
    own, drafter = tmp_path / "own.gguf", tmp_path / "drafter.gguf"
    shutil.copy(embedded_target_path(), own)
    drafter.symlink_to(embedded_drafter_path())
    (tmp_path / "link.svg").symlink_to(own)
    (tmp_path / "hard.svg").hardlink_to(own)
    (tmp_path / "mine.svg").write_text("precious")
    (tmp_path / "prompt.txt").write_text("def f(")
    pair = ("-m", own, "-md", drafter)
    for code, text, arguments in (
        (1, "exists already: give --force", ("-p", "x", "--svg", tmp_path / "mine.svg")),
        (1, "is the input", (*pair, "-p", "x", "--force", "--svg", own)),
        (1, "is the input", (*pair, "-p", "x", "--force", "--svg", tmp_path / "link.svg")),
        (1, "is the input", (*pair, "-p", "x", "--force", "--html", tmp_path / "hard.svg")),
        (1, "is the input", (*pair, "-p", "x", "--force", "--html", drafter)),
        (1, "is the input", ("-f", tmp_path / "prompt.txt", "--force", "--html", tmp_path / "prompt.txt")),
        (1, "is the input", ("-p", "x", "--force", "--html", embedded_target_path())),
        (2, "both name", ("-p", "x", "--svg", tmp_path / "new", "--html", f"{tmp_path}/./new")),
        (2, "is no name of a file", ("-p", "x", "--svg", "")),
        (2, "is no name of a file", ("-p", "x", "--html", "-")),
    ):
        result = CliRunner().invoke(main, ["tree", "-t", "1", *map(str, arguments)])
        assert (result.exit_code, text in result.stderr) == (code, True), result.output
    assert own.read_bytes() == embedded_target_path().read_bytes()
    assert (tmp_path / "mine.svg").read_text() == "precious" and not (tmp_path / "new").exists()
    invoke("--svg", tmp_path / "mine.svg", "--force")
    assert (tmp_path / "mine.svg").read_text(encoding="utf-8").startswith("<")


def test_run_takes_wide_trees_too() -> None:
    """A budget beyond the engine's default width is loaded for, not refused."""
    texts = [
        CliRunner().invoke(main, ["run", "-t", "1", "-p", PROMPT, "-n", "12", *flags])
        for flags in (["--spec", "tree", "--budget", "64"], ["--spec", "off"])
    ]
    assert texts[0].exit_code == 0 and texts[0].stdout == texts[1].stdout


def test_full_context() -> None:
    """No room for a round: a sentence, exit code 1."""
    result = CliRunner().invoke(main, ["tree", "-t", "1", "-p", "x " * 64, "-c", "64"])
    assert result.exit_code == 1 and "64" in result.stderr and "Traceback" not in result.output
