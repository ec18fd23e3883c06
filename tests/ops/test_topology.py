"""Two oracles of the tree-shaped delta rule against each other, and the native operation against the factorised one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_helpers import view
from reference import delta_net, topology
from reference.trees import parent_lists, path_to
from test_delta_net_tree import REL_L2, Dims, Layer, layers, random_inputs, relative_l2

quick = settings(max_examples=40, deadline=None)
FLOAT64 = 1e-9  # of two float64 computations in another order, states and inputs of order one


def subset(inputs: delta_net.Inputs, tokens: list[int]) -> delta_net.Inputs:
    """The inputs of these tokens only."""
    return replace(inputs, **{name: getattr(inputs, name)[tokens] for name in ("q", "k", "v", "alpha", "b")})


@quick
@given(parent_lists(max_nodes=40))
def test_ancestors_are_those_of_the_walk(parents: list[int]) -> None:
    reach = topology.ancestor_matrix(parents)
    for node in range(len(parents)):
        assert np.flatnonzero(reach[node]).tolist() == sorted(path_to(parents, node))


@quick
@given(layers(), parent_lists(max_nodes=24), st.integers(0, 2**32 - 1))
def test_factorised_and_serial_references_agree(dims: Dims, parents: list[int], seed: int) -> None:
    """Outputs of every node and the state after every path."""
    dims = replace(dims, s_k=16, s_v=min(dims.s_v, 32))
    inputs = random_inputs(dims, len(parents), seed)
    start = np.random.default_rng(seed).normal(size=(dims.n_heads_v, dims.s_k, dims.s_v))
    heads = [topology.solve_head(start[h], inputs, parents, h) for h in range(dims.n_heads_v)]
    for node in range(len(parents)):
        path = path_to(parents, node)
        outputs, states = delta_net.run_path(start, inputs, path)
        for h, factors in enumerate(heads):
            assert relative_l2(factors.output[node], outputs[h]) < FLOAT64
            assert relative_l2(topology.state_after(start[h], factors, path), states[h]) < FLOAT64


@pytest.mark.native
@quick
@given(layers(), parent_lists(), st.integers(0, 2**32 - 1), st.integers(0, 6))
def test_native_tree_equals_the_factorised_reference(
    dims: Dims, parents: list[int], seed: int, n_pending: int
) -> None:
    """Outputs, factor rows as stored in the bank, and the state after a random accepted path, pending rows folded."""
    n = len(parents)
    inputs = random_inputs(dims, n + n_pending, seed)
    before, nodes = list(range(n, n + n_pending)), list(range(n))
    layer = Layer(dims, seed=seed)
    start = layer.durable().transpose(0, 2, 1).astype(np.float64)
    if before:
        layer.call(inputs, before, list(range(-1, n_pending - 1)))
        layer.accept(list(range(n_pending)))
        start, _ = committed(start, subset(inputs, before), list(range(-1, n_pending - 1)), list(range(n_pending)))
    outputs = layer.call(inputs, nodes, parents)
    bank_u = view(layer.bank_u)[layer.banks[0][1]].reshape(dims.n_rows, dims.n_heads_v, dims.s_v + 4)
    path = path_to(parents, seed % n)
    expected, heads = committed(start, subset(inputs, nodes), parents, path)
    for h, factors in enumerate(heads):
        assert relative_l2(outputs[:n, h], factors.output) < REL_L2
        assert relative_l2(bank_u[:n, h, : dims.s_v], factors.u) < REL_L2
    layer.accept(path)
    assert relative_l2(layer.flush(inputs).transpose(0, 2, 1), expected) < REL_L2
    layer.close()


def committed(
    start: np.ndarray, inputs: delta_net.Inputs, parents: list[int], path: list[int]
) -> tuple[np.ndarray, list[topology.Factors]]:
    """States (H_v, S_k, S_v) after accepting `path`, and every head's factors."""
    heads = [topology.solve_head(start[h], inputs, parents, h) for h in range(len(start))]
    return np.stack([topology.state_after(start[h], f, path) for h, f in enumerate(heads)]), heads
