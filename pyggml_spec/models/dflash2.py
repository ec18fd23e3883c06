"""What DFlash2 adds to DFlash: a dynamic convolution before and after every sub-layer, and a candidate selector.

The convolution runs over the slots of a block, causally; its weights are learned per channel plus computed per channel
group from the sub-layer's input. The selector scores neighbouring candidates; the path is searched on the host.
"""

from __future__ import annotations

from pyggml_spec.ggml import Graph, Tensor, ops
from pyggml_spec.gguf_io.weights import Weights


def conv_weights(graph: Graph, x: Tensor, projection: Tensor, base: Tensor, group_size: int) -> Tensor:
    """Tap weights of a sub-layer with input x [n_embd, N]: f32 [n_embd, 2 * taps, N], the taps of side 0 first.

    base f32 [n_embd, taps, 2]; projection [n_embd, 2 * taps * n_groups], groups fastest, sides slowest.
    """
    ctx, (n_embd, n_slots) = graph.context, x.ne[:2]
    n_groups, n_rows = n_embd // group_size, base.ne[1] * base.ne[2]
    dynamic = ops.reshape(ctx, ops.mul_mat(ctx, projection, x), [1, n_groups, n_rows, n_slots])
    dynamic = ops.repeat(ctx, dynamic, [group_size, n_groups, n_rows, n_slots])
    weights = ops.add(ctx, dynamic, ops.reshape(ctx, base, [group_size, n_groups, n_rows]))
    return ops.reshape(ctx, weights, [n_embd, n_rows, n_slots])


def convolve(graph: Graph, x: Tensor, weights: Tensor, side: int) -> Tensor:
    """Sum over taps t of x[slot - t] * weights[side, t](slot), x [n_embd, N]; slots before the block count as zero."""
    ctx, (n_embd, n_slots) = graph.context, x.ne[:2]
    n_taps = weights.ne[1] // 2

    def tap(t: int) -> Tensor:
        """Weights of tap t for the slots that have a slot t places before them."""
        offset = (side * n_taps + t) * weights.nb[1] + t * weights.nb[2]
        return ops.view(ctx, weights, [n_embd, n_slots - t], [weights.nb[2]], offset)

    y = ops.mul(ctx, x, tap(0))
    for t in range(1, min(n_taps, n_slots)):
        earlier = ops.view(ctx, x, [n_embd, n_slots - t], [x.nb[1]])
        reached = ops.view(ctx, y, [n_embd, n_slots - t], [y.nb[1]], t * y.nb[1])
        reached = ops.add(ctx, ops.mul(ctx, earlier, tap(t)), reached)
        y = ops.concat(ctx, ops.view(ctx, y, [n_embd, t], [y.nb[1]]), reached, axis=1)
    return y


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
