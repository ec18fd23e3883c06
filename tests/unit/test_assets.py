"""The embedded pair: there, readable, and made for each other, without a line of native code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pyggml_spec import assets
from pyggml_spec.errors import ModelFileError
from pyggml_spec.gguf_io import (
    check_drafter_fits,
    open_gguf,
    read_drafter_config,
    read_target_config,
    read_vocabulary,
)

NO_NATIVE = """
import sys
import pyggml_spec.gguf_io, pyggml_spec.tokenizer.chat, pyggml_spec.assets
loaded = [name for name in sys.modules if name.startswith(("pyggml_spec._native", "pyggml_spec.ggml", "_cffi"))]
sys.exit(f"loaded {loaded}" if loaded else 0)
"""


def test_the_pair_fits() -> None:
    """The embedded drafter was trained for the embedded target."""
    with open_gguf(assets.embedded_target_path()) as target, open_gguf(assets.embedded_drafter_path()) as drafter:
        check_drafter_fits(
            read_drafter_config(drafter), read_vocabulary(drafter), read_target_config(target), read_vocabulary(target)
        )


def test_assets_come_with_a_notice() -> None:
    """Licence and training data are stated next to the files."""
    notice = assets.embedded_target_path().with_name("NOTICE.md").read_text()
    assert assets.embedded_target_path().name in notice and assets.embedded_drafter_path().name in notice
    assert "licence" in notice


def test_missing_asset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installation without the files says what to do."""
    monkeypatch.setattr(assets.resources, "files", lambda package: tmp_path)
    with pytest.raises(ModelFileError, match="reinstall pyggml-spec or pass a model file"):
        assets.embedded_target_path()


def test_reading_models_needs_no_native_code() -> None:
    """Files, vocabularies and chats work where no extension can be loaded."""
    run = subprocess.run([sys.executable, "-c", NO_NATIVE], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
