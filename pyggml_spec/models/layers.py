"""Pieces that several architectures share. Shapes are ne, fastest first; N is the number of columns of the call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyggml_spec.ggml import I32, Graph, Tensor, ops
from pyggml_spec.gguf_io.weights import Weights


@dataclass(frozen=True)
class PackedInputs:
    """All integer inputs of a graph in one tensor: one upload a call.

    `host[name]` is the (n,) int32 array to fill, `tensors[name]` the matching i32 view inside the graph.
    """

    packed: Tensor
    buffer: np.ndarray  # (sum of sizes,) int32
    host: dict[str, np.ndarray]
    tensors: dict[str, Tensor]

    @classmethod
    def create(cls, graph: Graph, sizes: dict[str, int]) -> PackedInputs:
        """Reserve `sizes[name]` words for each input."""
        total = sum(sizes.values())
        packed = graph.input(I32, [total], "inputs")
        buffer = np.zeros(total, dtype=np.int32)
        host, tensors, begin = {}, {}, 0
        for name, size in sizes.items():
            host[name] = buffer[begin : begin + size]
            tensors[name] = ops.view(graph.context, packed, [size], offset=4 * begin).named(f"inp_{name}")
            begin += size
        return cls(packed, buffer, host, tensors)

    def upload(self) -> None:
        """Send the host arrays to the device."""
        self.packed.set(self.buffer)


def project(graph: Graph, weights: Weights, stack: str, x: Tensor, parts: range | None = None) -> list[Tensor]:
    """Products of x [n_in, N] with the parts of a stack (all, or those in `parts`): one [n_rows, N] view each."""
    results: list[Tensor] = []
    first = 0
    for run in weights.stacks[stack]:
        wanted = [i for i in range(len(run.n_rows)) if parts is None or first + i in parts]
        if wanted:
            results += _project_run(graph, run.tensor, run.n_rows, range(wanted[0], wanted[-1] + 1), x)
        first += len(run.n_rows)
    return results


def _project_run(graph: Graph, weight: Tensor, n_rows: tuple[int, ...], parts: range, x: Tensor) -> list[Tensor]:
    context = graph.context
    first, end = sum(n_rows[: parts.start]), sum(n_rows[: parts.stop])
    wanted = ops.weight_rows(context, weight, first, end - first) if end - first < sum(n_rows) else weight
    y = ops.mul_mat(context, weight if wanted is None else wanted, x)
    if wanted is not None and len(parts) == 1:
        return [y]
    views, begin = [], first if wanted is None else 0
    for i in parts:
        views.append(ops.view(context, y, [n_rows[i], y.ne[1]], [y.nb[1]], 4 * begin))
        begin += n_rows[i]
    return views


def heads(graph: Graph, x: Tensor, head_dim: int, n_heads: int, *, stride: int | None = None, first: int = 0) -> Tensor:
    """x [.., N] seen as [head_dim, n_heads, N]; heads start every `stride` values (head_dim), at value `first`."""
    step = 4 * (head_dim if stride is None else stride)
    return ops.view(graph.context, x, [head_dim, n_heads, x.ne[1]], [step, x.nb[1]], 4 * first)


def feed_forward(graph: Graph, weights: Weights, x: Tensor, prefix: str) -> Tensor:
    """SwiGLU: down(silu(gate x) * (up x)), x [n_embd, N]."""
    gate, up = project(graph, weights, f"{prefix}ffn_gate_up", x)
    hidden = ops.swiglu_split(graph.context, gate, up).named(f"{prefix}ffn_swiglu")
    return ops.mul_mat(graph.context, weights[f"{prefix}ffn_down.weight"], hidden).named(f"{prefix}ffn_out")


def following_norm(i: int, n_layers: int) -> tuple[str, str]:
    """The norm that reads the output of layer i: its weight, and llama.cpp's name of its result."""
    if i + 1 == n_layers:
        return "output_norm.weight", "result_norm"
    return f"blk.{i + 1}.attn_norm.weight", f"attn_norm-{i + 1}"
