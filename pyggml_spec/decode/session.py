"""A session: the committed tokens of one conversation, and generation that continues them.

`tokens` are all committed tokens; the last one is the anchor, which no cache holds yet, so `target.length` is
len(tokens) - 1 between calls. Whatever interrupts a call, the next one brings the caches back to that state: it
prefills what they lack, or everything when they are void.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from pyggml_spec.decode.protocols import DrafterSequence, TargetSequence
from pyggml_spec.decode.round import RoundRunner, SpecOptions
from pyggml_spec.decode.sampling import Sampler
from pyggml_spec.decode.stats import Stats
from pyggml_spec.decode.stops import StopTracker, StreamDecoder
from pyggml_spec.errors import ContextLimitError, OptionError
from pyggml_spec.policy import FixedPolicy, Policy
from pyggml_spec.records import FinishReason, SamplingParams, TokenLogprob


@dataclass(frozen=True)
class Emission:
    """What one round emitted. Text may lag behind: half characters and possible stop strings are withheld."""

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None  # set in the last emission of a generation


class _CancelledError(Exception):
    """Leaves a prefill between two chunks."""


class Session:
    """One conversation on one target sequence, with or without a drafter.

    Args:
        target, drafter: the sequences, both empty or both reset.
        n_vocab: ids of the target's vocabulary are 0 .. n_vocab - 1.
        policy: how much to speculate; kept across generations so that it may learn.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        target: TargetSequence,
        drafter: DrafterSequence | None = None,
        *,
        n_vocab: int,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.n_vocab = n_vocab
        self.policy: Policy = FixedPolicy() if policy is None else policy
        self.clock = clock
        self.tokens: list[int] = []
        self.stats = Stats()  # of the latest generation
        self.finish_reason: FinishReason | None = None  # of the latest generation; None while it runs
        self._cancelled = False
        self._is_void = False
        self._is_running = False

    def cancel(self) -> None:
        """End the running generation after this round or prefill chunk; safe from signal handlers and threads."""
        self._cancelled = True

    def reset(self) -> None:
        """Forget the conversation."""
        self.target.reset()
        if self.drafter is not None:
            self.drafter.reset()
        self.tokens = []
        self.stats = Stats()
        self.finish_reason = None
        self._is_void = False

    def close(self) -> None:
        """Give the caches back to the engine; sequences without anything to give back (fakes) need no `close`."""
        for sequence in (self.drafter, self.target):
            close = getattr(sequence, "close", None)
            if close is not None:
                close()

    def generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        stop_ids: Collection[int] = (),
        stop_strings: Sequence[str] = (),
        decoder: StreamDecoder | None = None,
        spec: SpecOptions | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Iterator[Emission]:
        """Append `token_ids` and generate what follows, one emission per round.

        `max_tokens` None goes on until a stop or the end of the context; 0 takes the prompt in and emits nothing.
        `on_prefill(n_done, n_total)` reports progress. Closing the iterator between rounds cancels: what was emitted
        stays committed, and a later call continues after it.

        Raises:
            OptionError: an option is out of range, or there is no token to start from.
            ContextLimitError: prompt and conversation do not fit into the context.
        """
        sampler = Sampler(params or SamplingParams(), self.n_vocab)
        spec = spec or SpecOptions()
        runner = RoundRunner(self.target, self.drafter, sampler, spec, self.policy, self.clock)
        tracker = StopTracker(stop_ids, stop_strings, decoder)
        _check_max_tokens(max_tokens)
        checked = _checked_ids(token_ids, self.n_vocab)
        self._check_can_run(checked)
        self._cancelled = False
        return self._generate(checked, runner, tracker, max_tokens, on_prefill)

    def _generate(
        self,
        token_ids: list[int],
        runner: RoundRunner,
        tracker: StopTracker,
        max_tokens: int | None,
        on_prefill: Callable[[int, int], None] | None,
    ) -> Iterator[Emission]:
        self._begin(token_ids, runner)
        try:
            self._synchronise(on_prefill)
            yield from self._rounds(runner, tracker, max_tokens)
        except _CancelledError:
            yield Emission([], "", finish_reason="cancelled")
        finally:
            self.finish_reason = self.finish_reason or "cancelled"
            self._is_void |= not runner.is_clean
            self._is_running = False

    def _begin(self, token_ids: list[int], runner: RoundRunner) -> None:
        self._check_can_run(token_ids)  # again: another generation may have run since the call
        self._is_running = True
        # Interrupted between commit and bookkeeping, the caches are ahead; recurrent state cannot be cut back.
        self._is_void |= self.target.length > max(len(self.tokens) - 1, 0)
        self.finish_reason = None
        self.tokens.extend(token_ids)
        self.stats = Stats(runner.mode, None if self.drafter is None else self.drafter.kind)

    def _rounds(self, runner: RoundRunner, tracker: StopTracker, max_tokens: int | None) -> Iterator[Emission]:
        n_left = max_tokens
        while True:
            reason = self._limit_reached(n_left)
            if reason:
                self.finish_reason = reason
                yield Emission([], tracker.finish(), finish_reason=reason)
                return
            result = runner.run(self.tokens, n_left, tracker.feed)
            self.tokens.extend(result.token_ids)
            self.stats.record(result)
            n_left = None if n_left is None else n_left - len(result.token_ids)
            reason = "stop" if result.stopped else self._limit_reached(n_left)
            self.finish_reason = reason
            text = result.text + tracker.finish() if reason and not result.stopped else result.text
            yield Emission(result.token_ids, text, result.logprobs, reason)
            if reason:
                return

    def _limit_reached(self, n_left: int | None) -> FinishReason | None:
        if n_left is not None and n_left <= 0:
            return "length"
        if self.target.length >= self.target.n_ctx:
            return "length"
        return "cancelled" if self._cancelled else None

    def _check_can_run(self, token_ids: list[int]) -> None:
        if self._is_running:
            raise OptionError("a generation is still running in this session: exhaust or close its iterator first")
        if not token_ids and not self.tokens:
            raise OptionError("the prompt has no tokens: generation needs at least one token to start from")
        n_tokens = len(self.tokens) + len(token_ids)
        if n_tokens > self.target.n_ctx:
            raise ContextLimitError(
                f"prompt and conversation have {n_tokens} tokens but the context holds {self.target.n_ctx}: "
                "shorten the prompt or load with a larger n_ctx"
            )

    def _synchronise(self, on_prefill: Callable[[int, int], None] | None) -> None:
        """Bring the caches up to the token before the anchor."""
        if self._is_void or getattr(self.target, "is_void", False):
            self.target.reset()
            if self.drafter is not None:
                self.drafter.reset()
            self._is_void = False
        missing = self.tokens[self.target.length : -1]
        if missing:
            self._prefill(missing, on_prefill)

    def _prefill(self, missing: list[int], on_prefill: Callable[[int, int], None] | None) -> None:
        held_before, started = self.target.length, self.clock()

        def on_chunk(n_done: int) -> None:
            self._catch_up()
            if on_prefill is not None:
                on_prefill(n_done, len(missing))
            if self._cancelled:
                raise _CancelledError

        try:
            self.target.prefill(missing, on_chunk)
        except _CancelledError:
            raise
        except BaseException:
            self._is_void = True
            raise
        finally:
            n_done = max(self.target.length - held_before, 0)
            self.stats.record_prefill(n_done, (self.clock() - started) * 1e3)

    def _catch_up(self) -> None:
        drafter = self.drafter
        if drafter is not None and self.target.length <= (getattr(drafter, "n_ctx", None) or self.target.n_ctx):
            drafter.catch_up()


def _check_max_tokens(max_tokens: int | None) -> None:
    if max_tokens is None or (isinstance(max_tokens, int) and not isinstance(max_tokens, bool) and max_tokens >= 0):
        return
    raise OptionError(f"max_tokens is {max_tokens!r}: it must be an integer of at least 0, or None for no limit")


def _checked_ids(token_ids: Sequence[int], n_vocab: int) -> list[int]:
    ids = np.asarray(token_ids)
    if not ids.size:
        return []
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise OptionError(f"the prompt is {token_ids!r:.80}: it must be a sequence of integer token ids")
    bad = ids[(ids < 0) | (ids >= n_vocab)]
    if bad.size:
        raise OptionError(f"the prompt has token {bad[0]}: ids must lie in 0 .. {n_vocab - 1}")
    checked: list[int] = ids.tolist()
    return checked
