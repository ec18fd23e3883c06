"""What DSpark adds to DFlash: a low-rank Markov head that chains the slots of a block, and a confidence head.

The logits of slot i get w2 (w1[previous token]) added. The greedy chain is part of the block's graph: the id that
slot i - 1 chose never leaves the device. Where a device cannot look tokens up in w1 the block leaves its logits in a
BlockMemory, and every step of the chain is a graph of its own that is handed a row of w1.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyggml_spec.ggml import F32, I32, Backend, Context, Graph, Tensor, ops, spec_ops
from pyggml_spec.gguf_io.weights import Weights


@dataclass(frozen=True)
class MarkovHead:
    """The head's tables: w1 is read by target ids, w2 has a row for every row of the output head."""

    w1: Tensor  # [rank, n_vocab_target]
    w2: Tensor  # [rank, n_rows or more]
    draft_to_target: Tensor | None  # i32 [1, n_rows] of a reduced vocabulary
    confidence: Tensor | None  # f32 [n_embd + rank]
    confidence_bias: Tensor | None  # f32 [1]

    def target_ids(self, graph: Graph, ids: Tensor) -> Tensor:
        """Target ids of drafted ids i32 [n]."""
        if self.draft_to_target is None:
            return ids
        return ops.reshape(graph.context, ops.get_rows(graph.context, self.draft_to_target, ids), [ids.ne[0]])

    def biased(self, graph: Graph, logits: Tensor, row: Tensor) -> Tensor:
        """Logits [n_rows, 1] with the bias of a row [rank, 1] of w1 added."""
        bias = ops.mul_mat(graph.context, self.w2, row)
        if bias.ne[0] > logits.ne[0]:  # rows that the output head does not have
            bias = ops.view(graph.context, bias, [logits.ne[0], 1], [bias.nb[1]])
        return ops.add(graph.context, bias, logits)


def markov_head(graph: Graph, weights: Weights) -> MarkovHead:
    """The head as graph tensors."""
    ctx, table = graph.context, weights.find("d2t")
    return MarkovHead(
        w1=weights["markov_w1.weight"],
        w2=weights["markov_w2.weight"],
        draft_to_target=None if table is None else ops.reshape(ctx, table, [1, table.ne[0]]),
        confidence=weights.find("conf_proj.weight"),
        confidence_bias=weights.find("conf_proj.bias"),
    )


def chain(graph: Graph, head: MarkovHead, logits: Tensor, anchor: Tensor, k: int) -> Tensor:
    """The greedy chain over logits [n_rows, n]: i32 [2k, n], per slot the best k after the slots before it.

    anchor i32 [1]; the words are those of `spec_ops.top_k` with log-probabilities.
    """
    ctx, (n_rows, n) = graph.context, logits.ne[:2]
    previous, rows = anchor, []
    for i in range(n):
        slot = ops.view(ctx, logits, [n_rows, 1], [logits.nb[1]], i * logits.nb[1])
        biased = head.biased(graph, slot, ops.get_rows(ctx, head.w1, previous))
        rows.append(spec_ops.top_k(ctx, biased, k, logprobs=True).named(f"markov_top-{i}"))
        previous = head.target_ids(graph, ops.view(ctx, rows[-1], [1]))
    result = rows[0]
    for row in rows[1:]:
        result = ops.concat(ctx, result, row, axis=1)
    return result


def confidence_logits(graph: Graph, head: MarkovHead, hidden: Tensor, previous_rows: Tensor) -> Tensor:
    """w . [hidden ; w1[previous]] + b for hidden [n_embd, n] and rows of w1 [rank, n]: f32 [1, n]."""
    ctx, n_embd, w = graph.context, hidden.ne[0], head.confidence
    assert w is not None, "the caller has asked whether there is a confidence head"
    score = ops.mul_mat(ctx, ops.view(ctx, w, [n_embd]), hidden)
    score = ops.add(ctx, score, ops.mul_mat(ctx, ops.view(ctx, w, [w.ne[0] - n_embd], [], 4 * n_embd), previous_rows))
    return score if head.confidence_bias is None else ops.add(ctx, score, head.confidence_bias)


def chain_confidence(graph: Graph, head: MarkovHead, hidden: Tensor, chained: Tensor, anchor: Tensor) -> Tensor:
    """Confidence logits [1, n] of the slots of a chain, `chained` as `chain` returns it."""
    previous = anchor
    if hidden.ne[1] > 1:
        chosen = ops.view(graph.context, chained, [1, hidden.ne[1] - 1], [chained.nb[1]])
        chosen = ops.reshape(graph.context, ops.contiguous(graph.context, chosen), [hidden.ne[1] - 1])
        previous = ops.concat(graph.context, anchor, head.target_ids(graph, chosen), axis=0)
    return confidence_logits(graph, head, hidden, ops.get_rows(graph.context, head.w1, previous))


def pair_scores(graph: Graph, head: MarkovHead, candidates: Tensor, predecessors: Tensor) -> Tensor:
    """Biases w2[c] . w1[p] between neighbouring slots: f32 [k, n_predecessors * (n - 1)].

    candidates i32 [k, n] and predecessors i32 [n_predecessors, n] hold drafted ids; the columns of the result are,
    slot by slot from the second, one per predecessor of the slot before.
    """
    ctx, (k, n), n_before = graph.context, candidates.ne[:2], predecessors.ne[0]
    before = ops.reshape(ctx, predecessors, [n_before * n])
    before = head.target_ids(graph, ops.view(ctx, before, [n_before * (n - 1)]))
    before = ops.get_rows(ctx, head.w1, before)
    after = ops.view(ctx, ops.reshape(ctx, candidates, [k * n]), [k * (n - 1)], [], 4 * k)
    after = ops.get_rows(ctx, head.w2, after)
    rank = before.ne[0]
    before = ops.reshape(ctx, before, [rank, n_before, n - 1])
    pairs = ops.mul_mat(ctx, ops.reshape(ctx, after, [rank, k, n - 1]), before)
    return ops.reshape(ctx, pairs, [k, n_before * (n - 1)])


@dataclass(frozen=True)
class BlockMemory:
    """What a block leaves for the steps of its chain; n = draft horizon."""

    logits: Tensor  # f32 [n_rows, n], before any bias
    hidden: Tensor  # f32 [n_embd, n]


@dataclass(frozen=True)
class StepGraph:
    """One step: fill `slot` i32 [1] and `row` of w1 f32 [rank, 1]; read `top` i32 [2k, 1], `confidence` f32 [1]."""

    graph: Graph
    slot: Tensor
    row: Tensor
    top: Tensor
    confidence: Tensor | None


def why_not_fused(backend: Backend, weights: Weights) -> str | None:
    """The reason why the chain cannot be part of the block's graph on this device; None = it can."""
    with Context(8) as ctx:
        ids = ctx.new_tensor(I32, [1], "ids")
        for name in ("markov_w1.weight", "markov_w2.weight"):
            table = weights[name]
            if not backend.supports(ops.get_rows(ctx, table, ids)):
                return f"{backend.device.name} has no kernel that looks up rows of type {table.type.name} ({name})"
        if not backend.supports(ops.concat(ctx, ids, ids, axis=0)):
            return f"{backend.device.name} has no kernel that joins token ids"
    return None


def build_step(graph: Graph, weights: Weights, memory: BlockMemory, k: int) -> StepGraph:
    """One step of a chain: the best k of a slot after a token."""
    ctx, head = graph.context, markov_head(graph, weights)
    slot, row = graph.input(I32, [1], "slot"), graph.input(F32, [head.w1.ne[0], 1], "markov_row")
    logits = head.biased(graph, ops.get_rows(ctx, memory.logits, slot), row)
    top = graph.output(spec_ops.top_k(ctx, logits, k, logprobs=True))
    confidence = None
    if head.confidence is not None:
        confidence = graph.output(confidence_logits(graph, head, ops.get_rows(ctx, memory.hidden, slot), row))
    graph.place()
    return StepGraph(graph, slot, row, top, confidence)
