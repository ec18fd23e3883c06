"""The embedded model pair: a small target and its drafter, so that generating text needs no download."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from pyggml_spec.errors import ModelFileError

TARGET_NAME = "minnow-q8_0.gguf"
DRAFTER_NAME = "minnow-dflash2-q8_0.gguf"


def embedded_target_path() -> Path:
    """Path of the embedded target; ModelFileError when this installation has none on disk."""
    return _asset_path(TARGET_NAME)


def embedded_drafter_path() -> Path:
    """Path of the embedded target's drafter; ModelFileError when this installation has none on disk."""
    return _asset_path(DRAFTER_NAME)


def _asset_path(name: str) -> Path:
    asset = resources.files(__name__) / name
    if not isinstance(asset, Path) or not asset.is_file():
        raise ModelFileError(f"the embedded model '{asset}' is not on disk; reinstall pyggml-spec or pass a model file")
    return asset
