"""Prefixes found by their tokens, on fakes: what is reused is right, what is kept is bounded."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from decode_fakes import N_VOCAB, FakeDrafter, FakeSnapshot, FakeTarget
from test_session import PROMPT, run, spec_of

from pyggml_spec.decode.prefix_cache import MAX_STEPS, MIN_TOKENS, STEP_TOKENS, PrefixCache, Snapshot
from pyggml_spec.decode.session import Session
from pyggml_spec.errors import DeviceError, OptionError

SYSTEM = PROMPT * 5  # 40 tokens


def make(prefixes: PrefixCache | None = None, **options) -> Session:
    target = FakeTarget(**options)
    return Session(target, FakeDrafter(target), n_vocab=N_VOCAB, prefixes=prefixes)


def kept(tokens: list[int], n_bytes: int = 1000) -> Snapshot:
    return Snapshot(np.array(tokens, dtype=np.int32), FakeSnapshot(list(tokens), n_bytes), None)


def ask(prefixes: PrefixCache, prompt: list[int], n_tokens: int = 9, mode: str = "chain") -> tuple[list[int], int]:
    """Tokens of one request in a session of its own, and how many of the prompt's came from a snapshot."""
    session = make(prefixes)
    tokens = run(session, prompt, mode, max_tokens=n_tokens)[0]
    session.close()
    return tokens, session.stats.report()["prompt_tokens_cached"]


def test_the_same_prompt_twice():
    """All but the anchor is taken from the first request's snapshot, and the answer is the same."""
    prefixes = PrefixCache(10**6)
    first, second = ask(prefixes, SYSTEM), ask(prefixes, SYSTEM)

    assert first == (second[0], 0)
    assert second[1] == len(SYSTEM) - 1


def test_a_conversation_that_grows():
    """The next turn's prompt holds the last one's answer: only the new words are computed."""
    prefixes, prompt = PrefixCache(10**6), list(SYSTEM)
    for turn in range(4):
        answer, n_cached = ask(prefixes, prompt)
        assert answer == run(make(), prompt, "off", max_tokens=9)[0]
        assert n_cached == (len(prompt) - 4 if turn else 0)  # the last answer's anchor, three words, not the new anchor
        prompt += [*answer, 7, 8, 9]


def test_an_edited_message():
    """Where a prompt leaves an earlier one a snapshot is taken, so the next edit starts there."""
    prefixes = PrefixCache(10**6)
    edits = [SYSTEM + [i] * 20 for i in range(4)]
    n_cached = [ask(prefixes, prompt)[1] for prompt in edits]

    assert n_cached == [0, 0, len(SYSTEM), len(SYSTEM)]


def test_a_long_prompt_is_left_at_regular_stops():
    """At most MAX_STEPS of them, at the borders of prefill calls."""
    prefixes, rng = PrefixCache(10**6), np.random.default_rng(0)
    for n_tokens in (STEP_TOKENS - 1, STEP_TOKENS + 1, 3000, 30_000):
        stops = prefixes.stops(rng.integers(0, N_VOCAB, size=n_tokens), 0)

        assert stops[-1] == n_tokens and len(stops) <= MAX_STEPS + 1
        assert all(stop % STEP_TOKENS == 0 for stop in stops[:-1])
    assert prefixes.stops([1] * 1000, 990) == [1000]
    assert prefixes.stops([1] * (MIN_TOKENS - 1), 0) == []


def test_the_longest_fitting_prefix_is_found():
    """Not one that goes on differently, nor one that is longer than the prompt."""
    prefixes = PrefixCache(10**6)
    for tokens in (SYSTEM[:20], SYSTEM[:30], [*SYSTEM[:30], 0], [1, *SYSTEM]):
        prefixes.add(kept(tokens))

    assert prefixes.find(SYSTEM[:35]).length == 30
    assert prefixes.find(SYSTEM[:29]).length == 20
    assert prefixes.find([0, *SYSTEM]) is None


def test_memory_is_bounded():
    """The least recently used go first and are released; one that can never fit is refused for good."""
    prefixes = PrefixCache(3500)
    snapshots = [kept([i] * 20) for i in range(3)]
    for snapshot in snapshots:
        prefixes.add(snapshot)
    assert prefixes.find([0] * 25) is snapshots[0]
    prefixes.add(kept([9] * 20))

    assert [s.target.is_released for s in snapshots] == [False, True, False]
    assert prefixes.n_bytes <= 3500 and len(prefixes) == 3
    large = kept([5] * 20, n_bytes=4000)
    prefixes.add(large)
    assert large.target.is_released and len(prefixes) == 3
    assert prefixes.stops(SYSTEM, 0) == [] and not prefixes.wants(SYSTEM)
    prefixes.clear()
    assert (len(prefixes), prefixes.n_bytes, prefixes.evict()) == (0, 0, False)


def test_no_memory_means_no_cache():
    """Nothing is copied, nothing is found."""
    prefixes = PrefixCache(0)

    assert ask(prefixes, SYSTEM) == ask(prefixes, SYSTEM) == (run(make(), SYSTEM, "off", max_tokens=9)[0], 0)
    assert len(prefixes) == 0


def test_cancelled_prompt_goes_on_where_it_stopped():
    """What was read before the cancellation is kept."""
    prefixes = PrefixCache(10**6)
    session = make(prefixes, n_batch=4)
    list(session.generate(SYSTEM, on_prefill=lambda n_done, _: session.cancel() if n_done == 20 else None))
    session.close()

    assert ask(prefixes, SYSTEM) == (run(make(), SYSTEM, "off", max_tokens=9)[0], 20)


def test_a_rebuild_starts_from_a_snapshot():
    """After a failed call only what came after the prompt is computed again."""
    session = make(PrefixCache(10**6))
    stream = session.generate(SYSTEM, spec=spec_of("chain"), max_tokens=30)
    seen = next(stream).token_ids
    session.target.verify_errors = [DeviceError("half-way")]
    n_prefilled = session.target.n_prefilled
    seen += sum((e.token_ids for e in stream), [])

    assert seen == run(make(), SYSTEM, "off", max_tokens=30)[0]
    assert session.target.n_prefilled - n_prefilled <= 8


def test_snapshot_and_restore_of_a_session():
    """Back to an earlier moment, any number of times, in this session or in another one."""
    session = make()
    run(session, PROMPT, "chain", max_tokens=5)
    saved, tokens = session.snapshot(), list(session.tokens)
    ways = [run(session, [i], "chain", max_tokens=9)[0] for i in (1, 2) if session.restore(saved) is None]
    other = make()
    other.restore(saved)

    assert ways == [run(make(), [*tokens, i], "off", max_tokens=9)[0] for i in (1, 2)]
    other.drafter.target.held = list(saved.target.held)
    assert other.tokens == tokens and run(other, [1], "tree", max_tokens=9)[0] == ways[0]


def test_snapshots_of_an_unfit_session_are_refused():
    """While it runs, and after an interrupt, when the caches hold nobody knows what."""
    session = make()
    stream = session.generate(PROMPT, spec=spec_of("chain"))
    next(stream)
    for call in (session.snapshot, session.reset, lambda: session.replace([1])):
        with pytest.raises(OptionError, match="still running"):
            call()
    session.target.verify_errors = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    with pytest.raises(DeviceError, match="interrupted"):
        session.snapshot()


@pytest.mark.parametrize("n_common", [0, 3, 12, 16, 17])
def test_replaced_conversation(n_common: int):
    """An edited history continues as if it had always been so; caches that still fit are kept."""
    session = make()
    run(session, PROMPT, "chain", max_tokens=8)
    edited = [*session.tokens[:n_common], 11, 12, 13][: len(session.tokens) + 2]
    session.replace(edited)

    assert run(session, [], "chain", max_tokens=9) == run(make(), edited, "off", max_tokens=9)
    assert session.target.n_resets == (n_common < 15)


@pytest.fixture
def busy_threads() -> Iterator[None]:
    """Threads change places after nearly every instruction."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_nobody_releases_a_prefix_that_is_being_restored():
    """Between finding it and having it back a snapshot belongs to the session that found it."""
    prefixes = PrefixCache(10**6)
    answer, _ = ask(prefixes, SYSTEM)
    session, found, cleared = make(prefixes), threading.Event(), threading.Event()
    restore = session.target.restore

    def slowly(snapshot: FakeSnapshot) -> None:
        found.set()
        cleared.wait(0.2)
        restore(snapshot)

    def clear() -> None:
        found.wait(5)
        prefixes.clear()
        cleared.set()

    session.target.restore = slowly
    other = threading.Thread(target=clear)
    other.start()
    tokens = run(session, SYSTEM, "chain", max_tokens=9)[0]
    other.join()

    assert tokens == answer and session.target.n_restores == 1
    assert cleared.is_set()


def test_threads_share_one_cache(busy_threads):
    """Looking up, leaving and evicting at once: every snapshot is released once, none while somebody has it."""
    prefixes, snapshots, errors = PrefixCache(5000), [], []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(300):
                tokens = [int(rng.integers(3))] * int(rng.integers(16, 24))
                prefixes.stops(tokens, 0)
                if prefixes.wants(tokens):
                    snapshots.append(kept(tokens))
                    prefixes.add(snapshots[-1])
                with prefixes.lock:
                    found = prefixes.find(tokens)
                    assert found is None or not found.target.is_released
                if rng.random() < 0.2:
                    prefixes.evict()
                assert prefixes.n_bytes <= 5000
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    assert sum(not snapshot.target.is_released for snapshot in snapshots) == len(prefixes)


def test_a_snapshot_is_released_under_the_lock_of_its_device():
    """It gives cells back that other threads count at the same time."""
    session = make()
    session.target.lock = threading.RLock()
    run(session, PROMPT, "chain", max_tokens=3)
    snapshot = session.snapshot()
    releaser = threading.Thread(target=snapshot.release)
    with session.target.lock:
        releaser.start()
        releaser.join(0.1)
        assert not snapshot.target.is_released
    releaser.join()

    assert snapshot.target.is_released
