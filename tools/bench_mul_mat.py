"""Time of one CPU matrix product by weight type and width, ours and upstream's in one run.

    python tools/bench_mul_mat.py --types Q8_0 Q4_K --shapes 256x768 4096x4096 --widths 1 8 16 --threads 1

A table for people, then one JSON document on the last line. Times are medians over the repetitions of processor time
divided by threads, in microseconds; "x1" is the ratio to one column. Upstream runs on the same memory: its kernels take
weights whose buffer is unknown. Excluded: loading, quantising the weights, the first call of each graph.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from typing import Any

import numpy as np

from pyggml_spec._native import ffi, lib


def random_weights(type_name: str, n_in: int, n_rows: int) -> bytes:
    """Rows of normally distributed weights in the type's layout; a block of rows is repeated."""
    distinct = min(n_rows, 256)
    values = np.random.default_rng(0).normal(size=(distinct, n_in)).astype(np.float32)
    type_id = getattr(lib, f"GGML_TYPE_{type_name}")
    out = bytearray(distinct * lib.ggml_row_size(type_id, n_in))
    memory = ffi.cast("float *", ffi.from_buffer(values))
    if type_name == "F16":
        lib.ggml_fp32_to_fp16_row(memory, ffi.cast("ggml_fp16_t *", ffi.from_buffer(out)), values.size)
    else:
        lib.ggml_quantize_chunk(type_id, memory, ffi.from_buffer(out), 0, distinct, n_in, ffi.NULL)
    row_bytes = len(out) // distinct
    return (bytes(out) * (n_rows // distinct + 1))[: n_rows * row_bytes]


class Product:
    """One product in one graph on a CPU backend with its own threads."""

    def __init__(self, type_name: str, weights: bytes, n_in: int, n_rows: int, width: int, n_threads: int) -> None:
        params = ffi.new("struct ggml_init_params *", {"mem_size": 1 << 20, "no_alloc": True})
        self.context = lib.ggml_init(params[0])
        self.backend = lib.ggml_backend_cpu_init()
        pool = ffi.new("struct ggml_threadpool_params *", lib.ggml_threadpool_params_default(n_threads))
        self.pool = lib.ggml_threadpool_new(pool)
        lib.ggml_backend_cpu_set_n_threads(self.backend, n_threads)
        lib.ggml_backend_cpu_set_threadpool(self.backend, self.pool)
        self.weights = lib.ggml_new_tensor_2d(self.context, getattr(lib, f"GGML_TYPE_{type_name}"), n_in, n_rows)
        x = lib.ggml_new_tensor_2d(self.context, lib.GGML_TYPE_F32, n_in, width)
        out = lib.ggml_mul_mat(self.context, self.weights, x)
        self.graph = lib.ggml_new_graph(self.context)
        lib.ggml_build_forward_expand(self.graph, out)
        self.buffer = lib.ggml_backend_alloc_ctx_tensors(self.context, self.backend)
        ffi.buffer(self.weights.data, len(weights))[:] = weights
        columns = np.random.default_rng(1).normal(size=(width, n_in)).astype(np.float32)
        ffi.buffer(x.data, columns.nbytes)[:] = columns.tobytes()

    def time_us(self, n_threads: int, repetitions: int) -> float:
        """Median processor time of a call, per thread."""
        lib.ggml_backend_graph_compute(self.backend, self.graph)
        times = []
        for _ in range(repetitions):
            start = time.process_time()
            lib.ggml_backend_graph_compute(self.backend, self.graph)
            times.append((time.process_time() - start) / n_threads * 1e6)
        return statistics.median(times)

    def leave_to_upstream(self) -> None:
        """Our kernels take weights in host memory only; these are now of unknown memory."""
        self.weights.buffer = ffi.NULL

    def close(self) -> None:
        lib.ggml_backend_buffer_free(self.buffer)
        lib.ggml_backend_free(self.backend)
        lib.ggml_threadpool_free(self.pool)
        lib.ggml_free(self.context)


def measure(type_name: str, shape: str, widths: list[int], n_threads: int, repetitions: int) -> list[dict[str, Any]]:
    """One record per width: {"type", "shape", "width", "ours_us", "upstream_us"}."""
    n_in, n_rows = (int(part) for part in shape.split("x"))
    weights = random_weights(type_name, n_in, n_rows)
    records = []
    for width in widths:
        product = Product(type_name, weights, n_in, n_rows, width, n_threads)
        ours = product.time_us(n_threads, repetitions)
        product.leave_to_upstream()
        upstream = product.time_us(n_threads, repetitions)
        product.close()
        record = {"type": type_name, "shape": shape, "width": width, "ours_us": ours, "upstream_us": upstream}
        records.append({key: round(value, 1) if isinstance(value, float) else value for key, value in record.items()})
    return records


def print_table(records: list[dict[str, Any]]) -> None:
    """One line per width, with the ratio to the first width."""
    print(
        f"{'type':5} {'in x rows':>11} {'width':>5} {'ours us':>10} {'x1':>6} {'upstream us':>12} {'x1':>6} {'gain':>6}"
    )
    first: dict[str, Any] = {}
    for r in records:
        if (r["type"], r["shape"]) != (first.get("type"), first.get("shape")):
            first = r
        ratios = r["ours_us"] / first["ours_us"], r["upstream_us"] / first["upstream_us"]
        print(
            f"{r['type']:5} {r['shape']:>11} {r['width']:5} {r['ours_us']:10.1f} {ratios[0]:6.2f} "
            f"{r['upstream_us']:12.1f} {ratios[1]:6.2f} {r['upstream_us'] / r['ours_us']:6.2f}"
        )


def main() -> None:
    """Measures what the arguments name."""
    parser = argparse.ArgumentParser(description="CPU matrix products, ours and upstream's")
    parser.add_argument("--types", nargs="+", default=["Q8_0", "Q4_K", "Q6_K", "F16"])
    parser.add_argument("--shapes", nargs="+", default=["256x768", "256x8192", "1024x1024", "4096x4096"])
    parser.add_argument("--widths", nargs="+", type=int, default=[1, 2, 4, 8, 16, 24, 32])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=31)
    args = parser.parse_args()
    records = []
    for type_name in args.types:
        for shape in args.shapes:
            records += measure(type_name, shape, args.widths, args.threads, args.repetitions)
    print_table(records)
    version = ffi.string(lib.ggml_version()).decode()
    print(json.dumps({"machine": platform.machine(), "ggml": version, "threads": args.threads, "results": records}))


if __name__ == "__main__":
    main()
