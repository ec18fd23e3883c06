"""The embedded model pair: a small target and its drafter, so that generating text needs no download."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path

from pyggml_spec.errors import ModelFileError

TARGET_NAME = "minnow-q8_0.gguf"
DRAFTER_NAME = "minnow-dflash2-q8_0.gguf"
SUMS_NAME = "SHA256SUMS"


def embedded_target_path() -> Path:
    """Path of the embedded target; ModelFileError when this installation has none on disk."""
    return _asset_path(TARGET_NAME)


def embedded_drafter_path() -> Path:
    """Path of the embedded target's drafter; ModelFileError when this installation has none on disk."""
    return _asset_path(DRAFTER_NAME)


def explain_damage() -> list[str]:
    """A sentence for every embedded file whose bytes are not those it was published with; reads all of them."""
    lines = _asset_path(SUMS_NAME).read_text(encoding="ascii").splitlines()
    expected = {name: digest for digest, name in map(str.split, lines)}
    paths = (embedded_target_path(), embedded_drafter_path())
    return [
        f"the embedded model '{path}' is damaged (its SHA-256 is not the published one); reinstall pyggml-spec"
        for path in paths
        if hashlib.sha256(path.read_bytes()).hexdigest() != expected.get(path.name)
    ]


def _asset_path(name: str) -> Path:
    asset = resources.files(__name__) / name
    if not isinstance(asset, Path) or not asset.is_file():
        raise ModelFileError(f"the embedded file '{asset}' is not on disk; reinstall pyggml-spec or pass a model file")
    return asset
