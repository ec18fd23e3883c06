"""One sequence on a target: its cells, its place in the recurrent state, and the calls that move it on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pyggml_spec.decode.alone import alone
from pyggml_spec.decode.arguments import check_length
from pyggml_spec.decode.protocols import CLOSED, Posterior
from pyggml_spec.errors import DeviceError, ModelFileError, OptionError, ShapeError
from pyggml_spec.ggml import spec_ops
from pyggml_spec.models import qwen35
from pyggml_spec.state.cells import CellHold
from pyggml_spec.state.features import SequenceFeatures
from pyggml_spec.state.kv_cells import SequenceCells
from pyggml_spec.state.recurrent import RecurrentState, Rotation
from pyggml_spec.tree.draft_tree import DraftTree
from pyggml_spec.tree.schedule import encode_schedule, schedule_tree

if TYPE_CHECKING:
    from pyggml_spec.decode.target import Target


@dataclass(eq=False)
class TargetSnapshot:
    """A sequence's caches at one length: recurrent state copied to the host, KV cells kept where they are.

    The cells belong to the snapshot as much as to any sequence that uses them, so it may outlive the sequence it was
    taken from and start any number of others, until `release`.
    """

    cells: CellHold
    state: NDArray[np.uint8]  # see RecurrentState.copy_slot
    owner: RecurrentState  # takes the copy's memory back
    generation: int  # of the weights it was computed with
    is_released: bool = False

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.cells.cells)

    @property
    def n_bytes(self) -> int:
        """Host memory."""
        return self.state.nbytes + self.cells.cells.nbytes

    def release(self) -> None:
        """Give cells and memory back; safe to call twice."""
        if not self.is_released:
            self.is_released = True
            self.cells.release()
            self.owner.recycle(self.state)


class NativeTargetSequence:
    """The protocol of `decode/protocols.py`, with caches on the device.

    After a call that failed half-way the layers differ in what they have folded: `is_void` is set, and only `reset`
    (followed by a prefill of the committed tokens) or `restore` makes the sequence usable again.
    """

    def __init__(self, target: Target, slot: int) -> None:
        self._target = target
        self.lock = target.backend.lock
        self.slot = slot
        self.n_ctx = target.limits.n_ctx
        self.n_ctx_train = target.config.n_ctx_train
        self.max_width = target.limits.max_width
        self.is_closed = False  # for good: the slot may be another's by now
        self.make_feature_room: Callable[[], None] | None = None  # set by a drafter: reads the unread rows
        self._candidate: list[int] | None = None  # feature rows of a verify that awaits accept or discard
        self._bind()
        self.reset()

    def _bind(self) -> None:
        """Attach to the caches the target has now."""
        state = self._target.state
        self._generation = self._target.generation
        self._cells = SequenceCells(state.kv, self.slot)
        self._rotation = Rotation(self.slot)
        self.features = SequenceFeatures(state.features, self.slot) if state.features is not None else None
        self._is_void = True

    @property
    def is_void(self) -> bool:
        """Whether the caches hold something else than `length` committed tokens."""
        target = self._target
        return self._is_void or target.why_unusable is not None or self._generation != target.generation

    @property
    def length(self) -> int:
        """Committed tokens held by the caches, pending rows included."""
        return self._cells.length

    def prefill(self, token_ids: Sequence[int], on_chunk: Callable[[int], None] | None = None) -> None:
        """Append committed tokens in chunks; `on_chunk(n_done)` runs after each and may raise to stop there."""
        ids = self._checked_ids(token_ids)
        check_length(self.length + len(ids), self.n_ctx, self.n_ctx_train)
        self._refuse_candidate()
        n_batch = self._target.prefill_batch
        for begin in range(0, len(ids), n_batch):
            chunk = ids[begin : begin + n_batch]
            self._append(DraftTree.chain(int(chunk[0]), chunk[1:]))
            if on_chunk is not None:
                on_chunk(begin + len(chunk))

    @alone
    def _append(self, tree: DraftTree) -> None:
        """Compute a chain whose nodes are committed already."""
        self.refuse_void()
        n = tree.n_nodes
        if self._target.limits.exact:  # as a verify of which everything is accepted: the same graph at the same width
            self._make_feature_room(n)
            self._launch(self._target.verify_graph(n, "top", 1), tree)
            self.accept(range(n))
            return
        self._make_feature_room(n)
        built = self._target.prefill_graph(n)
        first = self.length
        cells = self._cells.take(n)
        rows = self._feature_rows(n)
        self._cells.commit()
        self._fill(built, tree, cells, rows, first=first, fold=True)
        self._run(built)
        self._rotation.clear()
        if self.features is not None:
            self.features.commit(rows)

    @alone
    def verify(self, tree: DraftTree, *, top_k: int = 1, logits: bool = False) -> Posterior:
        """Run the target over the tree's nodes, the anchor included; the result awaits accept or discard."""
        self.refuse_void()
        n = tree.n_nodes
        if n > self.max_width:
            raise OptionError(f"a verify takes at most {self.max_width} nodes, found {n}; use a smaller budget")
        self._refuse_candidate()
        self._checked_ids(tree.token_ids)
        self._make_feature_room(n)
        built = self._target.verify_graph(n, "logits" if logits else "top", 0 if logits else top_k)
        self._launch(built, tree)
        result = _result_of(built)[:n]
        best = result.max(axis=1) if logits else result[:, top_k].view(np.float32)
        if np.isnan(best).any():
            self.discard()
            raise ModelFileError("the target's logits are not numbers: its file is damaged, get it again")
        if logits:
            return Posterior(result.argmax(axis=1).astype(np.int32), result)
        return Posterior(result[:, 0])

    def _launch(self, built: qwen35.TargetGraph, tree: DraftTree) -> None:
        """Compute the nodes; what becomes of them is open until accept or discard."""
        cells = self._cells.take(tree.n_nodes)
        rows = self._feature_rows(tree.n_nodes)
        self._candidate = rows
        self._fill(built, tree, cells, rows, first=self.length, fold=False)
        self._run(built)

    @alone
    def trial(self, built: qwen35.TargetGraph, tree: DraftTree) -> np.ndarray:
        """Logits (n_columns, n_vocab) of a tree behind an empty context, computed by this graph; nothing is kept."""
        self.reset()
        self._launch(built, tree)
        self.discard()
        return _result_of(built)

    @alone
    def accept(self, path: Sequence[int]) -> None:
        """Commit these nodes of the last verify, anchor first."""
        self.refuse_void()
        rows = self._take_candidate()
        self._cells.commit(path)
        self._rotation.accept(path)
        if self.features is not None:
            self.features.commit([rows[node] for node in path])

    @alone
    def discard(self) -> None:
        """Drop the result of a completed verify: its fold of the pending rows has happened, nothing else."""
        self.refuse_void()
        self._take_candidate()
        self._cells.drop()
        self._rotation.clear()

    @alone
    def flush(self) -> None:
        """Fold pending rows, so that the durable state itself is up to date."""
        self.refuse_void()
        self._refuse_candidate()
        if not self._rotation.pending_rows:
            return
        built = self._target.flush_graph()
        self._fill_schedule(built, None, fold=False)
        self._run(built)
        self._rotation.clear()

    @alone
    def snapshot(self) -> TargetSnapshot:
        """The caches as they are now, pending rows folded first; the sequence goes on as if nothing had happened.

        Raises:
            ShapeError: a verify awaits accept or discard.
            DeviceError: the sequence is void.
        """
        self.flush()
        recurrent = self._target.state.recurrent
        return TargetSnapshot(self._cells.hold(), recurrent.copy_slot(self.slot), recurrent, self._generation)

    @alone
    def restore(self, snapshot: TargetSnapshot) -> None:
        """Go on after the snapshot's tokens, whatever this sequence held; raises OptionError when it is of no use."""
        if snapshot.is_released:
            raise OptionError("this snapshot was released: its memory may hold anything")
        if snapshot.generation != self._target.generation:
            raise OptionError(
                "this snapshot is of another engine, or its caches were freed when this one was parked: "
                "prefill its tokens again"
            )
        self._begin_anew()
        self._cells.restore(snapshot.cells)
        self._target.state.recurrent.write_slot(self.slot, snapshot.state)
        self._is_void = False

    @alone
    def reset(self) -> None:
        """Forget everything: length becomes 0."""
        self._begin_anew()
        self._target.state.recurrent.clear_slot(self.slot)
        self._is_void = False

    def _begin_anew(self) -> None:
        self.refuse_closed()
        self._target.refuse_unusable()
        self._is_void = True  # until the caller is done: an interrupt in between is noticed
        if self._generation != self._target.generation:
            self._bind()
        self._candidate = None
        self._cells.reset()
        self._rotation.clear()
        if self.features is not None:
            self.features.reset()

    @alone
    def close(self) -> None:
        """Give cells and slot back to the target, for good; safe to call twice."""
        if self.is_closed:
            return
        self.is_closed = self._is_void = True
        self._candidate = None
        self._cells.reset()
        self._target.release_slot(self)

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
        self.refuse_void()
        built.graph.refuse_stale()
        built.inputs.upload()
        self._is_void = True  # whatever ends the call early, an interrupt too, leaves the layers out of step
        built.graph.run()
        self._is_void = False

    def _make_feature_room(self, n: int) -> None:
        """Room for n feature rows; first of all, because the drafter may need to build graphs for it."""
        if self.features is None or self.features.n_room >= n:
            return
        if self.make_feature_room is not None:
            self.make_feature_room()
        else:
            self.features.unread.clear()

    def _feature_rows(self, n: int) -> list[int]:
        return [] if self.features is None else self.features.rows_for(n)

    def _checked_ids(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        ids = np.asarray(token_ids)
        wide = ids.view(np.uint32) if ids.dtype == np.int32 else ids.astype(np.uint64)  # negative ids become huge
        if len(ids) and wide.max() >= self._target.config.n_vocab:
            bad = ids[wide.argmax()]
            raise OptionError(f"token id {bad} is outside the vocabulary of {self._target.config.n_vocab} tokens")
        return ids.astype(np.int32, copy=False)

    def refuse_closed(self) -> None:
        """Raise OptionError when the sequence was closed."""
        if self.is_closed:
            raise OptionError(CLOSED)

    def refuse_void(self) -> None:
        """Raise unless the caches hold what `length` says."""
        self.refuse_closed()
        self._target.refuse_unusable()
        if self.is_void:
            raise DeviceError(
                "this sequence's caches are void: a call failed or was interrupted half-way, or the engine was parked; "
                "reset it and prefill its tokens again"
            )

    def _refuse_candidate(self) -> None:
        if self._candidate is not None:
            raise ShapeError("the last verify was neither accepted nor discarded")

    def _take_candidate(self) -> list[int]:
        if self._candidate is None:
            raise ShapeError("there is no verify to accept or discard")
        rows, self._candidate = self._candidate, None
        return rows


def _result_of(built: qwen35.TargetGraph) -> np.ndarray:
    """The rows (n_columns, ..) that a graph with a head computed."""
    assert built.result is not None, "a prefill graph has no result"
    return built.result.get()
