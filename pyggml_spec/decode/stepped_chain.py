"""A DSpark chain one slot at a time, for devices whose kernels cannot run it inside the block's graph.

The block's logits stay on the device; a row of w1 goes down and one up per step. What the source of a tree is asked
costs a step too, but its answers are exact for every parent.
"""

from __future__ import annotations

from collections.abc import Sequence

import gguf
import numpy as np
from numpy.typing import NDArray

from pyggml_spec.decode.draft_block import sigmoid, split_top
from pyggml_spec.decode.protocols import DraftBlock
from pyggml_spec.ggml import F32, Backend, Context, Graph, GraphArena, Tensor
from pyggml_spec.gguf_io.weights import Weights
from pyggml_spec.models import dspark
from pyggml_spec.records import DrafterConfig

_N_STEP_NODES = 24


class SteppedChain:
    """Memory for one block and the graphs of a step; valid for the weights it was made with."""

    def __init__(
        self, backend: Backend, arena: GraphArena, config: DrafterConfig, weights: Weights, n_rows: int
    ) -> None:
        self._arena, self._weights = arena, weights
        self._context = Context(2)
        self.memory = dspark.BlockMemory(
            self._context.new_tensor(F32, [n_rows, config.draft_horizon], "block_logits"),
            self._context.new_tensor(F32, [config.n_embd, config.draft_horizon], "block_hidden"),
        )
        self._buffer = backend.allocate(self._context, "the logits of a drafted block")
        self._graphs: dict[int, dspark.StepGraph] = {}

    def draft(self, anchor_id: int, n_draft: int, top_k: int, draft_to_target: NDArray[np.int32] | None) -> DraftBlock:
        """Chain the block in the memory from the anchor on."""
        steps = _Steps(self, top_k, draft_to_target)
        ids, logprobs, confidences, previous = [], [], [], anchor_id
        for slot in range(n_draft):
            row_ids, row_logprobs, confidence = steps.run(previous, slot)
            previous = int(row_ids[0])
            ids.append(row_ids)
            logprobs.append(row_logprobs)
            confidences.append(confidence)
        has_confidence = "conf_proj.weight" in self._weights
        return DraftBlock(
            np.array(ids, np.int32),
            np.array(logprobs, np.float32),
            sigmoid(np.array(confidences, np.float32)) if has_confidence else None,
            steps if top_k > 1 else None,
        )

    def graph(self, k: int) -> dspark.StepGraph:
        """The graph of one step, built at its first use."""
        built = self._graphs.get(k)
        if built is None or built.graph.is_stale:
            built = dspark.build_step(Graph(self._arena, _N_STEP_NODES), self._weights, self.memory, k)
            self._graphs[k] = built
        return built

    def markov_row(self, token_id: int) -> NDArray[np.float32]:
        """Row of w1 for a target id, (1, rank)."""
        table: Tensor = self._weights["markov_w1.weight"]
        assert not table.is_packed, "devices that pack weights look rows up by themselves"
        words = table.get_bytes(token_id * table.nb[1], table.nb[1])
        row: NDArray[np.float32] = gguf.quants.dequantize(words, gguf.GGMLQuantizationType(table.type.number))
        return np.ascontiguousarray(row, np.float32).reshape(1, -1)

    def close(self) -> None:
        """Free graphs and memory; safe to call twice."""
        for built in self._graphs.values():
            built.graph.close()
        self._graphs.clear()
        self._buffer.close()
        self._context.close()


class _Steps:
    """The steps of one block, each computed once; as a source they serve a tree until the next block is drafted."""

    def __init__(self, chain: SteppedChain, top_k: int, draft_to_target: NDArray[np.int32] | None) -> None:
        self._chain, self._top_k, self._draft_to_target = chain, top_k, draft_to_target
        self._known: dict[tuple[int, int], tuple[list[int], list[float], float]] = {}

    def __call__(self, prefix_token_ids: Sequence[int], depth: int) -> tuple[list[int], list[float]]:
        """The best top_k at `depth` after the last token of the prefix."""
        ids, logprobs, _ = self.run(prefix_token_ids[-1], depth - 1)
        return ids, logprobs

    def run(self, previous_id: int, slot: int) -> tuple[list[int], list[float], float]:
        """Ids, log-probabilities and confidence logit of a slot after a token."""
        known = self._known.get((previous_id, slot))
        if known is None:
            known = self._known[previous_id, slot] = self._compute(previous_id, slot)
        return known

    def _compute(self, previous_id: int, slot: int) -> tuple[list[int], list[float], float]:
        built = self._chain.graph(self._top_k)
        built.slot.set(np.array([slot], np.int32))
        built.row.set(self._chain.markov_row(previous_id))
        built.graph.run()
        ids, logprobs = split_top(built.top.get())
        if self._draft_to_target is not None:
            ids = self._draft_to_target[ids]
        confidence = 0.0 if built.confidence is None else float(built.confidence.get()[0, 0])
        return ids[0].tolist(), logprobs[0].tolist(), confidence
