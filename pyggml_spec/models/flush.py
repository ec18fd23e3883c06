"""The graph that folds pending rows into the durable state and does nothing else: no product with a weight in it."""

from __future__ import annotations

from pyggml_spec.ggml import F32, Graph, Tensor, ops, spec_ops
from pyggml_spec.gguf_io.weights import Weights
from pyggml_spec.models.layers import PackedInputs
from pyggml_spec.records import TargetConfig
from pyggml_spec.state.recurrent import LayerState, RecurrentState

_NODES_PER_LAYER = 12
_L2_NORM_EPS = 1e-6  # has no say: a flush normalises nothing


def build_flush(graph: Graph, config: TargetConfig, weights: Weights, state: RecurrentState) -> PackedInputs:
    """All recurrent layers over one column that no node names; `host["schedule"]` says what to fold and where."""
    words = spec_ops.SCHEDULE_HEADER + spec_ops.SCHEDULE_NODE_WORDS + state.n_rows
    inputs = PackedInputs.create(graph, {"schedule": words})
    column = graph.input(F32, [config.n_conv_channels + 2 * config.n_heads_v, 1], "unread")
    for i, layer in state.layers.items():
        _fold_layer(graph, config, weights, layer, i, column, inputs.tensors["schedule"])
    graph.place()
    return inputs


def n_graph_nodes(config: TargetConfig) -> int:
    """Room that a flush graph needs."""
    return _NODES_PER_LAYER * config.n_layers + 8


def _fold_layer(
    graph: Graph, config: TargetConfig, weights: Weights, layer: LayerState, i: int, column: Tensor, schedule: Tensor
) -> None:
    c, ctx, p = config, graph.context, f"blk.{i}."
    s, h_k, h_v = c.state_size, c.n_heads_k, c.n_heads_v

    def part(ne: list[int], first: int) -> Tensor:
        strides = [4 * ne[0], 4 * ne[0] * ne[1]][: len(ne) - 1]
        return ops.view(ctx, column, ne, strides, 4 * first)

    x = part([c.n_conv_channels, 1], 0)
    graph.expand(
        spec_ops.conv_tree(ctx, x, weights[p + "ssm_conv1d.weight"], layer.window, layer.bank_x, schedule)
    )
    out = spec_ops.delta_net_tree(
        ctx,
        q=part([s, h_k, 1], 0),
        k=part([s, h_k, 1], s * h_k),
        v=part([s, h_v, 1], 2 * s * h_k),
        alpha=part([h_v, 1], c.n_conv_channels),
        beta=part([h_v, 1], c.n_conv_channels + h_v),
        state=layer.state,
        bank_k=layer.bank_k,
        bank_u=layer.bank_u,
        schedule=schedule,
        gates=weights.stacks[p + "ssm_gates"][0].tensor,
        norm_eps=_L2_NORM_EPS,
    )
    graph.expand(out)
