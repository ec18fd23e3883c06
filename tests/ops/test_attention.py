"""Attention over listed cells: against float64, and bit for bit against itself in another company."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import Harness, on_device
from reference.attention import attend, visible_cells
from reference.trees import parent_lists

from pyggml_spec.errors import DeviceError, ShapeError
from pyggml_spec.ggml import F16, F32, I32, Q8_0, Backend, Context, Graph, GraphArena, ops, spec_ops, type_by_name
from pyggml_spec.ggml.backend import choose_device

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("device")]

GPU_HEAD_DIMS = (64, 128, 256)
VISIBILITY = {"ancestors": 0, "block": 1, "prefix": 2}


@dataclass(frozen=True)
class Case:
    """One call: `cells` is a permutation of all cells; the first are committed, the next are the nodes'."""

    head_dim: int
    n_heads: int
    n_heads_kv: int
    parents: list[int]
    n_committed: int
    cells: list[int]
    seed: int
    window: int = 0
    visibility: str = "ancestors"
    cell_type: str = "f32"
    value_type: str | None = None  # None: as the keys
    has_gate: bool = False
    n_columns: int | None = None

    @property
    def n_cells(self) -> int:
        return len(self.cells)

    @property
    def n_nodes(self) -> int:
        return len(self.parents)

    @property
    def committed(self) -> list[int]:
        n_own = self.n_nodes if self.visibility == "prefix" else 0
        return self.cells[: self.n_committed + n_own]

    @property
    def node_cells(self) -> list[int]:
        return self.cells[self.n_committed : self.n_committed + self.n_nodes]


def tensors(case: Case) -> dict[str, np.ndarray]:
    """Random q, gate (N, H, D) and k, v (n_cells, H_kv, D); a token's K/V depend on its place in `cells`, so
    that moving it to another cell changes nothing else."""
    rng = np.random.default_rng(case.seed)
    kv = rng.standard_normal((2, case.n_cells, case.n_heads_kv, case.head_dim)).astype(np.float32)
    placed = np.empty_like(kv)
    placed[:, case.cells] = kv
    q = rng.standard_normal((2, case.n_nodes, case.n_heads, case.head_dim)).astype(np.float32)
    return {"q": q[0] * 3, "gate": q[1], "k": placed[0], "v": placed[1]}


def run(
    case: Case, n_threads: int = 1, given_: dict[str, np.ndarray] | None = None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Result (N, H, D), and the tensors as the kernel read them (rounded to the cells' type)."""
    given_ = tensors(case) if given_ is None else given_
    n_columns = case.n_columns or case.n_nodes
    width = case.head_dim * case.n_heads_kv
    with Backend(choose_device(Harness.device), n_threads) as backend:
        context = Context(3)
        k = context.new_tensor(type_by_name(case.cell_type), [width, case.n_cells])
        v = context.new_tensor(type_by_name(case.value_type or case.cell_type), [width, case.n_cells])
        committed = context.new_tensor(I32, [case.n_cells, 2])
        buffer = backend.allocate(context, "cells")
        graph = Graph(GraphArena(backend), 16)
        ids = graph.input(I32, [case.n_cells], "ids")
        rows = [graph.input(F32, [width, case.n_cells], name) for name in ("k_rows", "v_rows")]
        q = graph.input(F32, [case.head_dim, case.n_heads, n_columns], "q")
        gate = graph.input(F32, [case.head_dim, case.n_heads, n_columns], "gate") if case.has_gate else None
        nodes = graph.input(I32, [spec_ops.NODES_HEADER + 2 * n_columns], "nodes")
        out = spec_ops.attention(
            graph.context,
            q=q,
            k=ops.set_rows(graph.context, k, rows[0], ids),
            v=ops.set_rows(graph.context, v, rows[1], ids),
            nodes=nodes,
            committed=committed,
            scale=case.head_dim**-0.5,
            window=case.window,
            visibility=VISIBILITY[case.visibility],
            gate=gate,
        )
        graph.output(out)
        graph.place()
        ids.set(np.arange(case.n_cells, dtype=np.int32))
        for tensor, name in zip(rows, ("k", "v"), strict=True):
            tensor.set(given_[name].reshape(case.n_cells, width))
        q.set(padded(given_["q"], n_columns))
        if gate is not None:
            gate.set(padded(given_["gate"], n_columns))
        words = np.zeros(nodes.ne[0], dtype=np.int32)
        words[:4] = (1, case.n_nodes, case.n_committed, 1)
        words[4 : 4 + 2 * case.n_nodes : 2] = case.node_cells
        words[5 : 5 + 2 * case.n_nodes : 2] = case.parents
        nodes.set(words)
        committed.set(np.array(case.committed, dtype=np.int32), 4 * case.n_cells)
        graph.run()
        result = out.get().reshape(n_columns, case.n_heads, case.head_dim)
        seen = given_ | {"k": dequantised(k, given_["k"].shape), "v": dequantised(v, given_["v"].shape)}
        graph.close()
        buffer.close()
        context.close()
    return result, seen


def padded(rows: np.ndarray, n_columns: int) -> np.ndarray:
    """Rows (N, ..) continued with NaN, which must never be read."""
    out = np.full((n_columns, *rows.shape[1:]), np.nan, dtype=np.float32)
    out[: len(rows)] = rows
    return out


def dequantised(tensor, shape: tuple[int, ...]) -> np.ndarray:
    """What the cells hold, as f32 (n_cells, H_kv, D)."""
    raw = np.empty(tensor.n_bytes, dtype=np.uint8)
    tensor.get(raw)
    kind = gguf.GGMLQuantizationType(tensor.type.number)
    if kind == gguf.GGMLQuantizationType.F32:
        return raw.view(np.float32).reshape(shape)
    return gguf.quants.dequantize(raw.reshape(shape[0], -1), kind).reshape(shape)


placements = st.permutations(range(300))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any tree, any placement of its cells, any of the three visibilities, any head size that the device has."""
    visibility = draw(st.sampled_from(["ancestors", "block", "prefix"]))
    parents = draw(parent_lists(max_nodes=24))
    if visibility != "ancestors":
        parents = list(range(-1, len(parents) - 1))
    n_kv = draw(st.sampled_from([1, 2, 3]))
    return Case(
        head_dim=draw(st.sampled_from([32, 64, 96, 128, 256] if Harness.device == "CPU" else GPU_HEAD_DIMS)),
        n_heads=n_kv * draw(st.sampled_from([1, 2, 4, 6])),
        n_heads_kv=n_kv,
        parents=parents,
        n_committed=draw(st.integers(0, 200)),
        cells=draw(placements),
        seed=draw(st.integers(0, 2**32 - 1)),
        window=draw(st.sampled_from([0, 0, 1, 7, 64, 100])),
        visibility=visibility,
        cell_type=draw(st.sampled_from(["f32", "f16", "q8_0", "q4_0"])),
        has_gate=draw(st.booleans()),
    )


def check_against_reference(case: Case, nodes: range) -> None:
    """Relative error under 1e-5: f32 sums of up to 224 terms, exponentials to 1e-7.

    Matrix units of a GPU take factors of f16. Queries (as exponents of 2) and cells are rounded in the oracle as the
    kernel rounds them. Weights are rounded by at most 2^-11 of themselves, which turns a result by at most 2^-11 of the
    weighted mean of the values' magnitudes. A card without such units is held to the first bound.
    """
    result, seen = run(case)
    halves = as_halves(case, seen) if uses_halves(case) else None
    for node in nodes:
        cells = visible_cells(
            node, case.node_cells, case.parents, case.committed, case.window, case.visibility
        )
        gate = seen["gate"][node] if case.has_gate else None
        wanted = attend(seen["q"][node], seen["k"], seen["v"], cells, case.head_dim**-0.5, gate)
        if np.linalg.norm(result[node] - wanted) <= 1e-5 * np.linalg.norm(wanted):
            continue

        assert halves is not None
        q, k, v = halves["q"][node], halves["k"], halves["v"]
        wanted = attend(q, k, v, cells, math.log(2), gate)
        by_weights = 2.0**-11 * attend(q, k, abs(v), cells, math.log(2), gate)
        assert np.linalg.norm(result[node] - wanted) <= 1e-5 * np.linalg.norm(wanted) + np.linalg.norm(by_weights)


def uses_halves(case: Case) -> bool:
    """Whether a GPU with matrix units uses them for these cells."""
    types = {case.cell_type, case.value_type or case.cell_type}
    return Harness.device != "CPU" and (types == {"f16"} or types <= {"q8_0", "q4_0"})


def as_halves(case: Case, seen: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Queries as exponents of 2 and cells, rounded to f16 (as f64, so that the oracle adds nothing to it)."""
    scale = np.float32(case.head_dim**-0.5) * np.float32(1.4426950408889634)
    return {name: (seen[name] * (scale if name == "q" else 1)).astype(np.float16).astype(np.float64) for name in "qkv"}


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_node_equals_the_reference(case: Case) -> None:
    check_against_reference(case, range(case.n_nodes))


@pytest.mark.parametrize("n_committed", [4094, 4500, 16380, 17000])
@pytest.mark.parametrize("cell_type", ["f16", "q8_0"])
def test_long_lists(n_committed: int, cell_type: str) -> None:
    """Lists that reach across places where a device may cut them."""
    cells = np.random.default_rng(n_committed).permutation(n_committed + 20).tolist()
    case = Case(64, 2, 1, [-1, 0, 0, 1, 3, 3], n_committed, cells, seed=1, cell_type=cell_type)

    check_against_reference(case, range(0, 6, 5))
    check_branch_against_decoding(case, node=5)


@pytest.mark.parametrize("n_nodes", [1, 5, 8, 16])
@pytest.mark.parametrize("cell_type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("head_dim", GPU_HEAD_DIMS)
def test_every_variant(head_dim: int, cell_type: str, n_nodes: int) -> None:
    """A GPU's kernels come for so many rows at once: 16, 32, 48, and 96."""
    cells = np.random.default_rng(n_nodes).permutation(340).tolist()
    case = Case(head_dim, 6, 1, list(range(-1, n_nodes - 1)), 300, cells, seed=2, cell_type=cell_type, has_gate=True)

    check_against_reference(case, range(n_nodes))


@pytest.mark.parametrize("types", [("f16", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "f32")], ids=str)
def test_keys_and_values_of_two_types(types: tuple[str, str]) -> None:
    """Each is read as what it is."""
    cells = np.random.default_rng(1).permutation(220).tolist()
    case = Case(128, 6, 2, [-1, 0, 0, 1, 3, 3], 150, cells, 1, cell_type=types[0], value_type=types[1], has_gate=True)

    check_against_reference(case, range(6))


def test_head_sizes_without_a_kernel_are_refused_when_the_graph_is_built(device: str) -> None:
    """A GPU says so, nothing falls to a kernel that does not fit."""
    case = Case(96, 2, 1, [-1, 0], 10, list(range(20)), seed=1)
    if device == "CPU":
        run(case)
        return
    with pytest.raises(DeviceError, match="has no kernel for FLASH_ATTN_EXT"):
        run(case)


@settings(max_examples=30, deadline=None)
@given(cases(), placements, st.integers(0, 5))
def test_bits_do_not_depend_on_company(case: Case, cells: list[int], n_padding: int) -> None:
    """Other cells for the same tokens, padding columns and threads change no bit."""
    alone, _ = run(case)
    moved, _ = run(replace(case, cells=cells, n_columns=case.n_nodes + n_padding), n_threads=2)

    assert moved[: case.n_nodes].tobytes() == alone.tobytes()
    assert not moved[case.n_nodes :].any()


@settings(max_examples=20, deadline=None)
@given(cases())
def test_a_verified_branch_equals_decoding_it(case: Case) -> None:
    """The last node of a tree, and the same tokens committed one by one: the same bits."""
    check_branch_against_decoding(replace(case, visibility="ancestors", window=0), node=case.n_nodes - 1)


def check_branch_against_decoding(case: Case, node: int) -> None:
    """The node's result is what its path gives when it is decoded token by token."""
    path = [node]
    while case.parents[path[0]] >= 0:
        path.insert(0, case.parents[path[0]])
    in_tree, _ = run(case)
    order = case.cells[: case.n_committed] + [case.node_cells[i] for i in path]
    rest = [cell for cell in case.cells if cell not in set(order)]
    serial = replace(case, parents=[-1], n_committed=len(order) - 1, cells=order + rest)
    values = tensors(case)  # the tokens keep the K/V of their cells
    values |= {name: values[name][node : node + 1] for name in ("q", "gate")}

    assert run(serial, given_=values)[0][0].tobytes() == in_tree[node].tobytes()


def on_card(monkeypatch: pytest.MonkeyPatch, card: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process whose GPU seems to be another card ("shared bytes,multiprocessors")."""
    if Harness.device == "CPU":
        pytest.skip("a CPU has neither shared memory nor multiprocessors")
    monkeypatch.setenv("GGML_SPEC_CUDA_CARD", card)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_on_device, (Harness.device, function, arguments))


def _on_device(device: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    with on_device(device):
        return function(*arguments)


def results(cases_: list[Case]) -> list[bytes]:
    """The bits of each case."""
    return [run(case)[0].tobytes() for case in cases_]


@pytest.mark.parametrize("head_dim", GPU_HEAD_DIMS)
def test_bits_do_not_depend_on_shared_memory(device: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards with 100 KB a block get kernels with fewer rows and tiles at a time."""
    cells = np.random.default_rng(5).permutation(900).tolist()
    tree = Case(head_dim, 12, 2, [-1, 0, 0, 1, 3, 3, *range(2, 20)], 777, cells, 1)
    cases_ = [
        replace(tree, cell_type=cell_type, parents=tree.parents[:n])
        for cell_type in ("f16", "q8_0")
        for n in (1, 5, 8, 16, 24)
    ]

    assert on_card(monkeypatch, f"{99 * 1024},100000", results, cases_) == results(cases_)


@pytest.mark.parametrize("n_committed", [120, 250, 377])
@pytest.mark.parametrize("cell_type", ["f32", "f16", "q8_0"])
def test_rows_of_two_split_lengths(
    device: str, n_committed: int, cell_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two multiprocessors the rows of one call are cut differently: longer lists have longer splits."""
    cells = np.random.default_rng(n_committed).permutation(n_committed + 40).tolist()
    case = Case(64, 2, 1, [-1, 0, 0, *range(2, 14)], n_committed, cells, seed=1, cell_type=cell_type)

    on_card(monkeypatch, "1000000,2", _check_rows_of_two_split_lengths, case)


def _check_rows_of_two_split_lengths(case: Case) -> None:
    check_against_reference(case, range(case.n_nodes))
    for node in (1, case.n_nodes // 2, case.n_nodes - 1):
        check_branch_against_decoding(case, node)
    chain = replace(case, parents=list(range(-1, case.n_nodes - 1)), visibility="block", window=100)
    check_against_reference(chain, range(chain.n_nodes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (F32, [64, 3, 4])}, "H a multiple of H_kv"),
        ({"k": (F32, [96, 8])}, "k and v must have the same shape"),
        ({"v": (I32, [128, 8])}, "k and v must be f32, f16, q8_0 or q4_0"),
        ({"q": (F16, [64, 4, 4])}, "q must be f32"),
        ({"nodes": (I32, [11])}, "nodes must be a contiguous i32 list"),
        ({"nodes": (F32, [12])}, "nodes must be a contiguous i32 list"),
        ({"committed": (F32, [8, 1])}, "committed lists must be contiguous i32"),
        ({"q": (F32, [16, 4, 4]), "k": (Q8_0, [32, 8]), "v": (Q8_0, [32, 8])}, "multiple of the block size"),
    ],
)
def test_wrong_operands_are_refused(change: dict, message: str) -> None:
    """A sentence, not an abort."""
    shapes = {
        "q": (F32, [64, 4, 4]), "k": (F32, [128, 8]), "v": (F32, [128, 8]), "nodes": (I32, [12]),
        "committed": (I32, [8, 1]),
    }  # fmt: skip
    with Context(16) as context:
        operands = {name: context.new_tensor(*made, name) for name, made in (shapes | change).items()}
        with pytest.raises(ShapeError, match=message):
            spec_ops.attention(context, **operands, scale=1.0)
