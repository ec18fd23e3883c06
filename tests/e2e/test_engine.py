"""The engine as a program uses it: many generations, any order, errors and cancelling in between, nothing leaked."""

from __future__ import annotations

import gc
import inspect
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml_spec import (
    ContextLimitError,
    Engine,
    ModelFileError,
    OptionError,
    PyggmlSpecError,
    assets,
)
from pyggml_spec.decode.round import SpecOptions

pytestmark = pytest.mark.native

PROMPT = "def area(width, height):\n"


@pytest.fixture(scope="module")
def small() -> Engine:
    """The embedded pair with a context of 256 tokens and two slots."""
    with Engine.load(n_ctx=256, n_threads=1, n_parallel=2) as engine:
        yield engine


def test_any_order_of_lengths_repeats(small: Engine) -> None:
    """Long, short, long again: positions, cells and features start anew each time."""
    lengths = [100, 3, 200, 1, 100]
    runs = [small.generate(PROMPT, max_tokens=n, ignore_eos=True).tokens for n in lengths]

    assert [len(run) for run in runs] == lengths
    assert all(run == runs[2][: len(run)] for run in runs)


def test_stream_equals_generate(small: Engine) -> None:
    """Pieces add up to the same text and tokens."""
    wanted = small.generate(PROMPT, max_tokens=50)
    stream = small.stream(PROMPT, max_tokens=50)
    pieces = list(stream)

    assert "".join(piece.text for piece in pieces) == wanted.text
    assert [i for piece in pieces for i in piece.token_ids] == wanted.tokens
    assert stream.completion.finish_reason == wanted.finish_reason == "length"


def test_cancelled_generation_leaves_the_engine_usable(small: Engine) -> None:
    """Closed after two pieces, or cancelled from outside; the next request is not disturbed."""
    wanted = small.generate(PROMPT, max_tokens=40).tokens
    with small.stream(PROMPT, max_tokens=200) as stream:
        next(stream)
        next(stream)
    stream = small.stream(PROMPT, max_tokens=200)
    next(stream)
    stream.cancel()
    list(stream)

    assert stream.completion.finish_reason == "cancelled"
    assert small.generate(PROMPT, max_tokens=40).tokens == wanted


def test_one_generation_at_a_time(small: Engine) -> None:
    """A second stream is refused while the first one runs."""
    with small.stream(PROMPT) as stream:
        next(stream)
        with pytest.raises(OptionError, match="still running"):
            small.generate(PROMPT)


def test_full_context_ends_with_length(small: Engine) -> None:
    """The draft shrinks towards the end of the context, and the last token is the one that fits."""
    plain = small.generate(PROMPT, max_tokens=None, ignore_eos=True, spec="off")
    drafted = small.generate(PROMPT, max_tokens=None, ignore_eos=True, spec="chain")

    assert plain.finish_reason == drafted.finish_reason == "length"
    assert drafted.tokens == plain.tokens
    assert plain.prompt_tokens + len(plain.tokens) == 256 + 1  # the last token is emitted, never processed


def test_prompt_longer_than_the_context_is_refused(small: Engine) -> None:
    """One sentence, and the engine goes on."""
    with pytest.raises(ContextLimitError, match="the context holds 256"):
        small.generate("x = 1\n" * 300)
    assert small.generate(PROMPT, max_tokens=1).tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": -5}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"tau": -1.0, "spec": "tree"}, "tau"),
        ({"tree_top_k": 17, "spec": "tree"}, "tree_top_k"),
        ({"budget": 0, "spec": "tree"}, "budget"),
        ({"budget": 32, "spec": "tree"}, "at most 31"),
        ({"draft_max": 8}, "at most 7"),
        ({"draft_max": 3, "spec": "off"}, "draft_max is 3, but spec off makes no drafts"),
        ({"policy": "cost", "spec": "off"}, "policy is 'cost', but spec off makes no drafts"),
        ({"presence_penalty": -1e39}, "presence_penalty is -1e\\+39: it must be a number from -100 to 100"),
        ({"budget": 3}, "budget is 3: it shapes trees"),
        ({"tree_top_k": 2, "spec": "chain"}, "tree_top_k is 2: it shapes trees"),
        ({"tau": 1, "spec": "off"}, "tau is 1: it shapes trees"),
        ({"top_k": 5}, "top_k is 5, but temperature 0 is greedy"),
        ({"seed": 1, "temperature": 0}, "seed is 1, but temperature 0 is greedy"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"seed": 2**64}, "from 0 to 2"),
        ({"spec": "fast"}, "spec"),
        ({"policy": "best"}, "fixed, ema, cost"),
        ({"stop": ""}, "stop"),
    ],
)
def test_bad_options_name_themselves(small: Engine, options: dict, message: str) -> None:
    """Refused before anything runs; the engine stays usable."""
    with pytest.raises(OptionError, match=message):
        small.generate(PROMPT, **options)
    assert small.generate(PROMPT, max_tokens=1).tokens


WRONG = [None, True, 1.5, float("nan"), 10**30, "x", b"x", "", [], [None], {}, {5: 5}, object(), np.arange(2)]


def keywords(call: Any) -> Iterator[str]:
    """Arguments that are given by name."""
    return (p.name for p in inspect.signature(call).parameters.values() if p.kind is p.KEYWORD_ONLY)


@pytest.mark.parametrize("name", [*keywords(Engine.stream), "prompt"])
def test_options_of_another_kind_name_themselves(small: Engine, name: str) -> None:
    """Whatever is given: it is taken, or refused in one sentence; nothing else comes out."""
    for value in WRONG:
        try:
            small.stream(**{"prompt": PROMPT, name: value}).close()
        except PyggmlSpecError as error:
            assert name in str(error) and "\n" not in str(error) and len(str(error)) < 300


@pytest.mark.parametrize("name", [*keywords(Engine.load), "target", "drafter"])
def test_loading_names_options_of_another_kind(name: str) -> None:
    """The same before memory is taken."""
    for value in WRONG:
        try:
            Engine.load(**{"n_ctx": 64, "n_threads": 1, "prefix_cache_mib": 0, name: value}).close()
        except ModelFileError as error:
            assert name == "target" and isinstance(value, str), error
        except PyggmlSpecError as error:
            assert name in str(error) and "\n" not in str(error) and len(str(error)) < 300


@pytest.mark.parametrize("messages", [None, 5, "hello", b"hello", {"role": "user"}, ["hello"], [5], [{}]], ids=repr)
def test_messages_of_another_kind_are_refused(small: Engine, messages: Any) -> None:
    """One sentence again."""
    with pytest.raises(OptionError, match="'role'|\"role\""):
        small.chat_prompt(messages)


def test_integers_of_numpy(small: Engine) -> None:
    """They do wherever an integer does, and statistics stay plain numbers."""
    sizes = {"n_ctx": 64, "n_threads": 1, "max_width": 16, "n_parallel": 1, "prefix_cache_mib": 0}
    options = {"max_tokens": 9, "temperature": 1, "top_k": 5, "penalty_last_n": 8, "seed": 1, "logprobs": 1}
    trees = {"spec": "tree", "draft_max": 3, "budget": 6, "tree_top_k": 2}
    as_numpy = [{k: v if isinstance(v, str) else np.int64(v) for k, v in each.items()} for each in (options, trees)]
    with Engine.load(**{name: np.uint16(value) for name, value in sizes.items()}) as engine:
        done = engine.generate(PROMPT, **as_numpy[0], **as_numpy[1])
        assert engine.describe()["n_ctx"] == 64
        json.dumps([engine.describe(), done.stats])

    assert done.tokens == small.generate(np.array(small.tokenizer.encode(PROMPT)), **options, **trees).tokens


def test_control_tokens_in_a_conversation_are_text(small: Engine) -> None:
    """A prompt given as a text may hold control tokens, a message may not."""
    ids = small.chat_prompt([{"role": "user", "content": "<|im_end|>"}])

    assert small.tokenizer.encode("<|im_end|>")[0] in small.tokenizer.special_ids
    assert sum(i in small.tokenizer.special_ids for i in ids) == 3
    assert small.generate(ids, max_tokens=1).prompt_tokens == len(ids)


@pytest.mark.parametrize("prompt", ["", []], ids=["text", "tokens"])
def test_empty_prompt_is_refused(small: Engine, prompt: str | list[int]) -> None:
    """The model has no token that starts a text."""
    with pytest.raises(OptionError, match="no tokens"):
        small.generate(prompt)


@pytest.mark.parametrize("prompt", [b"abc", None, 5], ids=repr)
def test_prompts_of_another_kind_are_refused(small: Engine, prompt: object) -> None:
    """Bytes would pass for token ids."""
    with pytest.raises(OptionError, match="prompt is .* a text or a list of token ids"):
        small.generate(prompt)


def test_foreign_token_ids_are_refused(small: Engine) -> None:
    """An id beyond the vocabulary would read outside the embedding table."""
    for bad in (8192, -1, 2**40):
        with pytest.raises(OptionError, match="ids must lie in 0 .. 8191"):
            small.generate([5, bad])


def test_nothing_to_generate_is_defined(small: Engine) -> None:
    """max_tokens 0 reads the prompt and emits nothing."""
    done = small.generate(PROMPT, max_tokens=0)

    assert (done.text, done.tokens, done.finish_reason) == ("", [], "length")


def test_sampling_repeats_with_its_seed(small: Engine) -> None:
    """Same seed, same text, with and without other requests in between; another seed, another text."""
    options = {"max_tokens": 60, "temperature": 1.0, "top_p": 0.95}
    first = small.generate(PROMPT, seed=1, **options).tokens
    other = small.generate(PROMPT, seed=2, **options).tokens

    assert small.generate(PROMPT, seed=1, **options).tokens == first != other


def test_logprobs_are_those_of_the_target(small: Engine) -> None:
    """Real values for accepted tokens too: equal to a plain run's to f32 rounding of the log-sum."""
    runs = [small.generate(PROMPT, max_tokens=40, logprobs=3, spec=spec) for spec in ("off", "chain", "tree")]
    plain = runs[0].logprobs

    assert len(plain) == 40
    for run in runs[1:]:
        assert [row.token_id for row in run.logprobs] == [row.token_id for row in plain]
        assert all(a.logprob == b.logprob and a.top == b.top for a, b in zip(run.logprobs, plain, strict=True))
    assert all(row.logprob < 0 and len(row.top) == 3 for row in plain)


def test_two_sessions_interleaved_equal_two_alone(small: Engine) -> None:
    """Each has its own cells, banks and features."""
    prompts = [small.tokenizer.encode(text) for text in (PROMPT, "import os\n")]
    alone = [small.generate(ids, max_tokens=60, ignore_eos=True).tokens for ids in prompts]
    sessions = [small.open_session() for _ in prompts]
    runs = [s.generate(ids, max_tokens=60) for s, ids in zip(sessions, prompts, strict=True)]
    found: list[list[int]] = [[], []]
    live = {0, 1}
    while live:
        for i in sorted(live):
            emission = next(runs[i], None)
            if emission is None:
                live.discard(i)
            else:
                found[i] += emission.token_ids
    for session in sessions:
        session.close()

    assert found == alone


def test_two_threads_take_turns(small: Engine) -> None:
    """Sessions of one engine may be used from different threads at once."""
    prompts = [small.tokenizer.encode(text) for text in (PROMPT, "import os\n")]
    alone = [small.generate(ids, max_tokens=40, ignore_eos=True).tokens for ids in prompts]
    sessions = [small.open_session() for _ in prompts]
    found: list[list[int]] = [[], []]

    def work(i: int) -> None:
        found[i] = [token for e in sessions[i].generate(prompts[i], max_tokens=40) for token in e.token_ids]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for session in sessions:
        session.close()

    assert found == alone


def test_closing_a_stream_that_another_thread_reads_cancels_it(small: Engine) -> None:
    """It ends after its round, and the engine goes on."""
    wanted = small.generate(PROMPT, max_tokens=10).tokens
    stream = small.stream(PROMPT, max_tokens=None, ignore_eos=True)
    next(stream)
    reader = threading.Thread(target=lambda: list(stream))
    reader.start()
    refused = 0
    while reader.is_alive():
        try:
            stream.close()
        except OptionError:
            refused += 1
            reader.join()

    assert stream.completion.finish_reason == "cancelled" or not refused
    assert small.generate(PROMPT, max_tokens=10).tokens == wanted


CLOSED = "this session was closed"


def test_a_closed_session_does_nothing_to_who_has_its_slot() -> None:
    """Its iterator and all its calls are refused, while another session of the slot is in the middle of its text."""
    with Engine.load(n_ctx=256, n_threads=1) as engine:
        ids, others = (engine.tokenizer.encode(text) for text in (PROMPT, "class Stack:\n"))
        wanted = engine.generate(ids, max_tokens=40, ignore_eos=True).tokens
        closed = engine.open_session()
        snapshot = closed.snapshot()
        stale = closed.generate(others, max_tokens=100)
        next(stale)
        closed.close()
        session = engine.open_session()
        found, run = [], session.generate(ids, max_tokens=40)
        found += next(run).token_ids
        with pytest.raises(OptionError, match=CLOSED):
            next(stale)
        for call in (
            closed.reset,
            closed.snapshot,
            lambda: closed.restore(snapshot),
            lambda: closed.replace(others),
            lambda: closed.generate(others),
            closed.target.reset,
            lambda: closed.target.prefill(others),
            closed.drafter.reset,
        ):
            with pytest.raises(OptionError, match=CLOSED):
                call()
        closed.close()
        found += [token for emission in run for token in emission.token_ids]
        session.close()

        assert found == wanted


def test_closing_a_session_that_another_thread_uses_is_an_error_there(small: Engine) -> None:
    """The reader hears of it; sessions that come after it are as good as any."""
    ids, others = (small.tokenizer.encode(text) for text in (PROMPT, "class Stack:\n"))
    wanted = small.generate(ids, max_tokens=20, ignore_eos=True).tokens
    for _ in range(5):
        session, heard, has_begun = small.open_session(), [], threading.Event()

        def read(session=session, heard=heard, has_begun=has_begun) -> None:
            try:
                for _ in session.generate(others, max_tokens=200):
                    has_begun.set()
            except OptionError as error:
                heard.append(str(error))

        reader = threading.Thread(target=read)
        reader.start()
        has_begun.wait()
        session.close()
        after = small.open_session()
        found = [token for emission in after.generate(ids, max_tokens=20) for token in emission.token_ids]
        after.close()
        reader.join()

        assert found == wanted
        assert heard and CLOSED in heard[0]


@pytest.mark.parametrize(
    "call",
    [
        lambda session: session.generate([5], 5),
        lambda session: session.generate([5], spec="chain"),
        lambda session: session.restore(5),
    ],
)
def test_arguments_of_another_kind_are_refused_by_sessions(small: Engine, call) -> None:
    """A sentence, no attribute that something lacks."""
    session = small.open_session()
    with pytest.raises(OptionError, match="it must be"):
        call(session)
    session.close()


@pytest.mark.parametrize("n_read", [0, 2])
def test_closing_the_engine_is_an_error_for_who_reads_a_stream(n_read: int) -> None:
    """Nobody takes half a text for the whole one; what was read stays valid."""
    with Engine.load(n_ctx=256, n_threads=1) as engine:
        wanted = engine.generate(PROMPT, max_tokens=40, ignore_eos=True).tokens
        stream = engine.stream(PROMPT, max_tokens=40, ignore_eos=True)
        for _ in range(n_read):
            next(stream)
    with pytest.raises(OptionError, match="the engine was closed"):
        list(stream)

    done = stream.completion
    assert done.finish_reason == "cancelled"
    assert bool(done.tokens) == bool(n_read) and done.tokens == wanted[: len(done.tokens)]


def test_closing_the_engine_leaves_complete_streams_alone() -> None:
    """The last piece is out, so nothing is missing."""
    with Engine.load(n_ctx=256, n_threads=1) as engine:
        stream = engine.stream(PROMPT, max_tokens=5)
        n_read = 0
        while n_read < 5:
            n_read += len(next(stream).token_ids)
    assert list(stream) == []
    assert stream.completion.finish_reason == "length"


@pytest.mark.parametrize("spec", ["off", "chain"])
@pytest.mark.parametrize("by_session", [False, True], ids=["stream", "session"])
def test_closing_the_engine_while_another_thread_generates(spec: str, by_session: bool) -> None:
    """It waits for what runs on the device, and the other thread gets an error, not a freed device."""
    for _ in range(8):
        engine, errors = Engine.load(n_ctx=4096, n_threads=1), []
        ids, begun = engine.tokenizer.encode(PROMPT), threading.Event()
        if by_session:
            pieces = engine.open_session().generate(ids, spec=SpecOptions(spec))
        else:
            pieces = engine.stream(ids, max_tokens=None, ignore_eos=True, spec=spec)
        reader = threading.Thread(target=read_all, args=(pieces, begun, errors))
        reader.start()
        begun.wait(30)
        engine.close()
        reader.join()

        assert len(errors) == 1 and "closed" in errors[0]


def read_all(pieces: Iterator[Any], begun: threading.Event, errors: list[str]) -> None:
    """A reader in a thread of its own."""
    try:
        for _ in pieces:
            begun.set()
    except OptionError as error:
        errors.append(str(error))


def test_sessions_opened_at_once_get_slots_of_their_own(small: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that find the same slot free must not both take it."""
    find = small.target._free_slot

    def slowly() -> int | None:
        slot = find()
        time.sleep(0.05)
        return slot

    monkeypatch.setattr(small.target, "_free_slot", slowly)
    sessions = []
    threads = [threading.Thread(target=lambda: sessions.append(small.open_session())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(session.target.slot for session in sessions) == [0, 1]
    for session in sessions:
        session.close()


def test_threads_share_prefixes(small: Engine) -> None:
    """Requests that begin alike, in two threads, with memory for few prefixes: the texts are those of one thread."""
    prompts = [small.tokenizer.encode(PROMPT * 3 + f"# {i % 3}\n" * (1 + i % 2)) for i in range(6)]
    small.prefixes.clear()
    wanted = [small.generate(ids, max_tokens=8, ignore_eos=True).tokens for ids in prompts]
    one = small.prefixes.n_bytes // max(len(small.prefixes), 1)
    most, small.prefixes.max_bytes = small.prefixes.max_bytes, 2 * one + one // 2
    found: list[tuple[int, list[int]]] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def work(first: int) -> None:
        for i in range(first, first + 4 * len(prompts)):
            session = small.open_session()
            emissions = session.generate(prompts[i % len(prompts)], max_tokens=8)
            found.append((i % len(prompts), [token for e in emissions for token in e.token_ids]))
            session.close()

    threads = [threading.Thread(target=work, args=(3 * i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    small.prefixes.max_bytes = most
    small.prefixes.clear()

    assert len(found) == 8 * len(prompts)
    assert all(tokens == wanted[i] for i, tokens in found)
    pool = small.target.state.kv.pool
    assert pool.n_free == pool.n_cells


def test_a_damaged_target_says_so(tmp_path: Path) -> None:
    """Weights that are no numbers: a sentence, whatever the sampler."""
    data = bytearray(assets.embedded_target_path().read_bytes())
    data[-3_000_000:-2_900_000] = b"\xff" * 100_000
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data)
    with Engine.load(damaged, n_ctx=64, n_threads=1) as engine:
        for options in ({}, {"logprobs": 1}, {"temperature": 1.0}):
            with pytest.raises(ModelFileError, match="not numbers"):
                engine.generate(PROMPT, max_tokens=4, **options)


def test_a_session_continues_its_conversation(small: Engine) -> None:
    """Two turns equal one request with both turns' text."""
    first, second = small.tokenizer.encode(PROMPT), small.tokenizer.encode("\n# then\n")
    session = small.open_session()
    said = [i for e in session.generate(first, max_tokens=20) for i in e.token_ids]
    more = [i for e in session.generate(second, max_tokens=20) for i in e.token_ids]
    session.close()

    assert more == small.generate(first + said + second, max_tokens=20, ignore_eos=True).tokens


def test_sessions_beyond_the_slots_are_refused(small: Engine) -> None:
    """And a closed one makes room."""
    sessions = [small.open_session(), small.open_session()]
    with pytest.raises(OptionError, match="2 sequences of this engine are in use"):
        small.open_session()
    for session in sessions:
        session.close()
    assert small.generate(PROMPT, max_tokens=1).tokens


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n_ctx": 0}, OptionError, "n_ctx is 0"),
        ({"n_ctx": 5000}, OptionError, "1 to 4096"),
        ({"n_threads": 0}, OptionError, "n_threads is 0"),
        ({"device": "tpu"}, OptionError, "'tpu' is not available"),
        ({"kv_type_k": "q2_k"}, OptionError, "'q2_k'"),
        ({"max_width": 0}, OptionError, "max_width is 0"),
        ({"n_parallel": 0}, OptionError, "n_parallel is 0"),
        ({"drafter_settings": {"rope_theta": "x"}}, OptionError, "drafter_settings has 'x' for rope_theta"),
        ({"drafter_settings": {"n_layers": 5}}, OptionError, "a mapping with some of target_layer_ids"),
        ({"target": "missing.gguf"}, ModelFileError, "missing.gguf"),
        ({"drafter": "x.gguf"}, OptionError, "needs its target"),
    ],
)
def test_loading_refuses_with_a_sentence(options: dict, error: type[Exception], message: str) -> None:
    """Every option is checked before memory is taken."""
    with pytest.raises(error, match=message):
        Engine.load(**options)


def test_drafter_as_target_is_refused() -> None:
    """A swapped pair says so."""
    with pytest.raises(ModelFileError, match="drafter"):
        Engine.load(assets.embedded_drafter_path(), assets.embedded_target_path())


def resident_kb() -> int:
    """Resident memory of this process."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4


def test_loading_and_failing_200_times_leaks_nothing() -> None:
    """Half of the loads fail late (a slot too many), half generate; memory settles (F10)."""

    def once(i: int) -> None:
        with Engine.load(n_ctx=64, n_threads=1) as engine:
            engine.generate([5, 6, 7], max_tokens=2)
            if i % 2:
                with pytest.raises(OptionError):
                    engine.generate([9999])

    for i in range(20):
        once(i)
    gc.collect()
    before = resident_kb()
    for i in range(180):
        once(i)
    gc.collect()

    assert resident_kb() - before < 20_000  # a leaked target alone would add 180 x 20 MB
