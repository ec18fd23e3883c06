"""Fakes of target, drafter, decoder and clock: decoding without weights or native code.

`FakeTarget` is strict: it raises AssertionError whenever a caller breaks the protocol of decode/protocols.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from pyggml_spec.decode.protocols import DraftBlock, Posterior
from pyggml_spec.tree.draft_tree import DraftTree

N_VOCAB = 40
Law = Callable[[Sequence[int]], np.ndarray]  # all tokens so far -> logits (n_vocab,)


@cache
def hashed_law(n_vocab: int = N_VOCAB, order: int = 3, seed: int = 0) -> Law:
    """Logits that depend on the last `order` tokens and look random; no two are equal."""
    rows: dict[tuple[int, ...], np.ndarray] = {}

    def law(tokens: Sequence[int]) -> np.ndarray:
        key = tuple(tokens[-order:])
        if key not in rows:
            rows[key] = np.random.default_rng((seed, *key)).normal(size=n_vocab).astype(np.float32) * 2
        return rows[key]

    return law


@dataclass(eq=False)
class FakeSnapshot:
    """The tokens a fake held."""

    held: list[int]
    n_bytes: int = 1000
    is_released: bool = False

    @property
    def length(self) -> int:
        return len(self.held)

    def release(self) -> None:
        self.is_released = True


class FakeTarget:
    """A target whose caches are a list of tokens."""

    n_ctx_train = 4096

    def __init__(self, law: Law | None = None, *, n_ctx: int = 512, max_width: int = 32, n_batch: int = 4) -> None:
        self.law = law or hashed_law()
        self.n_ctx, self.max_width, self.n_batch = n_ctx, max_width, n_batch
        self.held: list[int] = []
        self.candidate: DraftTree | None = None
        self.widths: list[int] = []  # of every verify
        self.n_prefilled = self.n_resets = self.n_discards = self.n_restores = 0
        self.verify_errors: list[BaseException] = []  # raised by the next verifies, which fail half-way
        self.is_void = False

    @property
    def length(self) -> int:
        return len(self.held)

    def prefill(self, token_ids: Sequence[int], on_chunk: Callable[[int], None] | None) -> None:
        assert self.candidate is None and not self.is_void
        for begin in range(0, len(token_ids), self.n_batch):
            chunk = token_ids[begin : begin + self.n_batch]
            assert self.length + len(chunk) <= self.n_ctx, "prefill past the context"
            self.held.extend(chunk)
            self.n_prefilled += len(chunk)
            if on_chunk is not None:
                on_chunk(begin + len(chunk))

    def verify(self, tree: DraftTree, *, top_k: int = 1, logits: bool = False) -> Posterior:
        assert self.candidate is None and not self.is_void, "verify before the last one was settled"
        assert tree.n_nodes <= self.max_width, "verify wider than the target"
        assert self.length + int(tree.depths.max()) < self.n_ctx, "a node lies past the context"
        if self.verify_errors:
            self.is_void = True
            raise self.verify_errors.pop(0)
        self.candidate = tree
        self.widths.append(tree.n_nodes)
        ids = tree.token_ids.tolist()
        rows = np.stack([self.law(self.held + [ids[i] for i in tree.path_to(node)]) for node in range(tree.n_nodes)])
        return Posterior(rows.argmax(axis=1).astype(np.int32), rows if logits else None)

    def accept(self, path: Sequence[int]) -> None:
        assert self.candidate is not None, "accept without a verify"
        assert list(path) == self.candidate.path_to(path[-1]), "the path is not one from the anchor"
        self.held.extend(self.candidate.token_ids[list(path)].tolist())
        self.candidate = None

    def discard(self) -> None:
        assert self.candidate is not None, "discard without a verify"
        self.candidate = None
        self.n_discards += 1

    def reset(self) -> None:
        self.held, self.candidate, self.is_void = [], None, False
        self.n_resets += 1

    def snapshot(self) -> FakeSnapshot:
        assert self.candidate is None and not self.is_void, "snapshot in the middle of a round"
        return FakeSnapshot(list(self.held))

    def restore(self, snapshot: FakeSnapshot) -> None:
        assert not snapshot.is_released, "restore of a released snapshot"
        self.held, self.candidate, self.is_void = list(snapshot.held), None, False
        self.n_restores += 1


class FakeDrafter:
    """A drafter that knows the target's law and errs on purpose.

    quality: chance that a position's best token is the target's; 1.0 good, 0.0 adversarial (never right, so every
    draft is rejected first). When wrong with top_k > 1 the right token is the second candidate.
    """

    kind = "dflash"

    def __init__(self, target: FakeTarget, quality: float = 0.7, horizon: int = 7, seed: int = 1) -> None:
        self.target, self.quality, self.draft_horizon = target, quality, horizon
        self.rng = np.random.default_rng(seed)
        self.n_catch_ups = self.n_resets = 0
        self.asked: list[int] = []  # n_draft of every draft

    def catch_up(self) -> None:
        self.n_catch_ups += 1

    def draft(self, anchor_id: int, *, n_draft: int, top_k: int) -> DraftBlock:
        assert 1 <= n_draft <= self.draft_horizon, "draft past the horizon"
        self.asked.append(n_draft)
        tokens = [*self.target.held, anchor_id]
        rows = []
        for _ in range(n_draft):
            right = int(self.target.law(tokens).argmax())
            rows.append(self._row(right, top_k, len(self.target.law(tokens))))
            tokens.append(right)
        chances = np.array([0.6 * 0.4**rank for rank in range(top_k)])
        return DraftBlock(np.array(rows, dtype=np.int32), np.log(np.tile(chances, (n_draft, 1))).astype(np.float32))

    def _row(self, right: int, top_k: int, n_vocab: int) -> list[int]:
        others = [(right + 1 + i) % n_vocab for i in range(top_k)]
        if self.rng.random() < self.quality:
            return [right, *others][:top_k]
        return [others[0], right, *others[1:]][:top_k] if self.quality > 0 else others

    def reset(self) -> None:
        self.n_resets += 1

    def snapshot(self) -> FakeSnapshot:
        return FakeSnapshot(list(self.target.held))

    def restore(self, snapshot: FakeSnapshot) -> None:
        assert snapshot.held == self.target.held, "a context of other tokens than the target's"


class FakeDecoder:
    """Token i is the i-th entry of `pieces`, as bytes; incomplete UTF-8 is held back."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.held = b""

    def feed(self, token_ids: Sequence[int]) -> str:
        self.held += b"".join(self.pieces[i] for i in token_ids)
        for n_whole in range(len(self.held), max(len(self.held) - 4, -1), -1):
            try:
                text = self.held[:n_whole].decode()
            except UnicodeDecodeError:
                continue
            self.held = self.held[n_whole:]
            return text
        return ""

    def flush(self) -> str:
        text, self.held = self.held.decode(errors="replace"), b""
        return text


class FakeClock:
    """A clock that moves by `step` seconds with every look."""

    def __init__(self, step: float = 0.001) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def chi_square_excess(observed: np.ndarray, expected: np.ndarray) -> float:
    """How many standard deviations Pearson's statistic lies above its mean; about 0 +- 1 when the law is right.

    Shapes: observed, expected (n,) counts; categories expected less than 5 times are merged.
    """
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    n_free = len(expected) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return (statistic - n_free) / np.sqrt(2 * n_free)
