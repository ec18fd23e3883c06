"""What target and drafter hold of one session, kept in step with its tokens.

Between calls the caches hold all tokens but the anchor. Whatever interrupts a call, the next one brings them back to
that: it computes what they lack, from the longest snapshot of a prefix there is, or everything when they are void.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import RLock

import numpy as np

from pyggml_spec.decode.prefix_cache import PrefixCache, Snapshot
from pyggml_spec.decode.protocols import DrafterSequence, TargetSequence
from pyggml_spec.decode.round import RoundRunner
from pyggml_spec.decode.stats import Stats
from pyggml_spec.errors import DeviceError, FatalDeviceError, OptionError

OnChunk = Callable[[int, int], None]  # (tokens done, tokens in all) after each call of a prefill


class CancelledError(Exception):
    """Raised by an `OnChunk` to leave a prefill there; the caches hold what was done until then."""


class SessionCaches:
    """The caches of one session. `tokens` is always the session's list, anchor last.

    Args:
        target, drafter: the sequences, both empty or both reset.
        prefixes: where prompts' beginnings are looked up and left; None = nowhere.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        target: TargetSequence,
        drafter: DrafterSequence | None,
        prefixes: PrefixCache | None,
        clock: Callable[[], float],
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.prefixes = prefixes
        self.clock = clock
        self._is_void = False  # set while caches and tokens are brought together, so that an interrupt leaves it set
        self._runner: RoundRunner | None = None  # of the latest generation; it knows whether its last round was settled

    def begin(self, runner: RoundRunner, tokens: list[int]) -> None:
        """Another generation's rounds are going to move the caches on."""
        self._is_void = self.are_lost(tokens)
        self._runner = runner

    def mark_void(self) -> None:
        """The session's tokens are going to be others."""
        self._is_void = True

    def settle(self) -> None:
        """Caches and tokens agree again."""
        if self._runner is not None:
            self._runner.is_clean = True
        self._is_void = False

    def is_out_of_step(self, tokens: list[int]) -> bool:
        """Whether something interrupted the session while caches and tokens were not in agreement."""
        is_unsettled = self._runner is not None and not self._runner.is_clean
        is_ahead = self.target.length > max(len(tokens) - 1, 0)  # interrupted between commit and bookkeeping
        return self._is_void or is_unsettled or is_ahead

    def are_lost(self, tokens: list[int]) -> bool:
        """The same, or the target lost them (a call failed half-way, the engine was parked)."""
        return self.is_out_of_step(tokens) or bool(getattr(self.target, "is_void", False))

    def synchronise(self, tokens: list[int], stats: Stats, on_chunk: OnChunk) -> None:
        """Bring the caches up to the token before the anchor; a device that fails in it gets one more chance."""
        try:
            self._advance(tokens, stats, on_chunk)
        except FatalDeviceError:
            raise
        except DeviceError:
            self.rebuild(tokens, stats, on_chunk)

    def rebuild(self, tokens: list[int], stats: Stats, on_chunk: OnChunk) -> None:
        """The same from nothing, after a call that failed half-way."""
        self._is_void = True
        stats.record_rebuild()
        self._advance(tokens, stats, on_chunk)

    def reset(self) -> None:
        """Empty the caches."""
        self._is_void = True
        self.target.reset()
        if self.drafter is not None:
            self.drafter.reset()
        self.settle()

    def snapshot(self, token_ids: Sequence[int]) -> Snapshot:
        """The caches as they are, together with `token_ids`."""
        self._catch_up()
        drafter = None if self.drafter is None else self.drafter.snapshot()
        ids = np.array(token_ids, dtype=np.int32)
        return Snapshot(ids, self.target.snapshot(), drafter, getattr(self.target, "lock", RLock()))

    def restore(self, snapshot: Snapshot) -> None:
        """Make the caches what they were; the caller sees to the tokens, then calls `settle`.

        Raises:
            OptionError: the snapshot is of no use here; nothing has changed.
        """
        if self.drafter is not None and snapshot.drafter is None:
            raise OptionError("this snapshot has no drafter context: it was taken in a session without the drafter")
        was_void, self._is_void = self._is_void, True
        try:
            self.target.restore(snapshot.target)
        except OptionError:
            self._is_void = was_void
            raise
        if self.drafter is not None:
            self.drafter.restore(snapshot.drafter)

    def close(self, tokens: list[int] | None) -> None:
        """Leave a prefix behind, unless nobody knows what the caches hold (tokens None), and give the caches back for
        good."""
        try:
            if tokens is not None and not self.are_lost(tokens):
                with suppress(DeviceError):  # a prefix is worth no error; the device will speak up when it is needed
                    self._leave_prefix(tokens)
        finally:
            self._is_void = True
            with getattr(self.target, "lock", RLock()):  # a thread in the middle of a round finds both closed
                for sequence in (self.drafter, self.target):
                    close = getattr(sequence, "close", None)  # fakes have nothing to give back
                    if close is not None:
                        close()

    def _advance(self, tokens: list[int], stats: Stats, on_chunk: OnChunk) -> None:
        if self.are_lost(tokens):
            self.reset()
        self._find_prefix(tokens, stats)
        if self.target.length < len(tokens) - 1:
            self._prefill(tokens, stats, on_chunk)

    def _find_prefix(self, tokens: list[int], stats: Stats) -> None:
        """Start from a snapshot that holds more of the tokens than the caches do."""
        if self.prefixes is None:
            return
        with self.prefixes.lock:
            found = self.prefixes.find(tokens[:-1])
            if found is not None and found.length > self.target.length:
                stats.record_cached(found.length - self.target.length)
                self.restore(found)
                self.settle()

    def _leave_prefix(self, tokens: list[int]) -> None:
        """Leave a snapshot of the caches with `prefixes`, unless it has one."""
        if self.prefixes is None:
            return
        held = tokens[: self.target.length]
        with self.prefixes.lock:
            if self.prefixes.wants(held):
                self.prefixes.add(self.snapshot(held))

    def _prefill(self, tokens: list[int], stats: Stats, on_chunk: OnChunk) -> None:
        held_before, started = self.target.length, self.clock()
        n_missing = len(tokens) - 1 - held_before

        def after_chunk(_: int) -> None:
            self._catch_up()
            on_chunk(self.target.length - held_before, n_missing)

        self._is_void = True
        try:
            for length in self._stops(tokens):
                self.target.prefill(tokens[self.target.length : length], after_chunk)
                self._leave_prefix(tokens)
            self._is_void = False
        except CancelledError:
            self._is_void = False
            raise
        finally:
            n_done = max(self.target.length - held_before, 0)
            stats.record_prefill(n_done, (self.clock() - started) * 1e3)

    def _stops(self, tokens: list[int]) -> list[int]:
        """Lengths at which a prefill pauses for a snapshot; the last one is where the anchor begins."""
        last = len(tokens) - 1
        stops = [] if self.prefixes is None else self.prefixes.stops(tokens[:-1], self.target.length)
        return stops if stops and stops[-1] == last else [*stops, last]

    def _catch_up(self) -> None:
        drafter = self.drafter
        if drafter is not None and self.target.length <= (getattr(drafter, "n_ctx", None) or self.target.n_ctx):
            drafter.catch_up()
