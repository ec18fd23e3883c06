"""GGUF files of random values: drawn and quantised once per type, every tensor a run of them from another place.

So writing is as fast as the disk, and nothing of the model's size is in memory.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from pyggml_spec.ggml.quantise import quantise_rows

F32 = gguf.GGMLQuantizationType.F32
_POOL_ROWS, _POOL_WIDTH = 2048, 2048  # values drawn once per type
_WRITE_BYTES = 64 << 20


class _Pool:
    """Random values in every type that was asked for."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._values = self._rng.standard_normal((_POOL_ROWS, _POOL_WIDTH), dtype=np.float32)
        self._stored: dict[Any, np.ndarray] = {}

    def write(self, out: Any, kind: Any, n_bytes: int) -> None:
        """n_bytes of matrix values, from a random place on and around again."""
        if kind not in self._stored:
            scaled = np.ascontiguousarray(self._values * np.float32(0.02))
            self._stored[kind] = quantise_rows(scaled, int(kind)).reshape(-1)
        stored = self._stored[kind]
        block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
        at = int(self._rng.integers(stored.size // block_bytes)) * block_bytes
        while n_bytes:
            piece = stored[at : at + min(n_bytes, _WRITE_BYTES)]
            out.write(piece.tobytes())
            n_bytes -= piece.size
            at = (at + piece.size) % stored.size

    def small(self, name: str, n_values: int) -> np.ndarray:
        """f32 values of a norm, a bias or a convolution, in the range of trained ones."""
        x = self._rng.standard_normal(n_values, dtype=np.float32)
        if "norm" in name:
            return np.abs(1 + 0.1 * x)
        if name.endswith("ssm_a"):
            return -np.exp(x)
        return 0.3 * x


def write_model(path: Path, keys: dict[str, Any], table: dict[str, tuple[int, ...]], types: dict[str, Any]) -> int:
    """A GGUF file of random values; returns its bytes.

    keys: metadata by key, the architecture's among them; table: ne (fastest first) by name of a tensor; types: the same
    names, types of GGUF.
    """
    writer = gguf.GGUFWriter(path, keys["general.architecture"])
    for key, value in keys.items():
        _add_key(writer, key, value)
    sizes = {}
    for name, ne in table.items():
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[types[name]]
        sizes[name] = math.prod(ne) // block_size * block_bytes
        row = [ne[0] // block_size * block_bytes] if types[name] != F32 else [ne[0]]
        dtype = np.dtype(np.uint8 if types[name] != F32 else np.float32)
        writer.add_tensor_info(name, [*ne[:0:-1], *row], dtype, sizes[name], types[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    out, pool = writer.fout[0], _Pool(seed=1)
    writer.write_padding(out, out.tell())
    for name, ne in table.items():
        if types[name] == F32:
            out.write(pool.small(name, math.prod(ne)).tobytes())
        else:
            pool.write(out, types[name], sizes[name])
        writer.write_padding(out, sizes[name])
    writer.close()
    return path.stat().st_size


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """One metadata entry, its type from the value's."""
    kinds = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
    if key == "general.architecture":
        return
    if isinstance(value, list):
        kind = gguf.GGUFValueType.STRING if isinstance(value[0], str) else kinds[type(value[0])]
        kind = gguf.GGUFValueType.INT32 if kind == gguf.GGUFValueType.UINT32 else kind
        writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, sub_type=kind)
    else:
        writer.add_key_value(key, value, kinds.get(type(value), gguf.GGUFValueType.STRING))
