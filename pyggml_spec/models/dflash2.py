"""What DFlash2 adds to DFlash besides its convolutions (an operation of its own): a candidate selector.

It scores neighbouring candidates; the path is searched on the host.
"""

from __future__ import annotations

from pyggml_spec.ggml import Graph, Tensor, ops
from pyggml_spec.gguf_io.weights import Weights


def pair_scores(graph: Graph, weights: Weights, hidden: Tensor, candidates: Tensor, anchor: Tensor) -> Tensor:
    """<successor[c], predecessor[p] * gate(slot)> for neighbouring candidates: f32 [k, 1 + k * (n - 1)].

    hidden [n_embd, n]; candidates i32 [k, n] and anchor i32 [1] hold ids of the codebooks. Column 0 scores the first
    slot's candidates after the anchor; then come, slot by slot, one column per candidate of the slot before.
    """
    ctx, (k, n) = graph.context, candidates.ne[:2]
    ids = ops.reshape(ctx, candidates, [k * n])
    gates = ops.mul_mat(ctx, weights["selector_hidden.weight"], hidden)
    rank = gates.ne[0]
    after = ops.get_rows(ctx, weights["selector_successor.weight"], ids)
    before = ops.get_rows(ctx, weights["selector_predecessor.weight"], anchor)
    before = ops.mul(ctx, before, ops.view(ctx, gates, [rank, 1], [gates.nb[1]]))
    scores = ops.mul_mat(ctx, ops.view(ctx, after, [rank, k], [after.nb[1]]), before)
    if n == 1:
        return scores
    before = ops.get_rows(ctx, weights["selector_predecessor.weight"], ops.view(ctx, ids, [k * (n - 1)]))
    before = ops.reshape(ctx, before, [rank, k, n - 1])
    before = ops.mul(ctx, before, ops.view(ctx, gates, [rank, 1, n - 1], [gates.nb[1]] * 2, gates.nb[1]))
    slot_bytes = k * after.nb[1]
    after = ops.view(ctx, after, [rank, k, n - 1], [after.nb[1], slot_bytes], slot_bytes)
    pairs = ops.mul_mat(ctx, after, before)
    return ops.concat(ctx, scores, ops.reshape(ctx, pairs, [k, k * (n - 1)]), axis=1)
