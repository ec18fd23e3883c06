"""`bench --impose` on the embedded pair and on random weights: real times, imposed acceptance."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pyggml_spec.cli import main

pytestmark = pytest.mark.native

ROOT = Path(__file__).parents[2]
QUICK = ["-p", "def f(x):", "-n", "200", "--repeats", "1", "--widths", "1", "-t", "1", "-c", "512"]


def test_chains_and_trees_accept_what_was_imposed() -> None:
    """The share of rounds by depth is the product of the rates; trees gain what their siblings add."""
    result = CliRunner().invoke(main, ["bench", *QUICK, "--impose", "0.9,0.7,0.6", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    chain, tree = report["contenders"]["chain"], report["contenders"]["tree of 22"]
    found = [count / chain["rounds"] for count in chain["accepted_per_depth"][:3]]

    assert report["imposed"] == [0.9, 0.7, 0.6]
    assert found == pytest.approx([0.9, 0.63, 0.378], abs=0.15)
    assert tree["acceptance_length"] > chain["acceptance_length"]
    assert chain["same_tokens_as_off"] is tree["same_tokens_as_off"] is None
    assert report["memory"]["snapshots_instead_of_banks"] > 5 * report["memory"]["factor_banks"]


def test_random_weights(tmp_path: Path) -> None:
    """A synthetic pair, whose own drafts are never accepted; the table says that the text is not real."""
    target, drafter = tmp_path / "t.gguf", tmp_path / "d.gguf"
    make = [sys.executable, str(ROOT / "tools/make_synthetic.py"), "--shape", "tiny", "--type"]
    subprocess.run([*make, "q4_k_m", str(target)], check=True, capture_output=True)
    subprocess.run([*make, "q8_0", "--drafter", str(drafter)], check=True, capture_output=True)
    quick = ["-p", "some words", "-n", "24", *QUICK[4:]]
    result = CliRunner().invoke(main, ["bench", "-m", str(target), "-md", str(drafter), *quick, "--impose", "1"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output.splitlines()[-1])

    assert "THE TEXT IS NOT REAL" in result.output
    assert report["contenders"]["chain"]["acceptance_length"] > 6
