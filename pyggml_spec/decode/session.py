"""A session: the committed tokens of one conversation, and generation that continues them.

`tokens` are all committed tokens; the last one is the anchor, which no cache holds yet. A call that the device failed
is repeated once, on rebuilt caches; when the device fails again its error comes out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import GEN_RUNNING, GEN_SUSPENDED, getgeneratorstate
from weakref import WeakSet

import numpy as np

from pyggml_spec.decode.arguments import as_int, check_kind, check_length, is_int, refusal
from pyggml_spec.decode.prefix_cache import PrefixCache, Snapshot
from pyggml_spec.decode.protocols import CLOSED, DrafterSequence, TargetSequence
from pyggml_spec.decode.round import RoundResult, RoundRunner, SpecOptions
from pyggml_spec.decode.sampling import Sampler
from pyggml_spec.decode.session_caches import CancelledError, OnChunk, SessionCaches
from pyggml_spec.decode.stats import Stats
from pyggml_spec.decode.stops import StopTracker, StreamDecoder
from pyggml_spec.errors import DeviceError, FatalDeviceError, OptionError
from pyggml_spec.policy import FixedPolicy, Policy, PolicyShelf
from pyggml_spec.records import FinishReason, SamplingParams, TokenLogprob


@dataclass(frozen=True)
class Emission:
    """What one round emitted. Text may lag behind: half characters and possible stop strings are withheld."""

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None  # set in the last emission of a generation


class Session:
    """One conversation on one target sequence, with or without a drafter.

    Args:
        target, drafter: the sequences, both empty or both reset.
        n_vocab: ids of the target's vocabulary are 0 .. n_vocab - 1.
        policy: how much to speculate; kept across generations so that it may learn. None = what the options name.
        policies: where those are kept; shared by the sessions of an engine.
        prefixes: where prompts' beginnings are looked up and left; shared by the sessions of an engine.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        target: TargetSequence,
        drafter: DrafterSequence | None = None,
        *,
        n_vocab: int,
        policy: Policy | None = None,
        policies: PolicyShelf | None = None,
        prefixes: PrefixCache | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.n_vocab = n_vocab
        self.policy = FixedPolicy() if policy is None and policies is None else policy
        self.policies = PolicyShelf() if policies is None else policies
        self.caches = SessionCaches(target, drafter, prefixes, clock)
        self.clock = clock
        self.tokens: list[int] = []
        self.stats = Stats()  # of the latest generation
        self.finish_reason: FinishReason | None = None  # of the latest generation; None while it runs
        self._cancelled = False
        self._is_closed = False
        self._generations: WeakSet[Generator[Emission, None, None]] = WeakSet()

    def cancel(self) -> None:
        """End the running generation after this round or prefill chunk; safe from signal handlers and threads."""
        self._cancelled = True

    def reset(self) -> None:
        """Forget the conversation."""
        self._refuse_running()
        self.tokens = []
        self.caches.reset()
        self.stats = Stats()
        self.finish_reason = None

    def replace(self, token_ids: Sequence[int]) -> None:
        """Make these the conversation's tokens; the next call computes what no cache holds of them.

        Caches that went another way are given up: recurrent state cannot be cut back, but the longest beginning of
        which `prefixes` has a snapshot is not computed again.

        Raises:
            OptionError: a generation is running, or these are no token ids; nothing has changed.
            ContextLimitError: more tokens than the context holds; nothing has changed.
        """
        self._refuse_running()
        checked = _checked_ids(token_ids, self.n_vocab)
        check_length(len(checked), self.target.n_ctx, self.target.n_ctx_train)
        if self.tokens[: self.target.length] != checked[:-1][: self.target.length]:
            self.caches.mark_void()
        self.tokens = checked

    def snapshot(self) -> Snapshot:
        """The conversation as it is now, caches included, for `restore` here or in any session of the same engine.

        The session goes on as if nothing had happened. The snapshot owns its part of the caches until its `release`.

        Raises:
            OptionError: a generation is running.
            DeviceError: the caches are void: the last call failed or was interrupted; generate or reset first.
        """
        self._refuse_running()
        if self.caches.is_out_of_step(self.tokens):
            raise DeviceError("the last call of this session was interrupted: generate or reset before a snapshot")
        return self.caches.snapshot(self.tokens)

    def restore(self, snapshot: Snapshot) -> None:
        """Make the conversation and its caches what they were at the snapshot.

        Raises:
            OptionError: a generation is running, or the engine was parked since; nothing has changed then.
        """
        self._refuse_running()
        if not isinstance(snapshot, Snapshot):
            raise refusal("snapshot", snapshot, "what `Session.snapshot` returned")
        self.caches.restore(snapshot)
        self.tokens = snapshot.token_ids.tolist()
        self.caches.settle()

    def close(self) -> None:
        """Leave a snapshot with `prefixes` and give the caches back to the engine; safe to call twice.

        Nothing can be done with the session afterwards; reading on from an iterator of it raises OptionError.
        """
        if self._is_closed:
            return
        self._is_closed = True
        is_running = any(getgeneratorstate(generation) == GEN_RUNNING for generation in list(self._generations))
        self.caches.close(None if is_running else self.tokens)

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
        on_prefill: OnChunk | None = None,
        on_round: Callable[[RoundResult], None] | None = None,
    ) -> Iterator[Emission]:
        """Append `token_ids` and generate what follows, one emission per round.

        `max_tokens` None goes on until a stop or the end of the context; 0 takes the prompt in and emits nothing.
        `on_prefill(n_done, n_total)` reports progress; `on_round` gets every committed round with its tree. Closing the
        iterator between rounds cancels: what was emitted stays committed, and a later call continues after it.

        Raises:
            OptionError: an option is out of range, or there is no token to start from.
            ContextLimitError: prompt and conversation do not fit into the context.
        """
        check_kind("params", params, SamplingParams)
        check_kind("spec", spec, SpecOptions)
        sampler = Sampler(params or SamplingParams(), self.n_vocab)
        spec = spec or SpecOptions()
        policy = self.policy or self.policies.choose(spec.policy, spec.mode)
        runner = RoundRunner(self.target, self.drafter, sampler, spec, policy, self.clock)
        tracker = StopTracker(stop_ids, stop_strings, decoder)
        max_tokens = _checked_limit(max_tokens)
        checked = _checked_ids(token_ids, self.n_vocab)
        self._check_can_run(checked)
        self._cancelled = False
        generation = self._generate(checked, runner, tracker, max_tokens, on_prefill, on_round or _ignore)
        self._generations.add(generation)
        return generation

    def _generate(
        self,
        token_ids: list[int],
        runner: RoundRunner,
        tracker: StopTracker,
        max_tokens: int | None,
        on_prefill: OnChunk | None,
        on_round: Callable[[RoundResult], None],
    ) -> Generator[Emission, None, None]:
        self._begin(token_ids, runner)
        try:
            self.caches.synchronise(self.tokens, self.stats, self._watched(on_prefill))
            yield from self._rounds(runner, tracker, max_tokens, on_round)
        except CancelledError:
            yield Emission([], "", finish_reason="cancelled")
        finally:
            self.finish_reason = self.finish_reason or "cancelled"

    def _begin(self, token_ids: list[int], runner: RoundRunner) -> None:
        self._check_can_run(token_ids, n_allowed=1)  # again: another generation may have run since the call
        self.caches.begin(runner, self.tokens)
        self.finish_reason = None
        self.tokens.extend(token_ids)
        self.stats = Stats(runner.mode, None if self.drafter is None else self.drafter.kind)

    def _rounds(
        self,
        runner: RoundRunner,
        tracker: StopTracker,
        max_tokens: int | None,
        on_round: Callable[[RoundResult], None],
    ) -> Iterator[Emission]:
        n_left = max_tokens
        while True:
            reason = self._limit_reached(n_left)
            if reason:
                self.finish_reason = reason
                yield Emission([], tracker.finish(), finish_reason=reason)
                return
            result = self._run_round(runner, tracker, n_left)
            self.tokens.extend(result.token_ids)
            self.stats.record(result)
            on_round(result)
            n_left = None if n_left is None else n_left - len(result.token_ids)
            reason = "stop" if result.stopped else self._limit_reached(n_left)
            self.finish_reason = reason
            text = result.text + tracker.finish() if reason and not result.stopped else result.text
            yield Emission(result.token_ids, text, result.logprobs, reason)
            if reason:
                return

    def _run_round(self, runner: RoundRunner, tracker: StopTracker, n_left: int | None) -> RoundResult:
        try:
            return runner.run(self.tokens, n_left, tracker.feed)
        except FatalDeviceError:
            raise
        except DeviceError:
            self.caches.rebuild(self.tokens, self.stats, self._watched(None))
            return runner.run(self.tokens, n_left, tracker.feed)

    def _limit_reached(self, n_left: int | None) -> FinishReason | None:
        if n_left is not None and n_left <= 0:
            return "length"
        if self.target.length >= self.target.n_ctx:
            return "length"
        return "cancelled" if self._cancelled else None

    def _check_can_run(self, token_ids: list[int], n_allowed: int = 0) -> None:
        self._refuse_running(n_allowed)
        if not token_ids and not self.tokens:
            raise OptionError("the prompt has no tokens: generation needs at least one token to start from")
        check_length(len(self.tokens) + len(token_ids), self.target.n_ctx, self.target.n_ctx_train)

    def _refuse_running(self, n_allowed: int = 0) -> None:
        """Raise when more generations than `n_allowed` have begun and not ended: their frames tell, as no flag can that
        an interrupt may keep from being cleared. Raise as well when the session was closed."""
        if self._is_closed:
            raise OptionError(CLOSED)
        states = [getgeneratorstate(generation) for generation in self._generations]
        if states.count(GEN_RUNNING) + states.count(GEN_SUSPENDED) > n_allowed:
            raise OptionError("a generation is still running in this session: exhaust or close its iterator first")

    def _watched(self, on_prefill: OnChunk | None) -> OnChunk:
        """Report progress, and leave the prefill when the generation was cancelled."""

        def on_chunk(n_done: int, n_total: int) -> None:
            if on_prefill is not None:
                on_prefill(n_done, n_total)
            if self._cancelled:
                raise CancelledError

        return on_chunk


def _ignore(_: RoundResult) -> None:
    """Nobody wants to know of rounds."""


def _checked_limit(max_tokens: int | None) -> int | None:
    number = as_int(max_tokens)
    if number is None or (is_int(number) and number >= 0):
        return number
    raise refusal("max_tokens", max_tokens, "an integer of at least 0, or None for no limit")


def _checked_ids(token_ids: Sequence[int], n_vocab: int) -> list[int]:
    try:
        ids = np.asarray(token_ids)
    except ValueError:  # lists of different lengths
        ids = np.zeros((1, 0, 1))
    if ids.shape == (0,):
        return []
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise OptionError(f"the prompt is {token_ids!r:.80}: it must be a sequence of integer token ids")
    bad = ids[(ids < 0) | (ids >= n_vocab)]
    if bad.size:
        raise OptionError(f"the prompt has token {bad[0]}: ids must lie in 0 .. {n_vocab - 1}")
    checked: list[int] = ids.tolist()
    return checked
