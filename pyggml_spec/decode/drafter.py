"""A drafter on a device, and its sequences: each follows one target sequence through its captured features."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyggml_spec.decode.alone import alone
from pyggml_spec.decode.draft_block import read_block, shorten
from pyggml_spec.decode.protocols import DraftBlock
from pyggml_spec.decode.stepped_chain import SteppedChain
from pyggml_spec.decode.target_sequence import NativeTargetSequence
from pyggml_spec.errors import OptionError
from pyggml_spec.ggml import Backend, Graph, GraphArena, spec_ops
from pyggml_spec.gguf_io.weights import Weights
from pyggml_spec.models import dflash, dspark
from pyggml_spec.records import DrafterConfig
from pyggml_spec.state.cells import CellHold
from pyggml_spec.state.features import FeatureRing
from pyggml_spec.state.kv_cells import KvCache, KvTypes, SequenceCells

_INJECT_WIDTHS = (16, 64, 256, 512)  # feature rows of a graph that only injects


@dataclass(frozen=True)
class DrafterLimits:
    """Sizes fixed when a drafter is opened."""

    n_ctx: int
    n_slots: int = 1
    rotates_keys: bool = False  # by a Hadamard matrix, before they are stored


class Drafter:
    """A drafter beside its target, in the target's scratch arena: the two never run at the same time."""

    def __init__(
        self,
        backend: Backend,
        arena: GraphArena,
        config: DrafterConfig,
        weights: Weights,
        limits: DrafterLimits,
        *,
        tables: dflash.SharedTables,
        features: FeatureRing,
        kv_types: KvTypes,
    ) -> None:
        self.backend, self.config, self.weights, self.limits = backend, config, weights, limits
        self._arena, self._tables, self._kv_types = arena, tables, kv_types
        self.state = dflash.DrafterState(self._new_cache(), features)
        self.draft_to_target = weights["d2t"].get().reshape(-1) if "d2t" in weights else None  # (n_rows,) int32
        self.n_anchor_ids = dflash.n_anchor_ids(config, tables)
        self._graphs: dict[tuple[int, ...], dflash.DrafterGraph] = {}
        self._choose_chain()
        self._reserve()

    def _reserve(self) -> None:
        """The largest graph comes first, so that the scratch memory need not move in the middle of a call."""
        self.graph(_INJECT_WIDTHS[-1], 0)

    def _choose_chain(self) -> None:
        """A DSpark chain runs inside the block's graph, unless the device lacks a kernel for that."""
        self.why_stepped = dspark.why_not_fused(self.backend, self.weights) if self.config.kind == "dspark" else None
        self._stepped: SteppedChain | None = None
        if self.why_stepped:
            n_rows = dflash.n_head_rows(self.config, self._tables)
            self._stepped = SteppedChain(self.backend, self._arena, self.config, self.weights, n_rows)

    def _new_cache(self) -> KvCache:
        config, limits = self.config, self.limits
        return KvCache(
            self.backend,
            n_layers=config.n_layers,
            width=config.head_dim * config.n_heads_kv,
            n_cells=limits.n_slots * (limits.n_ctx + config.draft_block_size),
            n_ctx=limits.n_ctx,
            n_slots=limits.n_slots,
            types=self._kv_types,
            rotated_head_dim=config.head_dim if limits.rotates_keys else 0,
        )

    def graph(self, n_inject: int, top_k: int) -> dflash.DrafterGraph:
        """The graph that injects so many rows and drafts a block (top_k > 0), built at its first use.

        Graphs belong to the weights they were built on: of a reload's they know nothing, wherever it landed.
        """
        key = (n_inject, top_k, self.weights.generation, self._tables.generation)
        built = self._graphs.get(key)
        if built is None or built.graph.is_stale:
            graph = Graph(self._arena, dflash.n_graph_nodes(self.config))
            built = dflash.build_drafter(
                graph,
                self.config,
                self.weights,
                self.state,
                self._tables,
                n_inject=n_inject,
                top_k=top_k,
                memory=None if self._stepped is None else self._stepped.memory,
            )
            self._graphs[key] = built
        return built

    def read_block(self, built: dflash.DrafterGraph, anchor_id: int, n_draft: int, top_k: int) -> DraftBlock:
        """The block that `built` has just computed."""
        if self._stepped is not None:
            return self._stepped.draft(anchor_id, n_draft, top_k, self.draft_to_target)
        results = {name: tensor.get() for name, tensor in built.results.items()}
        return shorten(read_block(results, anchor_id, top_k, self.draft_to_target), n_draft)

    def open_sequence(self, target: NativeTargetSequence) -> NativeDrafterSequence:
        """A drafter sequence that follows `target`."""
        return NativeDrafterSequence(self, target)

    def unpark(
        self, weights: Weights, tables: dflash.SharedTables, arena: GraphArena, features: FeatureRing
    ) -> None:
        """Take up work again after `close`, on reloaded weights and with an empty cache."""
        self.weights, self._tables, self._arena = weights, tables, arena
        self.state = dflash.DrafterState(self._new_cache(), features)
        self._choose_chain()
        self._reserve()

    def close(self) -> None:
        """Free graphs and device memory; safe to call twice."""
        for built in self._graphs.values():
            built.graph.close()
        self._graphs.clear()
        if self._stepped is not None:
            self._stepped.close()
        self.state.kv.close()
        self.weights.close()


class NativeDrafterSequence:
    """The drafter's context of one sequence: K/V of every committed feature, in position order."""

    def __init__(self, drafter: Drafter, target: NativeTargetSequence) -> None:
        self._drafter = drafter
        self._target = target
        self.lock = target.lock
        self._bind()
        self.kind = drafter.config.kind
        self.draft_horizon = drafter.config.draft_horizon
        self.has_confidence_head = drafter.config.has_confidence_head
        self.n_ctx = drafter.limits.n_ctx
        target.make_feature_room = self.catch_up

    def _bind(self) -> None:
        """Attach to the caches that target and drafter have now."""
        drafter, target = self._drafter, self._target
        assert target.features is not None, "the target was opened without a drafter"
        self._features = target.features
        self._cells = SequenceCells(drafter.state.kv, target.slot)
        self._block = drafter.state.kv.hold_new(drafter.config.draft_block_size)

    @alone
    def catch_up(self) -> None:
        """Inject every committed feature row that was not read yet."""
        self._target.refuse_void()
        while len(self._features.unread):
            n = min(len(self._features.unread), _INJECT_WIDTHS[-1])
            width = next(w for w in _INJECT_WIDTHS if w >= n)
            built = self._drafter.graph(width, 0)
            self._fill_injection(built, n)
            built.inputs.upload()
            built.graph.run()

    @alone
    def draft(self, anchor_id: int, *, n_draft: int, top_k: int) -> DraftBlock:
        """Propose `n_draft` positions after the anchor, best `top_k` tokens each."""
        if not 1 <= n_draft <= self.draft_horizon:
            raise OptionError(f"this drafter proposes 1 to {self.draft_horizon} tokens a block, asked for {n_draft}")
        if not 0 <= anchor_id < self._drafter.n_anchor_ids:  # an id that only pads the target's vocabulary
            return DraftBlock(np.zeros((0, top_k), np.int32), np.zeros((0, top_k), np.float32))
        self._target.refuse_void()
        n_inject = self.draft_horizon + 1  # a round commits no more
        if len(self._features.unread) > n_inject:
            self.catch_up()
        built = self._drafter.graph(n_inject, top_k)
        self._fill_injection(built, len(self._features.unread))
        self._fill_block(built, anchor_id)
        built.inputs.upload()
        built.graph.run()
        return self._drafter.read_block(built, anchor_id, n_draft, top_k)

    @alone
    def reset(self) -> None:
        """Forget the whole context."""
        self._target.refuse_closed()
        if self._cells.cache is not self._drafter.state.kv:
            self._bind()
        self._cells.reset()

    @alone
    def snapshot(self) -> CellHold:
        """The context as it is, K/V kept in place; features that were not read yet (`catch_up`) are not part of it."""
        self._target.refuse_closed()
        return self._cells.hold()

    @alone
    def restore(self, snapshot: CellHold) -> None:
        """Go on after the tokens of a snapshot taken together with the target's."""
        self.reset()
        self._cells.restore(snapshot)

    @alone
    def close(self) -> None:
        """Give all cells back; the target's sequence is closed after it."""
        self._cells.reset()
        self._block.release()
        self._target.make_feature_room = None

    def _fill_injection(self, built: dflash.DrafterGraph, n: int) -> None:
        host, kv = built.inputs.host, self._drafter.state.kv
        if n < built.n_inject:
            host["inject_rows"][:] = self._features.ring.padding_row
            host["inject_pos"][:] = 0
            host["inject_cells"][:] = kv.padding_cell
        if not n:
            return
        cells = self._cells.take(n)
        host["inject_rows"][:n] = self._features.take_unread(n)
        host["inject_pos"][:n] = np.arange(self._cells.length, self._cells.length + n)
        host["inject_cells"][:n] = cells
        self._cells.commit()

    def _fill_block(self, built: dflash.DrafterGraph, anchor_id: int) -> None:
        host, config, first = built.inputs.host, self._drafter.config, self._cells.length
        n = config.draft_block_size
        host["tokens"][:] = config.mask_token_id
        host["tokens"][0] = anchor_id
        host["pos"][:] = np.arange(first, first + n)
        host["cells"][:] = self._block.cells
        nodes = host["nodes"]
        nodes[: spec_ops.NODES_HEADER] = (spec_ops.NODES_VERSION, n, first, self._target.slot)
        nodes[spec_ops.NODES_HEADER :: 2] = self._block.cells
        nodes[spec_ops.NODES_HEADER + 1 :: 2] = np.arange(-1, n - 1)
