"""Three packages that each carry a ggml, computing in one process; run as `neighbours.py ORDER TARGET.gguf`.

ORDER is a comma-separated order in which `ours`, `ggml` and `llama` are loaded. The neighbours are loaded with their
symbols visible to everyone, the worst case. Prints one JSON document: what each of them computed, in two rounds.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
A = np.arange(15, dtype=np.float32).reshape(5, 3) - 7  # weights
B = np.arange(6, dtype=np.float32).reshape(2, 3) - 3  # columns
CONTEXT_BYTES = 1 << 20
GGML_TYPE_F32 = 0  # the same in every ggml


def load_ours() -> Callable[[], Any]:
    """A matrix product and the three largest entries of its rows, through our own operation."""
    sys.path.insert(0, str(Path(__file__).parent))
    from native_helpers import Harness, view

    from pyggml_spec._native import lib

    def compute() -> list[Any]:
        with Harness() as harness:
            a, b = harness.tensor(3, 5), harness.tensor(3, 2)
            product = lib.ggml_mul_mat(harness.context, a, b)
            largest = lib.ggml_spec_top_k(harness.context, product, 3, False)
            harness.finish(product, largest)
            view(a)[:], view(b)[:] = A, B
            harness.compute()
            return [view(product).tolist(), view(largest)[:, :3].tolist()]

    return compute


class InitParams(ctypes.Structure):
    """ggml_init's argument."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def load_ggml() -> Callable[[], Any]:
    """The same matrix product through the shared libraries of the package libggml-python."""
    spec = importlib.util.find_spec("libggml")
    assert spec is not None and spec.origin is not None, "libggml-python is installed"
    folder = Path(spec.origin).parent / "lib64"
    base, cpu = (ctypes.CDLL(str(folder / f"libggml-{part}.so"), mode=os.RTLD_GLOBAL) for part in ("base", "cpu"))
    pointer = ctypes.c_void_p
    for name, arguments in {
        "ggml_init": [InitParams],
        "ggml_new_tensor_2d": [pointer, ctypes.c_int, ctypes.c_int64, ctypes.c_int64],
        "ggml_mul_mat": [pointer, pointer, pointer],
        "ggml_new_graph": [pointer],
        "ggml_build_forward_expand": [pointer, pointer],
        "ggml_get_data_f32": [pointer],
        "ggml_free": [pointer],
    }.items():
        getattr(base, name).argtypes, getattr(base, name).restype = arguments, pointer
    cpu.ggml_graph_compute_with_ctx.argtypes = [pointer, pointer, ctypes.c_int]

    def values_of(tensor: int, shape: tuple[int, int]) -> np.ndarray:
        data = ctypes.cast(base.ggml_get_data_f32(tensor), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(data, shape)

    def compute() -> list[Any]:
        context = base.ggml_init(InitParams(CONTEXT_BYTES, None, False))
        a, b = (base.ggml_new_tensor_2d(context, GGML_TYPE_F32, 3, rows) for rows in (5, 2))
        values_of(a, (5, 3))[:], values_of(b, (2, 3))[:] = A, B
        product, graph = base.ggml_mul_mat(context, a, b), base.ggml_new_graph(context)
        base.ggml_build_forward_expand(graph, product)
        cpu.ggml_graph_compute_with_ctx(context, graph, 1)
        result = values_of(product, (2, 5)).tolist()
        base.ggml_free(context)
        return result

    return compute


def load_llama() -> Callable[[], Any]:
    """A few greedy tokens through llama.cpp, as the package xllamacpp carries it."""
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
    from reference.llama_cpp import LlamaCpp

    server = LlamaCpp(Path(sys.argv[2]), n_ctx=64, n_threads=1)
    sys.setdlopenflags(flags)
    return lambda: server.generate([1, 2, 3], 4).token_ids


def main() -> None:
    """Everybody is loaded before anybody computes."""
    load = {"ours": load_ours, "ggml": load_ggml, "llama": load_llama}
    compute = {name: load[name]() for name in sys.argv[1].split(",")}
    rounds = [{name: run() for name, run in compute.items()} for _ in range(2)]
    print(json.dumps(rounds), flush=True)


if __name__ == "__main__":
    main()
