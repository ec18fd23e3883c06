"""`dflash` drafters: a small block-diffusion transformer that reads target features as its context.

One graph injects K/V of newly committed features into the drafter's cache and runs one block over
[committed features, block]; the block's own K/V go to cells that the next block overwrites. DSpark and DFlash2
drafters are this transformer with other heads (dspark.py, dflash2.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pyggml_spec.ggml import Graph, Tensor, ops, spec_ops
from pyggml_spec.gguf_io.weights import Weights
from pyggml_spec.models import dflash2, dspark
from pyggml_spec.models.layers import PackedInputs, feed_forward, following_norm, heads, project
from pyggml_spec.records import DrafterConfig
from pyggml_spec.state.features import FeatureRing
from pyggml_spec.state.kv_cells import KvCache

_NODES_PER_LAYER = 56
_NODES_PER_SLOT = 12
TREE_CANDIDATES = 16  # per slot, before any token is known; a DFlash2 chain searches as many as its file says


@dataclass(frozen=True)
class DrafterState:
    """What all sequences of a drafter share on the device; `features` is the target's ring."""

    kv: KvCache
    features: FeatureRing


@dataclass(frozen=True)
class SharedTables:
    """Embedding table and output head the drafter works with: the target's, unless its file brings its own.

    `generation` is that of the weights they belong to: graphs of an older one point at freed memory.
    """

    embeddings: Tensor  # [n_embd, n_vocab]
    head: Tensor  # [n_embd, n_vocab]
    generation: int = 0


@dataclass(frozen=True)
class DrafterGraph:
    """A built graph and its results by name; empty when it only injects. n = draft horizon, ids are the head's rows.

    top         i32 [2k, n]  the best k of each slot whatever came before, ids then log-probabilities; for a DSpark or
                             DFlash2 drafter the candidates that `pairs` scores
    chain       i32 [2k, n]  DSpark: the best k of each slot after the slots before it, greedily
    pairs       f32 [k, ..]  DSpark, DFlash2: scores of neighbouring candidates (see dspark.py, dflash2.py)
    confidence  f32 [1, n]   DSpark with a confidence head: logits along the chain
    """

    graph: Graph
    inputs: PackedInputs
    n_inject: int
    results: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Build:
    graph: Graph
    config: DrafterConfig
    weights: Weights
    state: DrafterState
    tables: SharedTables
    inputs: PackedInputs

    @property
    def anchor(self) -> Tensor:
        """The anchor's id, i32 [1]."""
        return ops.view(self.graph.context, self.inputs.tensors["tokens"], [1])


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
    k = ops.reshape(ctx, spread(b, rotate(b, k, pos)), [c.head_dim * c.n_heads_kv, k.ne[2]])
    ids = b.inputs.tensors[cells]
    return ops.set_rows(ctx, b.state.kv.k[i], k, ids), ops.set_rows(ctx, b.state.kv.v[i], v, ids)


def rotate(b: _Build, x: Tensor, pos: str) -> Tensor:
    """Rotary embedding of x [D, H, N], with the file's YaRN scaling if it has one."""
    c, yarn = b.config, b.config.rope_scaling
    options: dict[str, Any] = {} if yarn is None else {
        "n_ctx_original": yarn.n_ctx_original,
        "factor": yarn.factor,
        "yarn_mix": 1.0,
        "attention_factor": yarn.attention_factor,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }  # fmt: skip
    return ops.rope(
        b.graph.context, x, b.inputs.tensors[pos], n_dims=c.rope_dims or c.head_dim, theta=c.rope_theta, **options
    )


def spread(b: _Build, x: Tensor) -> Tensor:
    """Queries or keys x [D, H, N] as the cache wants them: every head multiplied by its rotation, if it has one."""
    return x if b.state.kv.rotation is None else ops.mul_mat(b.graph.context, b.state.kv.rotation, x)


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
    q = spread(b, rotate(b, q, "pos")).named(f"Qcur-{i}")
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


def build_sublayer(b: _Build, y: Tensor, i: int, part: Literal["attn", "ffn"]) -> Tensor:
    """Attention or feed-forward of layer i over normed inputs y [n_embd, B]."""
    return build_attention(b, y, i) if part == "attn" else feed_forward(b.graph, b.weights, y, f"blk.{i}.")


def build_convolved(b: _Build, y: Tensor, i: int, part: Literal["attn", "ffn"]) -> Tensor:
    """A sub-layer of DFlash2: between two convolutions over the slots, whose weights its inputs y [n_embd, B] shape."""
    ctx, p = b.graph.context, f"blk.{i}.{part}"
    base, dynamic = b.weights[p + "_conv_base"], ops.mul_mat(ctx, b.weights[p + "_conv_proj.weight"], y)
    y = spec_ops.block_conv(ctx, y, dynamic, base, side=0).named(f"{part}_conv_in-{i}")
    y = build_sublayer(b, y, i, part)
    return spec_ops.block_conv(ctx, y, dynamic, base, side=1).named(f"{part}_conv_out-{i}")


def build_layer(b: _Build, x: Tensor, y: Tensor, i: int) -> tuple[Tensor, Tensor]:
    """One block: attention and feed-forward, each reading the normed stream y and added to the stream x, [n_embd, B].

    Returns both as the next layer reads them, after the last one as the output head does.
    """
    c, ctx = b.config, b.graph.context
    build = build_convolved if c.kind == "dflash2" else build_sublayer
    x, y = spec_ops.add_rms_norm(ctx, build(b, y, i, "attn"), x, b.weights[f"blk.{i}.ffn_norm.weight"], c.norm_eps)
    x, y = x.named(f"ffn_inp-{i}"), y.named(f"ffn_norm-{i}")
    norm, name = following_norm(i, c.n_layers)
    x, y = spec_ops.add_rms_norm(ctx, build(b, y, i, "ffn"), x, b.weights[norm], c.norm_eps)
    return x.named(f"l_out-{i}"), y.named(name)


def build_block(b: _Build) -> Tensor:
    """Hidden states [n_embd, draft_horizon] of the slots that predict, after the final norm."""
    c, ctx = b.config, b.graph.context
    x = ops.get_rows(ctx, b.tables.embeddings, b.inputs.tensors["tokens"]).named("inp_embd")
    if c.embedding_scale != 1.0:
        x = ops.scale(ctx, x, c.embedding_scale)
    y = ops.rms_norm(ctx, x, b.weights["blk.0.attn_norm.weight"], c.norm_eps).named("attn_norm-0")
    for i in range(c.n_layers):
        x, y = build_layer(b, x, y, i)
    first = c.draft_block_size - c.draft_horizon
    return ops.view(ctx, y, [c.n_embd, c.draft_horizon], [y.nb[1]], first * y.nb[1])


def build_logits(b: _Build, hidden: Tensor) -> Tensor:
    """Logits [n_rows, draft_horizon], scaled and soft-capped as the file says."""
    c, ctx = b.config, b.graph.context
    logits = ops.mul_mat(ctx, b.tables.head, hidden)
    n_rows = n_head_rows(c, b.tables)
    if n_rows < logits.ne[0]:
        logits = ops.contiguous(ctx, ops.view(ctx, logits, [n_rows, logits.ne[1]], [logits.nb[1]]))
    if c.logit_scale != 1.0:
        logits = ops.scale(ctx, logits, c.logit_scale)
    if c.final_logit_softcapping:
        capped = ops.tanh(ctx, ops.scale(ctx, logits, 1.0 / c.final_logit_softcapping))
        logits = ops.scale(ctx, capped, c.final_logit_softcapping)
    return logits.named("result_output")


def n_head_rows(config: DrafterConfig, tables: SharedTables) -> int:
    """Rows of the output head that may be drafted: a Markov head or a selector must know the id as well."""
    n_rows = tables.head.ne[1]
    return n_rows if config.kind == "dflash" else min(n_rows, config.n_vocab)


def n_anchor_ids(config: DrafterConfig, tables: SharedTables) -> int:
    """Ids below this one can be drafted from: embeddings and heads have a row for them."""
    n_rows = tables.embeddings.ne[1]
    return n_rows if config.kind == "dflash" else min(n_rows, config.n_vocab_target)


def build_markov(b: _Build, hidden: Tensor, logits: Tensor, top_k: int) -> dict[str, Tensor]:
    """Results of a DSpark drafter; what only trees need is left out for top_k = 1."""
    g, ctx = b.graph, b.graph.context
    head = dspark.markov_head(g, b.weights)
    results = {"chain": dspark.chain(g, head, logits, b.anchor, top_k)}
    if head.confidence is not None:
        results["confidence"] = dspark.chain_confidence(g, head, hidden, results["chain"], b.anchor)
    if top_k > 1 and b.config.draft_horizon > 1:
        n_candidates = min(TREE_CANDIDATES, logits.ne[0])
        results["top"] = spec_ops.top_k(ctx, logits, n_candidates, logprobs=True)
        candidates, chained = _ids(g, results["top"]), _ids(g, results["chain"])
        predecessors = ops.concat(ctx, candidates, chained, axis=0)
        results["pairs"] = dspark.pair_scores(g, head, candidates, predecessors)
    return results


def build_selector(b: _Build, hidden: Tensor, logits: Tensor, top_k: int) -> dict[str, Tensor]:
    """Results of a DFlash2 drafter."""
    g, n_candidates = b.graph, b.config.selector_top_k if top_k == 1 else TREE_CANDIDATES
    n_candidates = min(n_candidates, logits.ne[0])
    top = spec_ops.top_k(g.context, logits, n_candidates, logprobs=True)
    candidates = _ids(g, top)
    if "d2t" in b.weights:
        flat = ops.reshape(g.context, candidates, [n_candidates * top.ne[1]])
        rows = ops.get_rows(g.context, ops.reshape(g.context, b.weights["d2t"], [1, logits.ne[0]]), flat)
        candidates = ops.reshape(g.context, rows, [n_candidates, top.ne[1]])
    return {"top": top, "pairs": dflash2.pair_scores(g, b.weights, hidden, candidates, b.anchor)}


def _ids(graph: Graph, top: Tensor) -> Tensor:
    """The ids of a top-k result as a dense i32 [k, n]."""
    return ops.contiguous(graph.context, ops.view(graph.context, top, [top.ne[0] // 2, top.ne[1]], [top.nb[1]]))


def build_heads(b: _Build, top_k: int, memory: dspark.BlockMemory | None) -> dict[str, Tensor]:
    """The block and what its drafter's kind makes of it; with a memory, the block is left there for a stepped chain."""
    hidden = build_block(b)
    logits = build_logits(b, hidden)
    if memory is not None:
        b.graph.expand(ops.copy(b.graph.context, logits, memory.logits))
        b.graph.expand(ops.copy(b.graph.context, hidden, memory.hidden))
        return {}
    if b.config.kind == "dspark":
        return build_markov(b, hidden, logits, top_k)
    if b.config.kind == "dflash2":
        return build_selector(b, hidden, logits, top_k)
    return {"top": spec_ops.top_k(b.graph.context, logits, top_k, logprobs=True)}


def build_drafter(
    graph: Graph,
    config: DrafterConfig,
    weights: Weights,
    state: DrafterState,
    tables: SharedTables,
    *,
    n_inject: int,
    top_k: int,
    memory: dspark.BlockMemory | None = None,
) -> DrafterGraph:
    """Inject `n_inject` feature rows, then draft one block; `top_k` = 0 injects only."""
    inputs = PackedInputs.create(graph, _input_sizes(config, n_inject, top_k))
    b = _Build(graph, config, weights, state, tables, inputs)
    inject_features(b)
    results = build_heads(b, top_k, memory) if top_k else {}
    for name, tensor in results.items():
        graph.output(tensor.named(f"result_{name}"))
    graph.place()
    return DrafterGraph(graph, inputs, n_inject, results)


def n_graph_nodes(config: DrafterConfig) -> int:
    """Room that a drafter graph needs."""
    return _NODES_PER_LAYER * config.n_layers + _NODES_PER_SLOT * config.draft_block_size + 96


def _input_sizes(config: DrafterConfig, n_inject: int, top_k: int) -> dict[str, int]:
    sizes = {"inject_rows": n_inject, "inject_pos": n_inject, "inject_cells": n_inject}
    if top_k:
        n = config.draft_block_size
        sizes |= {"tokens": n, "pos": n, "cells": n, "nodes": spec_ops.NODES_HEADER + 2 * n}
    return sizes
