"""Two GGUF files side by side."""

from __future__ import annotations

from pathlib import Path

from pyggml_spec.gguf_io import open_gguf


def differences(ours: Path, theirs: Path) -> set[str]:
    """Keys and tensors that are not the same in both files: type, shape and every byte count, order does not."""
    return {name for name, _ in _contents(ours).items() ^ _contents(theirs).items()}


def _contents(path: Path) -> dict[str, tuple]:
    with open_gguf(path) as file:
        keys = {key: (file.metadata.stored_value(key),) for key in file.metadata}
        tensors = {tensor.name: (tensor.type, tensor.ne, tensor.data.tobytes()) for tensor in file.tensors.values()}
    assert not keys.keys() & tensors.keys()
    return keys | tensors
