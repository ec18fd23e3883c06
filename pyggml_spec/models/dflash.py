"""`dflash` drafters: a small block-diffusion transformer that reads target features as its context.

One graph injects K/V of newly committed features into the drafter's cache and runs one block over
[committed features, block]; the block's own K/V go to cells that the next block overwrites.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyggml_spec.ggml import Graph, Tensor, ops, spec_ops
from pyggml_spec.gguf_io.weights import Weights
from pyggml_spec.models.layers import PackedInputs, feed_forward, heads, project
from pyggml_spec.records import DrafterConfig
from pyggml_spec.state.features import FeatureRing
from pyggml_spec.state.kv_cells import KvCache

_NODES_PER_LAYER = 48


@dataclass(frozen=True)
class DrafterState:
    """What all sequences of a drafter share on the device; `features` is the target's ring."""

    kv: KvCache
    features: FeatureRing


@dataclass(frozen=True)
class SharedTables:
    """Embedding table and output head the drafter works with: the target's, unless its file brings its own."""

    embeddings: Tensor  # [n_embd, n_vocab]
    head: Tensor  # [n_embd, n_vocab]


@dataclass(frozen=True)
class DrafterGraph:
    """A built graph; `result` is i32 [2k, draft_horizon]: ids, then log-probabilities; None when it only injects."""

    graph: Graph
    inputs: PackedInputs
    n_inject: int
    result: Tensor | None


@dataclass(frozen=True)
class _Build:
    graph: Graph
    config: DrafterConfig
    weights: Weights
    state: DrafterState
    inputs: PackedInputs


def drafter_stacks(config: DrafterConfig) -> dict[str, tuple[str, ...]]:
    """Projections that read one input: stack name -> parts."""
    stacks: dict[str, tuple[str, ...]] = {}
    for i in range(config.n_layers):
        p = f"blk.{i}."
        stacks[p + "attn_qkv"] = (p + "attn_q.weight", p + "attn_k.weight", p + "attn_v.weight")
        stacks[p + "ffn_gate_up"] = (p + "ffn_gate.weight", p + "ffn_up.weight")
    return stacks


def write_keys_values(b: _Build, k: Tensor, v: Tensor, i: int, pos: str, cells: str) -> tuple[Tensor, Tensor]:
    """Norm and rotate keys k [D * H_kv, N], then store both; returns the layer's cache tensors."""
    c, g, ctx = b.config, b.graph, b.graph.context
    k = ops.rms_norm(ctx, heads(g, k, c.head_dim, c.n_heads_kv), b.weights[f"blk.{i}.attn_k_norm.weight"], c.norm_eps)
    k = ops.reshape(ctx, rotate(b, k, pos), [c.head_dim * c.n_heads_kv, k.ne[2]])
    ids = b.inputs.tensors[cells]
    return ops.set_rows(ctx, b.state.kv.k[i], k, ids), ops.set_rows(ctx, b.state.kv.v[i], v, ids)


def rotate(b: _Build, x: Tensor, pos: str) -> Tensor:
    """Rotary embedding over the whole head, x [D, H, N], with the file's YaRN scaling if it has one."""
    c, yarn = b.config, b.config.rope_scaling
    options = {} if yarn is None else {
        "n_ctx_original": yarn.n_ctx_original,
        "factor": yarn.factor,
        "yarn_mix": 1.0,
        "attention_factor": yarn.attention_factor,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }  # fmt: skip
    return ops.rope(
        b.graph.context, x, b.inputs.tensors[pos], n_dims=c.head_dim, theta=c.rope_theta, **options
    )


def inject_features(b: _Build) -> None:
    """K/V of the features named by `inject_rows`, for every layer."""
    c, g, ctx = b.config, b.graph, b.graph.context
    rows = ops.get_rows(ctx, b.state.features.tensor, b.inputs.tensors["inject_rows"])
    x = ops.mul_mat(ctx, b.weights["fc.weight"], rows)
    x = ops.rms_norm(ctx, x, b.weights["enc.output_norm.weight"], c.norm_eps).named("features_norm")
    for i in range(c.n_layers):
        k, v = project(g, b.weights, f"blk.{i}.attn_qkv", x, parts=range(1, 3))
        for written in write_keys_values(b, k, v, i, "inject_pos", "inject_cells"):
            g.expand(written)


def build_attention(b: _Build, x: Tensor, i: int) -> Tensor:
    """Attention of layer i over committed features and block, x [n_embd, B]."""
    c, g, ctx, p = b.config, b.graph, b.graph.context, f"blk.{i}."
    q, k, v = project(g, b.weights, p + "attn_qkv", x)
    q = ops.rms_norm(ctx, heads(g, q, c.head_dim, c.n_heads), b.weights[p + "attn_q_norm.weight"], c.norm_eps)
    q = rotate(b, q, "pos").named(f"Qcur-{i}")
    k, v = write_keys_values(b, k, v, i, "pos", "cells")
    slides = bool(c.sliding_layers) and c.sliding_layers[i]
    out = spec_ops.attention(
        ctx,
        q=q,
        k=k,
        v=v,
        nodes=b.inputs.tensors["nodes"],
        committed=b.state.kv.committed,
        scale=c.head_dim**-0.5,
        window=c.sliding_window if slides else 0,
        visibility=spec_ops.VISIBLE_ANCESTORS if c.causal else spec_ops.VISIBLE_BLOCK,
    ).named(f"kqv_out-{i}")
    return ops.mul_mat(ctx, b.weights[p + "attn_output.weight"], out).named(f"attn_out-{i}")


def build_layer(b: _Build, x: Tensor, i: int) -> Tensor:
    """One block: attention and feed-forward, each after a norm and beside a residual."""
    c, ctx, p = b.config, b.graph.context, f"blk.{i}."
    y = ops.rms_norm(ctx, x, b.weights[p + "attn_norm.weight"], c.norm_eps).named(f"attn_norm-{i}")
    x = ops.add(ctx, build_attention(b, y, i), x).named(f"ffn_inp-{i}")
    y = ops.rms_norm(ctx, x, b.weights[p + "ffn_norm.weight"], c.norm_eps).named(f"ffn_norm-{i}")
    return ops.add(ctx, feed_forward(b.graph, b.weights, y, p), x).named(f"l_out-{i}")


def build_block(b: _Build, tables: SharedTables) -> Tensor:
    """Hidden states [n_embd, draft_horizon] of the slots that predict, after the final norm."""
    c, ctx = b.config, b.graph.context
    x = ops.get_rows(ctx, tables.embeddings, b.inputs.tensors["tokens"]).named("inp_embd")
    if c.embedding_scale != 1.0:
        x = ops.scale(ctx, x, c.embedding_scale)
    for i in range(c.n_layers):
        x = build_layer(b, x, i)
    x = ops.rms_norm(ctx, x, b.weights["output_norm.weight"], c.norm_eps).named("result_norm")
    first = c.draft_block_size - c.draft_horizon
    return ops.view(ctx, x, [c.n_embd, c.draft_horizon], [x.nb[1]], first * x.nb[1])


def build_logits(b: _Build, hidden: Tensor, tables: SharedTables) -> Tensor:
    """Logits [n_vocab, draft_horizon], scaled and soft-capped as the file says."""
    c, ctx = b.config, b.graph.context
    logits = ops.mul_mat(ctx, tables.head, hidden)
    if c.logit_scale != 1.0:
        logits = ops.scale(ctx, logits, c.logit_scale)
    if c.final_logit_softcapping:
        capped = ops.tanh(ctx, ops.scale(ctx, logits, 1.0 / c.final_logit_softcapping))
        logits = ops.scale(ctx, capped, c.final_logit_softcapping)
    return logits.named("result_output")


def build_drafter(
    graph: Graph,
    config: DrafterConfig,
    weights: Weights,
    state: DrafterState,
    tables: SharedTables,
    *,
    n_inject: int,
    top_k: int,
) -> DrafterGraph:
    """Inject `n_inject` feature rows, then draft one block; `top_k` = 0 injects only."""
    b = _Build(graph, config, weights, state, PackedInputs.create(graph, _input_sizes(config, n_inject, top_k)))
    inject_features(b)
    result = None
    if top_k:
        logits = build_logits(b, build_block(b, tables), tables)
        result = graph.output(spec_ops.top_k(graph.context, logits, top_k, logprobs=True).named("result_top"))
    graph.place()
    return DrafterGraph(graph, b.inputs, n_inject, result)


def n_graph_nodes(config: DrafterConfig) -> int:
    """Room that a drafter graph needs."""
    return _NODES_PER_LAYER * config.n_layers + 48


def _input_sizes(config: DrafterConfig, n_inject: int, top_k: int) -> dict[str, int]:
    sizes = {"inject_rows": n_inject, "inject_pos": n_inject, "inject_cells": n_inject}
    if top_k:
        n = config.draft_block_size
        sizes |= {"tokens": n, "pos": n, "cells": n, "nodes": spec_ops.NODES_HEADER + 2 * n}
    return sizes
