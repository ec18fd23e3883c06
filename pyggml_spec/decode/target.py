"""The target on a device: weights, shared caches, graphs by width, and the sequences that use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pyggml_spec.decode.protocols import Posterior
from pyggml_spec.errors import ContextLimitError, DeviceError, OptionError, ShapeError
from pyggml_spec.ggml import Backend, Graph, GraphArena, spec_ops
from pyggml_spec.gguf_io.weights import Weights
from pyggml_spec.models import flush, qwen35
from pyggml_spec.records import TargetConfig
from pyggml_spec.state.features import FeatureRing, SequenceFeatures
from pyggml_spec.state.kv_cells import KvCache, KvTypes, SequenceCells
from pyggml_spec.state.recurrent import RecurrentState, Rotation
from pyggml_spec.tree.draft_tree import DraftTree
from pyggml_spec.tree.schedule import encode_schedule, schedule_tree

MAX_VERIFY_WIDTH = 128
PREFILL_WIDTHS = (16, 64, 256, 512)  # columns of a prefill graph; a chunk takes the smallest that holds it


@dataclass(frozen=True)
class TargetLimits:
    """Sizes fixed when a target is opened."""

    n_ctx: int  # most tokens of one sequence
    n_slots: int = 1  # sequences that exist at a time
    max_width: int = 32  # most nodes of one verify
    n_batch: int = 512  # most tokens of one prefill call


class Target:
    """A `qwen35` target; `open_sequence` starts a sequence on it."""

    def __init__(
        self,
        backend: Backend,
        config: TargetConfig,
        weights: Weights,
        limits: TargetLimits,
        *,
        kv_types: KvTypes,
        feature_layers: tuple[int, ...] = (),
    ) -> None:
        _check_limits(limits)
        self.backend, self.config, self.weights, self.limits = backend, config, weights, limits
        self.arena = GraphArena(backend)
        self.state = _allocate_state(backend, config, limits, kv_types, feature_layers)
        self._graphs: dict[tuple, qwen35.TargetGraph] = {}
        self._free_slots = list(range(limits.n_slots))
        self._reserve()

    def _reserve(self) -> None:
        """Build the largest graphs first, so that the scratch memory never has to move."""
        self.graph(self.limits.n_batch, "none", 0)
        self.graph(self.limits.max_width, "logits", 0)

    def graph(self, n_columns: int, head: qwen35.Head, top_k: int) -> qwen35.TargetGraph:
        """The graph of this width and head, built at its first use."""
        key = (n_columns, head, top_k)
        built = self._graphs.get(key)
        if built is None or built.graph.is_stale:
            graph = Graph(self.arena, qwen35.n_graph_nodes(self.config))
            built = qwen35.build_target(
                graph, self.config, self.weights, self.state, n_columns=n_columns, head=head, top_k=top_k
            )
            self._graphs[key] = built
        return built

    def flush_graph(self) -> qwen35.TargetGraph:
        """The graph that only folds pending rows, built at its first use."""
        key = (0, "flush", 0)
        built = self._graphs.get(key)
        if built is None or built.graph.is_stale:
            graph = Graph(self.arena, flush.n_graph_nodes(self.config))
            inputs = flush.build_flush(graph, self.config, self.weights, self.state.recurrent)
            built = self._graphs[key] = qwen35.TargetGraph(graph, inputs, 1, None)
        return built

    def open_sequence(self) -> NativeTargetSequence:
        """A new, empty sequence; raises OptionError when all slots are taken."""
        if not self._free_slots:
            raise OptionError(f"all {self.limits.n_slots} sequences of this engine are in use; close one first")
        return NativeTargetSequence(self, self._free_slots.pop(0))

    def release_slot(self, slot: int) -> None:
        """A closed sequence gives its slot back."""
        self._free_slots.append(slot)

    def close(self) -> None:
        """Free graphs and device memory; safe to call twice."""
        for built in self._graphs.values():
            built.graph.close()
        self._graphs.clear()
        for owner in (self.arena, self.state.kv, self.state.recurrent, self.state.features, self.weights):
            if owner is not None:
                owner.close()


def _check_limits(limits: TargetLimits) -> None:
    rules = {"n_slots": 1024, "max_width": MAX_VERIFY_WIDTH, "n_batch": PREFILL_WIDTHS[-1]}
    for name, most in rules.items():
        value = getattr(limits, name)
        if not 1 <= value <= most:
            raise OptionError(f"{name} is {value}: it must be 1 to {most}")


def _allocate_state(
    backend: Backend, config: TargetConfig, limits: TargetLimits, kv_types: KvTypes, layers: tuple[int, ...]
) -> qwen35.TargetState:
    n_attention = config.n_layers - sum(config.recurrent_layers)
    kv = KvCache(
        backend,
        n_layers=n_attention,
        width=config.head_dim * config.n_heads_kv,
        n_cells=limits.n_slots * (limits.n_ctx + limits.max_width),
        n_ctx=limits.n_ctx,
        n_slots=limits.n_slots,
        types=kv_types,
    )
    recurrent = RecurrentState(backend, config, n_slots=limits.n_slots, n_rows=limits.max_width)
    features = None
    if layers:
        n_rows = limits.n_batch + 2 * limits.max_width
        features = FeatureRing(
            backend, n_features=len(layers), n_embd=config.n_embd, n_slots=limits.n_slots, n_rows=n_rows
        )
    return qwen35.TargetState(kv, recurrent, features, layers)


class NativeTargetSequence:
    """One sequence on a target: the protocol of `decode/protocols.py`, with caches on the device.

    After a call that failed half-way the layers differ in what they have folded: `is_void` is set, and only `reset`
    (followed by a prefill of the committed tokens) makes the sequence usable again.
    """

    def __init__(self, target: Target, slot: int) -> None:
        self._target = target
        self.slot = slot
        self.n_ctx = target.limits.n_ctx
        self.max_width = target.limits.max_width
        self.is_void = False
        self._cells = SequenceCells(target.state.kv, slot)
        self._rotation = Rotation(slot)
        ring = target.state.features
        self.features = SequenceFeatures(ring, slot) if ring is not None else None
        self.make_feature_room: Callable[[], None] | None = None  # set by a drafter: reads the unread rows
        self._candidate: list[int] | None = None  # feature rows of a verify that awaits accept or discard

    @property
    def length(self) -> int:
        """Committed tokens held by the caches, pending rows included."""
        return self._cells.length

    def prefill(self, token_ids: Sequence[int], on_chunk: Callable[[int], None] | None = None) -> None:
        """Append committed tokens in chunks; `on_chunk(n_done)` runs after each and may raise to stop there."""
        ids = self._checked_ids(token_ids)
        if self.length + len(ids) > self.n_ctx:
            raise ContextLimitError(
                f"{len(ids)} more tokens do not fit: the context of {self.n_ctx} tokens holds {self.length} already"
            )
        self._refuse_candidate()
        n_batch = self._target.limits.n_batch
        for begin in range(0, len(ids), n_batch):
            chunk = ids[begin : begin + n_batch]
            self._prefill_chunk(chunk)
            if on_chunk is not None:
                on_chunk(begin + len(chunk))

    def _prefill_chunk(self, ids: np.ndarray) -> None:
        n = len(ids)
        built = self._target.graph(self._prefill_width(n), "none", 0)
        first = self.length
        cells = self._cells.take(n)
        rows = self._feature_rows(n)
        self._cells.commit()
        tree = DraftTree.chain(int(ids[0]), ids[1:])
        self._fill(built, tree, cells, rows, first=first, fold=True)
        self._run(built)
        self._rotation.clear()
        if self.features is not None:
            self.features.commit(rows)

    def _prefill_width(self, n: int) -> int:
        widths = [w for w in PREFILL_WIDTHS if w < self._target.limits.n_batch]
        return next((w for w in widths if w >= n), self._target.limits.n_batch)

    def verify(self, tree: DraftTree, *, top_k: int = 1, logits: bool = False) -> Posterior:
        """Run the target over the tree's nodes, the anchor included; the result awaits accept or discard."""
        n = tree.n_nodes
        if n > self.max_width:
            raise OptionError(f"a verify takes at most {self.max_width} nodes, found {n}; use a smaller budget")
        self._refuse_candidate()
        self._checked_ids(tree.token_ids)
        built = self._target.graph(n, "logits" if logits else "top", 0 if logits else top_k)
        cells = self._cells.take(n)
        rows = self._feature_rows(n)
        self._candidate = rows
        self._fill(built, tree, cells, rows, first=self.length, fold=False)
        self._run(built)
        result = built.result.get()
        if logits:
            return Posterior(result.argmax(axis=1).astype(np.int32), result)
        return Posterior(result[:, 0])

    def accept(self, path: Sequence[int]) -> None:
        """Commit these nodes of the last verify, anchor first."""
        rows = self._take_candidate()
        self._cells.commit(path)
        self._rotation.accept(path)
        if self.features is not None:
            self.features.commit([rows[node] for node in path])

    def discard(self) -> None:
        """Drop the result of a completed verify: its fold of the pending rows has happened, nothing else."""
        self._take_candidate()
        self._cells.drop()
        self._rotation.clear()

    def flush(self) -> None:
        """Fold pending rows, so that the durable state itself is up to date."""
        self._refuse_candidate()
        if not self._rotation.pending_rows:
            return
        built = self._target.flush_graph()
        self._fill_schedule(built, None, fold=False)
        self._run(built)
        self._rotation.clear()

    def reset(self) -> None:
        """Forget everything: length becomes 0."""
        self._candidate = None
        self._cells.reset()
        self._rotation.clear()
        self._target.state.recurrent.clear_slot(self.slot)
        if self.features is not None:
            self.features.reset()
        self.is_void = False

    def close(self) -> None:
        """Give cells and slot back to the target."""
        self.reset()
        self._target.release_slot(self.slot)

    def state_hashes(self) -> list[str]:
        """One digest per recurrent layer after folding what is pending (tests and `--parity`)."""
        self.flush()
        return self._target.state.recurrent.hashes(self.slot)

    def _fill(
        self,
        built: qwen35.TargetGraph,
        tree: DraftTree,
        cells: list[int],
        rows: list[int],
        *,
        first: int,
        fold: bool,
    ) -> None:
        n, host = tree.n_nodes, built.inputs.host
        if n < built.n_columns:
            self._fill_padding(built)
        host["tokens"][:n] = tree.token_ids
        np.add(tree.depths, first, out=host["pos"][:n])
        host["cells"][:n] = cells
        if rows:
            host["feature_rows"][:n] = rows
        nodes = host["nodes"]
        nodes[: spec_ops.NODES_HEADER] = (spec_ops.NODES_VERSION, n, first, self.slot)
        pairs = nodes[spec_ops.NODES_HEADER :]
        pairs[0 : 2 * n : 2] = cells
        pairs[1 : 2 * n : 2] = tree.parents
        self._fill_schedule(built, tree, fold=fold)

    def _fill_schedule(self, built: qwen35.TargetGraph, tree: DraftTree | None, *, fold: bool) -> None:
        encode_schedule(
            built.inputs.host["schedule"],
            schedule=None if tree is None else schedule_tree(tree.parents),
            n_columns=built.n_columns,
            pending_rows=self._rotation.pending_rows,
            pending_bank=self._rotation.pending_bank,
            write_bank=self._rotation.write_bank,
            state_slot=self.slot,
            fold=fold,
        )

    def _fill_padding(self, built: qwen35.TargetGraph) -> None:
        """Columns without a node write to rows that nobody reads."""
        host, state = built.inputs.host, self._target.state
        host["tokens"][:] = 0
        host["pos"][:] = 0
        host["cells"][:] = state.kv.padding_cell
        if state.features is not None:
            host["feature_rows"][:] = state.features.padding_row

    def _run(self, built: qwen35.TargetGraph) -> None:
        if self.is_void:
            raise DeviceError("this sequence was left half-way by a failed call; reset it and prefill its tokens again")
        built.inputs.upload()
        try:
            built.graph.run()
        except DeviceError:
            self.is_void = True
            raise

    def _feature_rows(self, n: int) -> list[int]:
        if self.features is None:
            return []
        if self.features.n_room < n and self.make_feature_room is not None:
            self.make_feature_room()
        elif self.features.n_room < n:
            self.features.unread.clear()
        return self.features.rows_for(n)

    def _checked_ids(self, token_ids: Sequence[int]) -> np.ndarray:
        ids = np.asarray(token_ids)
        wide = ids.view(np.uint32) if ids.dtype == np.int32 else ids.astype(np.uint64)  # negative ids become huge
        if len(ids) and wide.max() >= self._target.config.n_vocab:
            bad = ids[wide.argmax()]
            raise OptionError(f"token id {bad} is outside the vocabulary of {self._target.config.n_vocab} tokens")
        return ids.astype(np.int32, copy=False)

    def _refuse_candidate(self) -> None:
        if self._candidate is not None:
            raise ShapeError("the last verify was neither accepted nor discarded")

    def _take_candidate(self) -> list[int]:
        if self._candidate is None:
            raise ShapeError("there is no verify to accept or discard")
        rows, self._candidate = self._candidate, None
        return rows
