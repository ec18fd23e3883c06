"""Prefixes that need not be computed again: snapshots of sessions, found by their tokens.

Recurrent state cannot be cut back, so only lengths at which a snapshot was taken can be returned to. They are: the end
of a prompt, the end of a generation, up to `MAX_STEPS` regular stops on the way through a long prompt, and the place
where a prompt leaves an earlier one, which is where the next one is likely to leave it too (the end of a system prompt,
an edited message).

A snapshot costs host memory for the recurrent state; its KV cells are shared with whoever uses them. The least recently
used ones go when `max_bytes` is exceeded, and when a sequence needs their cells: a full cache never refuses a token.

Sessions of several threads share one cache, and releasing a snapshot changes what the device's memory is used for. So
there is one lock for both, the device's: whoever needs cells holds it already when a prefix has to make room. Between
finding a snapshot and going on from it the lock must be held, or another thread may release it meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyggml_spec.decode.alone import alone

STEP_TOKENS = 512  # regular stops lie at multiples of this, which are also the borders of prefill calls
MAX_STEPS = 4  # regular stops in one prompt
MIN_TOKENS = 16  # a shorter prefix is not worth a copy of the state


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A session at one moment. It owns its part of the caches until `release`, whatever becomes of the session.

    Shapes: token_ids (n,) int32, all committed tokens; the caches hold the first `length` of them.
    """

    token_ids: NDArray[np.int32]
    target: Any  # what the target sequence's `snapshot` returned
    drafter: Any | None
    lock: Any = field(default_factory=RLock)  # the device's

    @property
    def length(self) -> int:
        """Tokens that need not be computed again."""
        n_tokens: int = self.target.length
        return n_tokens

    @property
    def n_bytes(self) -> int:
        """Host memory."""
        n_bytes: int = self.target.n_bytes + self.token_ids.nbytes
        return n_bytes

    @alone
    def release(self) -> None:
        """Give the caches up; safe to call twice."""
        self.target.release()
        if self.drafter is not None:
            self.drafter.release()


class PrefixCache:
    """Snapshots of up to `max_bytes` together, the most recently used one last; `lock` is the device's."""

    def __init__(self, max_bytes: int, lock: Any = None) -> None:
        self.max_bytes = max_bytes
        self.lock = RLock() if lock is None else lock
        self._snapshots: list[Snapshot] = []
        self._is_hopeless = False  # one snapshot alone exceeds the limit

    def __len__(self) -> int:
        return len(self._snapshots)

    @property
    @alone
    def n_bytes(self) -> int:
        """Host memory in use."""
        return sum(snapshot.n_bytes for snapshot in self._snapshots)

    @alone
    def find(self, token_ids: Sequence[int]) -> Snapshot | None:
        """The longest snapshot whose tokens begin `token_ids`; it counts as used."""
        tokens = np.asarray(token_ids, dtype=np.int32)
        fitting = [s for s in self._snapshots if _n_common(s, tokens) == s.length]
        if not fitting:
            return None
        best = max(fitting, key=lambda snapshot: snapshot.length)
        self._snapshots.remove(best)
        self._snapshots.append(best)
        return best

    @alone
    def stops(self, token_ids: Sequence[int], n_held: int) -> list[int]:
        """Lengths, ascending, at which computing `token_ids` should pause for a snapshot; n_held are there already."""
        tokens = np.asarray(token_ids, dtype=np.int32)
        n_tokens = len(tokens)
        if self._is_hopeless or not self.max_bytes:
            return []
        n_steps = -(-(n_tokens - n_held) // STEP_TOKENS)
        step = STEP_TOKENS * max(1, -(-n_steps // MAX_STEPS))
        leaves = max((_n_common(s, tokens) for s in self._snapshots), default=0)
        stops = {leaves, n_tokens, *range(step, n_tokens, step)}
        return sorted(n for n in stops if n > n_held and n >= MIN_TOKENS)

    @alone
    def wants(self, token_ids: Sequence[int]) -> bool:
        """Whether a snapshot after exactly these tokens would add something."""
        if self._is_hopeless or not self.max_bytes or len(token_ids) < MIN_TOKENS:
            return False
        tokens = np.asarray(token_ids, dtype=np.int32)
        return all(s.length != len(tokens) or _n_common(s, tokens) < len(tokens) for s in self._snapshots)

    @alone
    def add(self, snapshot: Snapshot) -> None:
        """Take the snapshot over, giving up others for it; one that alone exceeds the limit is released at once."""
        if snapshot.n_bytes > self.max_bytes:
            self._is_hopeless = True
            snapshot.release()
            return
        while self.n_bytes + snapshot.n_bytes > self.max_bytes:
            self.evict()
        self._snapshots.append(snapshot)

    @alone
    def evict(self) -> bool:
        """Give up the least recently used snapshot; False when there is none."""
        if not self._snapshots:
            return False
        self._snapshots.pop(0).release()
        return True

    @alone
    def clear(self) -> None:
        """Give up everything."""
        while self.evict():
            pass


def _n_common(snapshot: Snapshot, tokens: NDArray[np.int32]) -> int:
    """Tokens that a snapshot's caches and `tokens` have in common from the start."""
    n = min(snapshot.length, len(tokens))
    differs = snapshot.token_ids[:n] != tokens[:n]
    return int(differs.argmax()) if differs.any() else n
