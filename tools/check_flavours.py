"""Load every usable flavour of the installed package and compute with it; run by build_wheel.py in a fresh environment.

    python -I check_flavours.py          all flavours, each in a process of its own; one line each
    python -I check_flavours.py NAME     one flavour
"""

from __future__ import annotations

import subprocess
import sys

from pyggml_spec import _native
from pyggml_spec._native.flavours import list_flavours
from pyggml_spec._native.load import load_flavour


def compute(name: str) -> list[float]:
    """[1 2 3] times the matrix with rows [1 1 1] and [0 1 2], on one flavour."""
    extension = load_flavour(name)
    ffi, lib = extension.ffi, extension.lib
    context = lib.ggml_init({"mem_size": 1 << 20, "mem_buffer": ffi.NULL, "no_alloc": True})
    matrix = lib.ggml_new_tensor_2d(context, lib.GGML_TYPE_F32, 3, 2)
    column = lib.ggml_new_tensor_1d(context, lib.GGML_TYPE_F32, 3)
    graph, product = lib.ggml_new_graph(context), lib.ggml_mul_mat(context, matrix, column)
    lib.ggml_build_forward_expand(graph, product)
    backend = lib.ggml_backend_cpu_init()
    buffer = lib.ggml_backend_alloc_ctx_tensors(context, backend)
    for tensor, values in [(matrix, [1, 1, 1, 0, 1, 2]), (column, [1, 2, 3])]:
        data = ffi.new("float[]", values)
        lib.ggml_backend_tensor_set(tensor, data, 0, ffi.sizeof(data))
    lib.ggml_backend_graph_compute(backend, graph)
    result = ffi.new("float[2]")
    lib.ggml_backend_tensor_get(product, result, 0, ffi.sizeof(result))
    lib.ggml_backend_buffer_free(buffer)
    lib.ggml_backend_free(backend)
    lib.ggml_free(context)
    return list(result)


def main() -> int:
    """Exit status 1 if a flavour is missing or a usable one computes anything but [6, 8]."""
    if len(sys.argv) == 2:
        return 0 if compute(sys.argv[1]) == [6.0, 8.0] else 1
    failed = False
    for status in list_flavours(list(_native.__path__)):
        verdict = status.why_not
        if verdict is None:
            code = subprocess.call([sys.executable, "-I", __file__, status.name])
            verdict = "computes" if code == 0 else f"FAILED with exit status {code}"
            failed |= code != 0
        failed |= status.path is None
        print(f"{status.name}: {verdict}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
