"""The target on a device: weights, shared caches and graphs by width; sequences live in target_sequence.py."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from weakref import ref

from pyggml_spec.decode.exact import find_exact_widths
from pyggml_spec.decode.target_sequence import NativeTargetSequence
from pyggml_spec.errors import OptionError
from pyggml_spec.ggml import Backend, Graph, GraphArena
from pyggml_spec.gguf_io.weights import Weights
from pyggml_spec.models import flush, qwen35
from pyggml_spec.records import MAX_VERIFY_WIDTH, TargetConfig
from pyggml_spec.state.features import FeatureRing
from pyggml_spec.state.kv_cells import KvCache, KvTypes
from pyggml_spec.state.recurrent import RecurrentState

MAX_SLOTS = 1024
_PARKED = "this engine is parked: call unpark() before it is used"
PREFILL_WIDTHS = (16, 64, 256, 512)  # columns of a prefill graph; a chunk takes the smallest that holds it


@dataclass(frozen=True)
class TargetLimits:
    """What is fixed when a target is opened."""

    n_ctx: int  # most tokens of one sequence
    n_slots: int = 1  # sequences that exist at a time
    max_width: int = 32  # most nodes of one verify
    n_batch: int = 512  # most tokens of one prefill call
    exact: bool = False  # results of a token depend on the tokens before it alone, not on the width of its call
    rotates_keys: bool = False  # by a Hadamard matrix, before they are stored


class Target:
    """A `qwen35` target; `open_sequence` starts a sequence on it.

    With `limits.exact` every call, prefill too, runs a verify graph of one of `exact_widths`: what a token's row
    becomes then depends on the tokens before it and on nothing else.
    """

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
        self.exact_widths: tuple[int, ...] = (limits.max_width,)  # the widest is exact if any is
        self._kv_types, self._feature_layers = kv_types, feature_layers
        self._graphs: dict[tuple[int, int, str, int], qwen35.TargetGraph] = {}
        self._sequences: dict[int, ref[NativeTargetSequence]] = {}
        self.why_unusable: str | None = None  # parked or closed
        self._allocate()
        if limits.exact:
            self.exact_widths = find_exact_widths(self)

    def _allocate(self) -> None:
        """Scratch and caches; the largest graphs come first, so that the scratch memory never has to move."""
        self.arena = GraphArena(self.backend)
        self.state = _allocate_state(self.backend, self.config, self.limits, self._kv_types, self._feature_layers)
        if not self.limits.exact:
            self.prefill_graph(self.limits.n_batch)
        self.verify_graph(self.limits.max_width, "logits", 0)

    @property
    def generation(self) -> int:
        """Of the weights; caches and graphs made with older ones are of no use."""
        return self.weights.generation

    @property
    def feature_ring(self) -> FeatureRing:
        """Where features are captured for a drafter."""
        assert self.state.features is not None, "the target was opened without a drafter"
        return self.state.features

    @property
    def prefill_batch(self) -> int:
        """Most tokens of one prefill call."""
        return self.limits.max_width if self.limits.exact else self.limits.n_batch

    def prefill_graph(self, n_tokens: int) -> qwen35.TargetGraph:
        """The graph that appends up to so many committed tokens."""
        n_batch = self.limits.n_batch
        width = next((w for w in PREFILL_WIDTHS if n_tokens <= w < n_batch), n_batch)
        return self.graph(width, "none", 0)

    def verify_graph(self, n_nodes: int, head: qwen35.Head, top_k: int) -> qwen35.TargetGraph:
        """The graph that verifies so many nodes: of just this width, or in exact mode padded to an exact one."""
        width = next(w for w in self.exact_widths if w >= n_nodes) if self.limits.exact else n_nodes
        return self.graph(width, head, top_k)

    def graph(self, n_columns: int, head: qwen35.Head, top_k: int) -> qwen35.TargetGraph:
        """The graph of this width and head, built at its first use."""

        def build(graph: Graph) -> qwen35.TargetGraph:
            return qwen35.build_target(
                graph, self.config, self.weights, self.state, n_columns=n_columns, head=head, top_k=top_k
            )

        return self._cached((self.generation, n_columns, head, top_k), qwen35.n_graph_nodes(self.config), build)

    def flush_graph(self) -> qwen35.TargetGraph:
        """The graph that only folds pending rows."""

        def build(graph: Graph) -> qwen35.TargetGraph:
            inputs = flush.build_flush(graph, self.config, self.weights, self.state.recurrent)
            return qwen35.TargetGraph(graph, inputs, 1, None)

        return self._cached((self.generation, 0, "flush", 0), flush.n_graph_nodes(self.config), build)

    def _cached(
        self, key: tuple[int, int, str, int], n_nodes: int, build: Callable[[Graph], qwen35.TargetGraph]
    ) -> qwen35.TargetGraph:
        """The graph of this key, built at its first use; the key begins with the weights' generation."""
        built = self._graphs.get(key)
        if built is None or built.graph.is_stale:
            built = self._graphs[key] = build(Graph(self.arena, n_nodes))
        return built

    def open_sequence(self) -> NativeTargetSequence:
        """A new, empty sequence; raises OptionError when all slots are taken."""
        self.refuse_unusable()
        slot = self._free_slot()
        if slot is None:
            gc.collect()  # sequences that were dropped without being closed
            slot = self._free_slot()
        if slot is None:
            raise OptionError(f"all {self.limits.n_slots} sequences of this engine are in use; close one first")
        sequence = NativeTargetSequence(self, slot)
        self._sequences[slot] = ref(sequence)
        return sequence

    def _free_slot(self) -> int | None:
        slots = range(self.limits.n_slots)
        return next((s for s in slots if s not in self._sequences or self._sequences[s]() is None), None)

    def release_slot(self, sequence: NativeTargetSequence) -> None:
        """A closed sequence gives its slot back."""
        holder = self._sequences.get(sequence.slot)
        if holder is not None and holder() is sequence:
            del self._sequences[sequence.slot]

    def refuse_unusable(self) -> None:
        """Raise when nothing can be computed now."""
        self.backend.refuse_if_dead()
        if self.why_unusable is not None:
            raise OptionError(self.why_unusable)

    @property
    def is_parked(self) -> bool:
        """Whether `unpark` is needed before anything else."""
        return self.why_unusable == _PARKED

    def park(self) -> None:
        """Free all device memory until `unpark`; every sequence is void from now on."""
        self.close()
        self.why_unusable = _PARKED

    def unpark(self, weights: Weights) -> None:
        """Take up work again on reloaded weights, with empty caches; raises DeviceError when memory is short."""
        self.weights = weights
        self._allocate()
        self.why_unusable = None

    def close(self) -> None:
        """Free graphs and device memory; safe to call twice."""
        self.why_unusable = "this engine is closed: load a new one"
        for built in self._graphs.values():
            built.graph.close()
        self._graphs.clear()
        for owner in (self.arena, self.state.kv, self.state.recurrent, self.state.features, self.weights):
            if owner is not None:
                owner.close()


def _check_limits(limits: TargetLimits) -> None:
    rules = {"n_slots": MAX_SLOTS, "max_width": MAX_VERIFY_WIDTH, "n_batch": PREFILL_WIDTHS[-1]}
    for name, most in rules.items():
        value = getattr(limits, name)
        if not 1 <= value <= most:
            raise OptionError(f"`{name}` is {value}: it must be 1 to {most}")


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
        rotated_head_dim=config.head_dim if limits.rotates_keys else 0,
    )
    recurrent = RecurrentState(backend, config, n_slots=limits.n_slots, n_rows=limits.max_width)
    features = None
    if layers:
        n_rows = limits.n_batch + 2 * limits.max_width
        features = FeatureRing(
            backend, n_features=len(layers), n_embd=config.n_embd, n_slots=limits.n_slots, n_rows=n_rows
        )
    return qwen35.TargetState(kv, recurrent, features, layers)
