"""Sessions on fakes: what is emitted never depends on the draft, and nothing that interrupts one breaks it."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from decode_fakes import N_VOCAB, FakeDecoder, FakeDrafter, FakeTarget, chi_square_excess, hashed_law

from pyggml_spec.decode.round import SpecOptions
from pyggml_spec.decode.sampling import Sampler
from pyggml_spec.decode.session import Emission, Session
from pyggml_spec.errors import ContextLimitError, DeviceError, FatalDeviceError, OptionError
from pyggml_spec.records import SamplingParams
from pyggml_spec.tree.build import TreeOptions

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
MODES = ["off", "chain", "tree"]


def make(quality: float = 0.7, horizon: int = 7, **target_options) -> Session:
    target = FakeTarget(**target_options)
    return Session(target, FakeDrafter(target, quality, horizon), n_vocab=N_VOCAB)


def spec_of(mode: str, budget: int = 12, **options) -> SpecOptions:
    return SpecOptions(mode, tree=TreeOptions(budget=budget), **options)


def run(session: Session, prompt: list[int], mode: str, params: SamplingParams | None = None, **options):
    """All tokens, text and the finish reason of one generation; checks what must hold after every emission."""
    emissions = []
    for emission in session.generate(prompt, params, spec=spec_of(mode), **options):
        emissions.append(emission)
        assert session.target.held == session.tokens[:-1], "the caches hold something else than the committed tokens"
    return joined(emissions, session)


def joined(emissions: list[Emission], session: Session) -> tuple[list[int], str, str]:
    assert [e.finish_reason for e in emissions[:-1]] == [None] * (len(emissions) - 1)
    assert emissions[-1].finish_reason == session.finish_reason
    return sum((e.token_ids for e in emissions), []), "".join(e.text for e in emissions), session.finish_reason


@pytest.mark.parametrize("mode", ["chain", "tree"])
@pytest.mark.parametrize("quality", [1.0, 0.6, 0.0])
@pytest.mark.parametrize(("horizon", "max_width"), [(1, 32), (7, 32), (7, 13), (15, 23)])
def test_greedy_equals_plain(mode: str, quality: float, horizon: int, max_width: int):
    """Token for token, over several turns, for a good, a mediocre and an adversarial drafter."""
    plain, spec = make(max_width=max_width), make(quality, horizon, max_width=max_width)
    for turn, n in [(PROMPT, 40), ([7], 9), ([], 5), ([1, 2], 1)]:
        assert run(spec, turn, mode, max_tokens=n) == run(plain, turn, "off", max_tokens=n)
    assert plain.tokens == spec.tokens


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_penalties_follow_the_nodes_own_path(mode: str):
    """Greedy decoding with penalties is deterministic, so drafted and plain runs must agree exactly."""
    params = SamplingParams(repeat_penalty=1.6, frequency_penalty=0.4, presence_penalty=0.2, penalty_last_n=6)
    plain, spec = make(), make()

    expected = run(plain, PROMPT, "off", params, max_tokens=60)
    assert run(spec, PROMPT, mode, params, max_tokens=60) == expected
    assert expected != run(make(), PROMPT, "off", max_tokens=60), "the penalties changed nothing: a weak test"
    assert spec.stats.accepted > 0


@pytest.mark.parametrize("mode", MODES)
def test_sampled_law(mode: str):
    """Transitions of a long sampled run follow the target's law after the samplers (chi-square per state)."""
    n_vocab, params = 4, SamplingParams(temperature=0.9, top_k=3, min_p=0.02, seed=11)
    law = hashed_law(n_vocab, order=1, seed=2)
    target = FakeTarget(law, n_ctx=4000)
    session = Session(target, FakeDrafter(target, 0.5, horizon=3), n_vocab=n_vocab)
    list(session.generate([0], params, spec=spec_of(mode, budget=6), max_tokens=1200))
    counts = np.zeros((n_vocab, n_vocab))
    np.add.at(counts, (session.tokens[:-1], session.tokens[1:]), 1)
    for state in range(n_vocab):
        expected = Sampler(params, n_vocab).distribution(law([state]), [])

        assert counts[state][expected == 0].sum() == 0
        assert counts[state].sum() < 100 or chi_square_excess(counts[state], expected * counts[state].sum()) < 4.5


def test_seeded_runs_repeat():
    """The same seed gives the same text; a session does not carry random state from call to call."""
    params = SamplingParams(temperature=1.0, seed=3)
    for mode in MODES:
        first, second = (run(make(), PROMPT, mode, params, max_tokens=30) for _ in range(2))

        assert first == second
        assert first != run(make(), PROMPT, mode, SamplingParams(temperature=1.0, seed=4), max_tokens=30)


def test_tree_without_branches_equals_chain():
    """With one candidate per node a tree is the chain: same tokens, rounds and acceptance (tau must not bite)."""
    chain, twig = make(0.8), make(0.8)
    run(chain, PROMPT, "chain", max_tokens=50)
    options = SpecOptions("tree", tree=TreeOptions(budget=22, top_k=1, tau=0.0))
    list(twig.generate(PROMPT, spec=options, max_tokens=50))

    assert twig.tokens == chain.tokens
    assert twig.stats.accepted_per_depth == chain.stats.accepted_per_depth
    assert (twig.stats.rounds, twig.stats.offered) == (chain.stats.rounds, chain.stats.offered)


@pytest.mark.parametrize("mode", ["chain", "tree"])
@pytest.mark.parametrize("position", range(12))
def test_stop_id_anywhere_in_a_block(mode: str, position: int):
    """Cut exactly where plain decoding stops, and the next turn continues as if the rest was never drafted."""
    reference, _, _ = run(make(), PROMPT, "off", max_tokens=12)
    stop_id = reference[position]
    plain, spec = make(), make(quality=1.0)
    expected = run(plain, PROMPT, "off", max_tokens=30, stop_ids=[stop_id])

    assert expected[0][-1] == stop_id and expected[2] == "stop"
    assert run(spec, PROMPT, mode, max_tokens=30, stop_ids=[stop_id]) == expected
    assert spec.stats.committed == len(expected[0]) and spec.stats.accepted <= len(expected[0])
    assert run(spec, [8, 8], mode, max_tokens=10) == run(plain, [8, 8], "off", max_tokens=10)


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_stop_strings_cut_tokens_text_and_logprobs(mode: str):
    """A stop string over token and block borders: the same cut for ids, text, log-probabilities and caches."""
    pieces = [bytes([97 + i % 3]) for i in range(N_VOCAB)]
    _, text, _ = run(make(), PROMPT, "off", max_tokens=24, decoder=FakeDecoder(pieces))
    params = SamplingParams(logprobs=2)
    for begin in range(0, 20, 3):
        stop, results = text[begin : begin + 4], []
        for session, kind in [(make(), "off"), (make(quality=1.0), mode)]:
            chosen = {"stop_strings": [stop], "decoder": FakeDecoder(pieces), "max_tokens": 24}
            emissions = list(session.generate(PROMPT, params, spec=spec_of(kind), **chosen))
            tokens, out, reason = joined(emissions, session)
            logprobs = sum((e.logprobs for e in emissions), [])
            assert [entry.token_id for entry in logprobs] == tokens and session.target.held == session.tokens[:-1]
            results.append((tokens, out, reason, logprobs))

        assert results[0] == results[1]
        assert results[0][1] == text[: text.index(stop)] and results[0][2] == "stop"


def test_logprobs_are_real_for_every_token():
    """Accepted draft tokens have the log-probability that plain decoding reports, never 0."""
    params, results = SamplingParams(logprobs=3), []
    for mode in MODES:
        emissions = list(make().generate(PROMPT, params, spec=spec_of(mode), max_tokens=20))
        results.append(sum((e.logprobs for e in emissions), []))

    assert results[0] == results[1] == results[2] and len(results[0]) == 20
    assert all(entry.logprob < 0 and entry.top[0] == (entry.token_id, entry.logprob) for entry in results[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_prompt", [1, 2, 11, 15, 16])
def test_end_of_context(mode: str, n_prompt: int):
    """The draft shrinks near the end and the generation ends with "length", as many tokens on as plain decoding."""
    session = make(quality=1.0, n_ctx=16)
    tokens, _, reason = run(session, (PROMPT * 2)[:n_prompt], mode)

    assert reason == "length" and len(tokens) == 17 - n_prompt and session.target.length == 16
    assert tokens == run(make(n_ctx=16), (PROMPT * 2)[:n_prompt], "off")[0]
    with pytest.raises(ContextLimitError, match="17 tokens but the context holds 16"):
        session.generate([], spec=spec_of(mode))
    session.reset()
    assert run(session, PROMPT, mode)[2] == "length"


def test_prompt_longer_than_the_context():
    """Refused before anything is computed; the session stays as it was."""
    session = make(n_ctx=6)
    with pytest.raises(ContextLimitError) as error:
        session.generate(PROMPT)
    assert str(error.value) == (
        "the text to continue has 8 tokens but the context holds 6: shorten the prompt or load with a larger n_ctx "
        "(at most 4096, what the model was trained with)"
    )
    session.target.n_ctx_train = 6
    with pytest.raises(ContextLimitError, match="shorten the prompt, for the model was trained with no larger context"):
        session.generate(PROMPT)

    assert session.tokens == [] and run(session, PROMPT[:3], "chain", max_tokens=2)[2] == "length"


@pytest.mark.parametrize("mode", ["chain", "tree"])
@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 8, 9])
def test_never_drafts_more_than_can_be_used(mode: str, max_tokens: int):
    """max_tokens is met exactly, and no draft reaches past it: the bonus token is the last one."""
    session = make(quality=1.0)
    tokens, _, reason = run(session, PROMPT, mode, max_tokens=max_tokens)

    assert len(tokens) == max_tokens and reason == "length"
    n_left = max_tokens
    for n_draft in session.drafter.asked:
        assert n_draft == min(n_left - 1, 7)
        n_left -= n_draft + 1
    assert session.target.length == len(PROMPT) - 1 + max_tokens


def test_any_order_of_lengths():
    """Long, short, long again on one session that is reset between requests; drafting starts anew each time."""
    session = make()
    for prompt in (PROMPT * 5, [2], PROMPT, PROMPT * 3):
        session.reset()

        assert run(session, prompt, "chain", max_tokens=12) == run(make(), prompt, "off", max_tokens=12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_seen", [1, 2, 4])
def test_closing_the_iterator_cancels(mode: str, n_seen: int):
    """What was emitted stays committed; the next call continues as plain decoding would."""
    session = make()
    stream, seen = session.generate(PROMPT, spec=spec_of(mode)), []
    for _ in range(n_seen):
        seen += next(stream).token_ids
    stream.close()

    assert session.finish_reason == "cancelled" and session.tokens == PROMPT + seen
    assert seen + run(session, [], mode, max_tokens=9)[0] == run(make(), PROMPT, "off", max_tokens=len(seen) + 9)[0]


def test_cancel_between_rounds():
    """A signal handler or another thread asks; the present round is still emitted, then comes "cancelled"."""
    session, seen = make(), []
    for emission in session.generate(PROMPT, spec=spec_of("chain")):
        seen += emission.token_ids
        if len(seen) > 5:
            session.cancel()

    assert emission.finish_reason == session.finish_reason == "cancelled"
    assert session.tokens == PROMPT + seen
    assert run(session, [5], "chain", max_tokens=4)[2] == "length"


def test_cancel_during_prefill():
    """Between two chunks; the prompt stays, and the next call computes only what is missing."""
    session, steps = make(n_batch=4), []
    prompt = PROMPT * 3

    def on_prefill(n_done: int, n_total: int) -> None:
        steps.append((n_done, n_total))
        if n_done == 8:
            session.cancel()

    assert run_unchecked(session, prompt, on_prefill) == []
    assert session.finish_reason == "cancelled" and steps == [(4, 23), (8, 23)] and session.target.length == 8
    assert run(session, [], "chain", max_tokens=9) == run(make(), prompt, "off", max_tokens=9)
    assert session.target.n_prefilled == len(prompt) - 1 and session.target.n_resets == 0


def run_unchecked(session: Session, prompt: list[int], on_prefill) -> list[int]:
    return sum((e.token_ids for e in session.generate(prompt, on_prefill=on_prefill)), [])


def test_interrupt_inside_a_verify():
    """Ctrl-C comes out; the next call rebuilds the caches from the committed tokens and continues."""
    session = make()
    stream = session.generate(PROMPT, spec=spec_of("chain"))
    seen = next(stream).token_ids
    session.target.verify_errors = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        next(stream)

    assert session.tokens == PROMPT + seen
    assert seen + run(session, [], "chain", max_tokens=9)[0] == run(make(), PROMPT, "off", max_tokens=len(seen) + 9)[0]
    assert session.target.n_resets == session.drafter.n_resets == 1


def test_a_verify_that_the_device_fails_is_repeated_on_rebuilt_caches():
    """The caller sees only time, and the statistics say so."""
    session = make()
    stream = session.generate(PROMPT, spec=spec_of("chain"), max_tokens=20)
    seen = next(stream).token_ids
    session.target.verify_errors = [DeviceError("failed half-way")]
    seen += sum((e.token_ids for e in stream), [])

    assert seen == run(make(), PROMPT, "off", max_tokens=20)[0]
    assert session.target.n_resets == session.drafter.n_resets == session.stats.report()["rebuilds"] == 1


def test_a_device_that_fails_again_is_not_asked_a_third_time():
    """The error comes out; a later call tries once more, and a fatal error is not retried at all."""
    session = make()
    session.target.verify_errors = [DeviceError("half-way"), DeviceError("again")]
    with pytest.raises(DeviceError, match="again"):
        list(session.generate(PROMPT, spec=spec_of("chain")))
    assert run(session, [], "chain", max_tokens=9) == run(make(), PROMPT, "off", max_tokens=9)

    session.target.verify_errors = [FatalDeviceError("dead")]
    n_resets = session.target.n_resets
    with pytest.raises(FatalDeviceError):
        list(session.generate([1], spec=spec_of("chain")))
    assert session.target.n_resets == n_resets


def test_failure_between_verify_and_accept_discards():
    """A decoder that raises costs that round only: the verify is discarded and nothing is prefilled again."""
    session = make()
    stream = session.generate(PROMPT, spec=spec_of("chain"), decoder=FakeDecoder([b"x"]), max_tokens=5)
    with pytest.raises(IndexError):
        next(stream)

    assert session.target.n_discards == 1 and session.tokens == PROMPT
    assert run(session, [], "chain", max_tokens=9) == run(make(), PROMPT, "off", max_tokens=9)
    assert session.target.n_resets == 0


def test_interrupt_between_commit_and_bookkeeping():
    """Caches ahead of the tokens cannot be cut back (recurrent state), so they are rebuilt."""
    session = make()
    run(session, PROMPT, "chain", max_tokens=3)
    session.target.held.append(1)

    assert run(session, [4], "chain", max_tokens=5)[2] == "length" and session.target.n_resets == 1


@pytest.mark.parametrize("bad_id", [-1, N_VOCAB])
def test_draft_ids_are_range_checked(bad_id: int):
    """An id outside the vocabulary must never be embedded; the session survives the drafter's fault."""
    session = make()
    session.drafter._row = lambda right, top_k, n_vocab: [bad_id]
    with pytest.raises(DeviceError, match=f"{bad_id}.*0 .. {N_VOCAB - 1}"):
        list(session.generate(PROMPT, spec=spec_of("chain")))

    assert run(session, [], "off", max_tokens=6) == run(make(), PROMPT, "off", max_tokens=6)


def test_prefill_reports_and_feeds_the_drafter():
    """Progress per chunk, and the drafter takes in each chunk's features before the next one."""
    session, steps = make(n_batch=5), []
    list(session.generate(PROMPT * 2, on_prefill=lambda *step: steps.append(step), max_tokens=1))

    assert steps == [(5, 15), (10, 15), (15, 15)] and session.drafter.n_catch_ups == 3
    assert session.stats.prefilled == 15


def test_max_tokens_zero_takes_the_prompt_in():
    """Defined: nothing is emitted, the prompt is in the caches, and a later call goes on from it."""
    session = make()

    assert run(session, PROMPT, "chain", max_tokens=0) == ([], "", "length")
    assert session.target.length == len(PROMPT) - 1 and session.stats.report()["spec"]["why"] == "nothing was generated"
    assert run(session, [], "chain", max_tokens=5) == run(make(), PROMPT, "off", max_tokens=5)


def test_one_generation_at_a_time():
    """A second one would interleave with the first; the message says what to do."""
    session = make()
    stream = session.generate(PROMPT)
    next(stream)
    with pytest.raises(OptionError, match="still running"):
        next(session.generate([1]))
    stream.close()

    assert run(session, [1], "chain", max_tokens=2)[2] == "length"


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt has no tokens"),
        ([1.5], {}, "sequence of integer token ids"),
        ("text", {}, "sequence of integer token ids"),
        ([N_VOCAB], {}, f"token {N_VOCAB}: ids must lie in 0"),
        ([-1], {}, "token -1"),
        ([1], {"max_tokens": -1}, "max_tokens is -1"),
        ([1], {"max_tokens": 2.0}, "max_tokens is 2.0"),
        ([1], {"max_tokens": True}, "max_tokens is True"),
        ([[1], [2, 3]], {}, "sequence of integer token ids"),
        ([[]], {}, "sequence of integer token ids"),
        (5, {}, "sequence of integer token ids"),
        ([1], {"stop_strings": None}, "stop is None"),
        ([1], {"spec": SpecOptions(confidence="1")}, "confidence is '1'"),
        ([1], {"spec": SpecOptions("fast")}, "spec is 'fast'.*auto, off, chain, tree"),
        ([1], {"spec": SpecOptions(draft_max=8)}, "draft_max is 8: .* at most 7"),
        ([1], {"spec": SpecOptions(draft_max=-1)}, "draft_max is -1"),
        ([1], {"spec": SpecOptions("tree", tree=TreeOptions(budget=32))}, "budget is 32: .* at most 31"),
        ([1], {"stop_strings": ["x"]}, "need a decoder"),
        ([1], {"params": SamplingParams(top_p=2)}, "top_p is 2"),
    ],
)
def test_options_are_checked(prompt: list[int], options: dict, message: str):
    """Refused at the call, before anything runs; the session is unchanged."""
    session = make()
    with pytest.raises(OptionError, match=message):
        session.generate(prompt, **options)

    assert session.tokens == [] and session.target.length == 0


def test_integers_of_numpy():
    """They are integers: the same run as with Python's own."""
    numbers = np.int64(9), np.uint8(3)
    runs = []
    for n_tokens, draft_max in (numbers, map(int, numbers)):
        session = make()
        prompt = np.array(PROMPT, np.int16)
        list(session.generate(prompt, spec=SpecOptions(draft_max=draft_max), max_tokens=n_tokens))
        runs.append(session.tokens)

    assert runs[0] == runs[1] and len(runs[0]) == len(PROMPT) + 9


def test_speculation_without_a_drafter():
    """Asked for by name it is an error; `auto` decodes plainly."""
    session = Session(FakeTarget(), n_vocab=N_VOCAB)
    for mode in ("chain", "tree"):
        with pytest.raises(OptionError, match="no drafter is loaded"):
            session.generate(PROMPT, spec=SpecOptions(mode))

    list(session.generate(PROMPT, max_tokens=3))
    assert session.stats.report()["spec"]["why"] == "3 of 3 rounds plain: no drafter is loaded"


def test_random_scripts():
    """Any order of generating, stopping, cancelling, failing and resetting: every token is the target's own argmax."""
    for seed in range(25):
        rng = np.random.default_rng(seed)
        session = make(quality=rng.random(), horizon=int(rng.integers(1, 9)), n_ctx=80, n_batch=int(rng.integers(1, 9)))
        is_prompt: list[bool] = []
        for _ in range(8):
            prompt = rng.integers(0, N_VOCAB, size=rng.integers(1, 12)).tolist()
            if len(session.tokens) + len(prompt) > session.target.n_ctx:
                session.reset()
                is_prompt = []
            is_prompt += [True] * len(prompt)
            play(session, prompt, rng)
            is_prompt += [False] * (len(session.tokens) - len(is_prompt))

        for i, token_id in enumerate(session.tokens):
            assert is_prompt[i] or token_id == session.target.law(session.tokens[:i]).argmax(), (seed, i)


def play(session: Session, prompt: list[int], rng: np.random.Generator) -> None:
    """One generation that ends in a random way."""
    stop_ids = rng.integers(0, N_VOCAB, size=3).tolist() if rng.random() < 0.5 else []
    chosen = {"max_tokens": int(rng.integers(0, 25)), "stop_ids": stop_ids, "spec": spec_of(str(rng.choice(MODES)))}
    stream, n_rounds, ending = session.generate(prompt, **chosen), int(rng.integers(1, 6)), rng.integers(0, 4)
    for _ in range(n_rounds):
        if next(stream, None) is None:
            return
    if ending == 1:
        session.cancel()
    if ending == 2:
        session.target.verify_errors = [KeyboardInterrupt()]
    if ending == 3:
        return stream.close()
    with contextlib.suppress(KeyboardInterrupt):
        list(stream)
    session.target.verify_errors = []


@pytest.mark.parametrize("mode", MODES)
def test_rounds_are_reported(mode: str):
    """`on_round` sees every committed round, cut as it was emitted."""
    rounds = []
    tokens, _, _ = run(make(), PROMPT, mode, max_tokens=20, on_round=rounds.append)

    assert [token for result in rounds for token in result.token_ids] == tokens
    assert all(result.tree.depths[node] == depth for result in rounds for depth, node in enumerate(result.path))
