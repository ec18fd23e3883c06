"""`qwen35` targets: Gated DeltaNet layers with full attention every few layers, one graph per call width.

The same builder serves prefill (a committed chain, no head) and verify (a draft tree, best tokens or logits out).
Formulas: Qwen3.5 as published; names of tensors: llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pyggml_spec.ggml import Graph, Tensor, ops, spec_ops
from pyggml_spec.gguf_io.weights import Weights
from pyggml_spec.models.layers import PackedInputs, feed_forward, following_norm, heads, project
from pyggml_spec.records import TargetConfig
from pyggml_spec.state.features import FeatureRing
from pyggml_spec.state.kv_cells import KvCache
from pyggml_spec.state.recurrent import RecurrentState

Head = Literal["none", "top", "logits"]
_L2_NORM_EPS = 1e-6  # of q and k in a DeltaNet layer; fixed by the architecture, not by a key of the file
_NODES_PER_LAYER = 40


@dataclass(frozen=True)
class TargetState:
    """What all sequences of a target share on the device."""

    kv: KvCache
    recurrent: RecurrentState
    features: FeatureRing | None
    feature_layers: tuple[int, ...]  # outputs of these layers are captured, in this order


@dataclass(frozen=True)
class TargetGraph:
    """A built graph; `result` is i32 [2k, N] (top), f32 [n_vocab, N] (logits) or None (prefill)."""

    graph: Graph
    inputs: PackedInputs
    n_columns: int
    result: Tensor | None


@dataclass(frozen=True)
class _Build:
    graph: Graph
    config: TargetConfig
    weights: Weights
    state: TargetState
    inputs: PackedInputs
    is_prefill: bool


def target_stacks(config: TargetConfig) -> dict[str, tuple[str, ...]]:
    """Projections that read one input, and the gate vectors of a recurrent layer: stack name -> parts."""
    stacks: dict[str, tuple[str, ...]] = {}
    for i, is_recurrent in enumerate(config.recurrent_layers):
        p = f"blk.{i}."
        if is_recurrent:
            names = ("attn_qkv.weight", "attn_gate.weight", "ssm_beta.weight", "ssm_alpha.weight")
            stacks[p + "attn_qkvzba"] = tuple(p + name for name in names)
            stacks[p + "ssm_gates"] = (p + "ssm_dt.bias", p + "ssm_a")
        else:
            stacks[p + "attn_qkv"] = (p + "attn_q.weight", p + "attn_k.weight", p + "attn_v.weight")
        stacks[p + "ffn_gate_up"] = (p + "ffn_gate.weight", p + "ffn_up.weight")
    return stacks


def build_attention(b: _Build, x: Tensor, i: int, layer_idx: int) -> Tensor:
    """Gated full attention of layer i, x [n_embd, N]; `layer_idx` counts attention layers only."""
    c, g, ctx, p = b.config, b.graph, b.graph.context, f"blk.{i}."
    q_and_gate, k, v = project(g, b.weights, p + "attn_qkv", x)
    q = heads(g, q_and_gate, c.head_dim, c.n_heads, stride=2 * c.head_dim)
    gate = heads(g, q_and_gate, c.head_dim, c.n_heads, stride=2 * c.head_dim, first=c.head_dim)
    k = heads(g, k, c.head_dim, c.n_heads_kv)
    q = ops.rms_norm(ctx, q, b.weights[p + "attn_q_norm.weight"], c.norm_eps)
    k = ops.rms_norm(ctx, k, b.weights[p + "attn_k_norm.weight"], c.norm_eps)
    q = ops.rope(ctx, q, b.inputs.tensors["pos"], n_dims=c.rope_dims, theta=c.rope_theta).named(f"Qcur-{i}")
    k = ops.rope(ctx, k, b.inputs.tensors["pos"], n_dims=c.rope_dims, theta=c.rope_theta).named(f"Kcur-{i}")
    if b.state.kv.rotation is not None:  # both sides alike, so their products stay the same
        q, k = (ops.mul_mat(ctx, b.state.kv.rotation, x) for x in (q, k))
    k = ops.reshape(ctx, k, [c.head_dim * c.n_heads_kv, k.ne[2]])
    cells = b.inputs.tensors["cells"]
    out = spec_ops.attention(
        ctx,
        q=q,
        k=ops.set_rows(ctx, b.state.kv.k[layer_idx], k, cells),
        v=ops.set_rows(ctx, b.state.kv.v[layer_idx], v, cells),
        nodes=b.inputs.tensors["nodes"],
        committed=b.state.kv.committed,
        scale=c.head_dim**-0.5,
        visibility=spec_ops.VISIBLE_PREFIX if b.is_prefill else spec_ops.VISIBLE_ANCESTORS,
        gate=gate,
    ).named(f"attn_gated-{i}")
    return ops.mul_mat(ctx, b.weights[p + "attn_output.weight"], out).named(f"attn_output-{i}")


def build_recurrent(b: _Build, x: Tensor, i: int) -> Tensor:
    """Gated DeltaNet of layer i, x [n_embd, N]."""
    c, g, ctx, p = b.config, b.graph, b.graph.context, f"blk.{i}."
    s, h_k, h_v, layer = c.state_size, c.n_heads_k, c.n_heads_v, b.state.recurrent.layers[i]
    schedule = b.inputs.tensors["schedule"]
    qkv, z, beta, alpha = project(g, b.weights, p + "attn_qkvzba", x)
    qkv = spec_ops.conv_tree(ctx, qkv, b.weights[p + "ssm_conv1d.weight"], layer.window, layer.bank_x, schedule)
    qkv.named(f"conv_output_silu-{i}")
    out = spec_ops.delta_net_tree(
        ctx,
        q=heads(g, qkv, s, h_k),
        k=heads(g, qkv, s, h_k, first=s * h_k),
        v=heads(g, qkv, s, h_v, first=2 * s * h_k),
        alpha=alpha,
        beta=beta,
        state=layer.state,
        bank_k=layer.bank_k,
        bank_u=layer.bank_u,
        schedule=schedule,
        gates=b.weights.stacks[p + "ssm_gates"][0].tensor,
        norm_eps=_L2_NORM_EPS,
    ).named(f"attn_output-{i}")
    out = spec_ops.gated_rms_norm(ctx, out, b.weights[p + "ssm_norm.weight"], z, c.norm_eps).named(f"final_output-{i}")
    return ops.mul_mat(ctx, b.weights[p + "ssm_out.weight"], out).named(f"linear_attn_out-{i}")


def build_layer(b: _Build, x: Tensor, y: Tensor, i: int) -> tuple[Tensor, Tensor]:
    """One block: mixer and feed-forward, each reading the normed stream y and added to the stream x, [n_embd, N].

    Returns both as the next layer reads them, after the last one as the output head does.
    """
    c, ctx, p = b.config, b.graph.context, f"blk.{i}."
    if c.recurrent_layers[i]:
        y = build_recurrent(b, y, i)
    else:
        y = build_attention(b, y, i, layer_idx=i - sum(c.recurrent_layers[:i]))
    x, y = spec_ops.add_rms_norm(ctx, y, x, b.weights[p + "post_attention_norm.weight"], c.norm_eps)
    x, y = x.named(f"attn_residual-{i}"), y.named(f"attn_post_norm-{i}")
    y = feed_forward(b.graph, b.weights, y, p)
    norm, name = following_norm(i, c.n_layers)
    x, y = spec_ops.add_rms_norm(ctx, y, x, b.weights[norm], c.norm_eps)
    return x.named(f"l_out-{i}"), y.named(name)


def capture_features(b: _Build, x: Tensor, i: int) -> None:
    """Write the output of layer i, [n_embd, N], to its part of each feature row."""
    ring = b.state.features
    if ring is None or i not in b.state.feature_layers:
        return
    part = b.state.feature_layers.index(i)
    rows = ops.view(
        b.graph.context, ring.tensor, [ring.n_embd, ring.tensor.ne[1]], [ring.tensor.nb[1]], 4 * part * ring.n_embd
    )
    b.graph.expand(ops.set_rows(b.graph.context, rows, x, b.inputs.tensors["feature_rows"]).named(f"features-{i}"))


def build_target(
    graph: Graph,
    config: TargetConfig,
    weights: Weights,
    state: TargetState,
    *,
    n_columns: int,
    head: Head,
    top_k: int = 1,
) -> TargetGraph:
    """The target over `n_columns` nodes; head "none" is prefill, the others verify."""
    inputs = PackedInputs.create(graph, _input_sizes(n_columns, state))
    b = _Build(graph, config, weights, state, inputs, is_prefill=head == "none")
    x = ops.get_rows(graph.context, weights["token_embd.weight"], inputs.tensors["tokens"]).named("inp_embd")
    y = ops.rms_norm(graph.context, x, weights["blk.0.attn_norm.weight"], config.norm_eps).named("attn_norm-0")
    for i in range(config.n_layers):
        x, y = build_layer(b, x, y, i)
        capture_features(b, x, i)
    result = None
    if head == "none":
        graph.expand(x)
    else:
        result = graph.output(build_head(b, y, head, top_k))
    graph.place()
    return TargetGraph(graph, inputs, n_columns, result)


def build_head(b: _Build, x: Tensor, head: Head, top_k: int) -> Tensor:
    """Output head over x [n_embd, N], normed: logits, or the best `top_k` of each row."""
    ctx = b.graph.context
    table = b.weights["token_embd.weight" if b.config.tied_embeddings else "output.weight"]
    logits = ops.mul_mat(ctx, table, x).named("result_output")
    return logits if head == "logits" else spec_ops.top_k(ctx, logits, top_k, logprobs=False).named("result_top")


def n_graph_nodes(config: TargetConfig) -> int:
    """Room that a target graph needs."""
    return _NODES_PER_LAYER * config.n_layers + 32


def _input_sizes(n_columns: int, state: TargetState) -> dict[str, int]:
    words = spec_ops.SCHEDULE_HEADER + spec_ops.SCHEDULE_NODE_WORDS * n_columns + state.recurrent.n_rows
    return {
        "tokens": n_columns,
        "pos": n_columns,
        "cells": n_columns,
        "feature_rows": n_columns,
        "nodes": spec_ops.NODES_HEADER + 2 * n_columns,
        "schedule": words,
    }
