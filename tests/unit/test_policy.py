"""Policies on simulated texts: near the best fixed draft length without knowing the text, and sane at the edges."""

from __future__ import annotations

import numpy as np
import pytest
from decode_fakes import N_VOCAB, FakeClock, FakeDrafter, FakeTarget
from policy_traces import EASY, HARD, HORIZON, MEDIUM, Fixed, chain, make_trace, observation, replay

from pyggml_spec.decode.round import SpecOptions
from pyggml_spec.decode.session import Session
from pyggml_spec.errors import OptionError
from pyggml_spec.policy import CostPolicy, DraftLimits, EmaPolicy, FixedPolicy, PolicyShelf, RoundObservation
from pyggml_spec.policy.acceptance import AcceptanceModel
from pyggml_spec.policy.cost import WHY_MEASURING, WHY_OFF, _candidates
from pyggml_spec.policy.times import TypicalTime, WidthTimes

LIMITS = DraftLimits(HORIZON, HORIZON)
TEXTS = {
    "easy": [(EASY, 1500)],
    "medium": [(MEDIUM, 1500)],
    "hard": [(HARD, 1500)],
    "switching": [(EASY, 250), (HARD, 250)] * 3,
    "hard, then easy": [(HARD, 700), (EASY, 800)],
    "easy, then hard": [(EASY, 700), (HARD, 800)],
}


def logprobs(*chances: float) -> np.ndarray:
    """Of a chain with these draft probabilities."""
    return np.log([1.0, *chances]).astype(np.float32)


def feed(policy, n: int, n_offered: int, n_accepted: int, verify_ms: float = 2.0, draft_ms: float = 0.6) -> None:
    """The same round n times."""
    for _ in range(n):
        policy.observe(observation(logprobs(*[0.5] * n_offered), n_accepted, draft_ms, verify_ms))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_regret_of_cost(text: str, seed: int):
    """At most 5 % slower than the fixed length that is best for the whole text, learning and graph building included;
    on texts that switch it is faster than any."""
    trace = make_trace(TEXTS[text], seed=seed)
    best = min(Fixed(n).replay(trace, build_ms=1.0) for n in range(HORIZON + 1))
    took, _ = replay(CostPolicy(), trace, build_ms=1.0)

    assert took < (1.05 if len(TEXTS[text]) == 1 else 1.0) * best


def test_cost_keeps_what_it_learned():
    """A second text costs no learning."""
    policy = CostPolicy()
    for seed in range(3):
        trace = make_trace([(EASY, 500)], seed=seed)
        took, _ = replay(policy, trace)

    assert took < 1.02 * min(Fixed(n).replay(trace) for n in range(HORIZON + 1))


@pytest.mark.parametrize("make", [CostPolicy, EmaPolicy])
def test_same_observations_same_answers(make):
    """No clock, no randomness: a trace replays exactly."""
    trace = make_trace(TEXTS["switching"], seed=5)

    assert replay(make(), trace, 1.0) == replay(make(), trace, 1.0)


@pytest.mark.parametrize("make", [CostPolicy, EmaPolicy])
def test_hard_text_is_decoded_plainly(make):
    """Where hardly anything is accepted, nearly all rounds are plain ones, and trials go on."""
    _, widths = replay(make(), make_trace([(HARD, 2000)]))
    n_drafting = sum(width > 0 for width in widths[200:])

    assert 5 < n_drafting < 0.08 * len(widths)


def test_cost_takes_the_sweet_spot():
    """Widths whose neighbours are slower are found, whatever the shape of the curve."""
    policy = CostPolicy()
    times = {1: 2.0, 2: 2.9, 3: 3.5, 4: 2.2, 5: 3.4, 6: 3.5, 7: 3.6, 8: 3.7}
    widths = []
    for _ in range(200):
        plan = policy.plan(LIMITS)
        width = policy.choose_width(logprobs(*[0.9] * HORIZON), chain(HORIZON), None) if plan.n_draft else 1
        n_hits = min(width - 1, 3)
        policy.observe(observation(logprobs(*[0.9] * (width - 1)), n_hits, 0.3 * (plan.n_draft > 0), times[width]))
        widths.append(width)

    assert widths[100:].count(4) > 85


def test_cost_shortens_doubtful_drafts():
    """The drafted probabilities decide how much of this very draft is verified."""
    policy = CostPolicy()
    replay(policy, make_trace([(EASY, 600), (MEDIUM, 600)]))
    sure = policy.choose_width(logprobs(*[0.999] * HORIZON), chain(HORIZON), None)
    doubtful = policy.choose_width(logprobs(0.999, *[0.05] * (HORIZON - 1)), chain(HORIZON), None)

    assert doubtful < sure


@pytest.mark.parametrize("make", [CostPolicy, EmaPolicy, FixedPolicy])
@pytest.mark.parametrize("n_draft", [1, 2, 7])
def test_answers_stay_within_the_limits(make, n_draft: int):
    """Plans and widths never exceed what was asked for."""
    policy = make()
    for i in range(100):
        plan = policy.plan(DraftLimits(n_draft, n_draft))
        assert 0 <= plan.n_draft <= n_draft and plan.n_draft <= plan.budget or plan.why
        n = plan.n_draft
        width = policy.choose_width(logprobs(*[0.6] * n), chain(n), None)
        assert 1 <= width <= n + 1
        policy.observe(observation(logprobs(*[0.6] * (width - 1)), (width - 1) * (i % 3 > 0), 0.6 * (n > 0)))


def test_times_of_zero_are_harmless():
    """A clock that stands still breaks nothing."""
    policy = CostPolicy()
    for _ in range(50):
        policy.plan(LIMITS)
        policy.choose_width(logprobs(0.5, 0.5), chain(2), None)
        policy.observe(observation(logprobs(0.5, 0.5), 1, 0.001, 0.0, 0.0))
        policy.observe(observation(logprobs(), 0, 0.0, 0.0, 0.0))


def test_cost_says_why():
    """Plain rounds carry their reason, the same words each time so that they can be counted."""
    policy = CostPolicy()
    reasons = set()
    for _ in range(60):
        plan = policy.plan(LIMITS)
        reasons.add(plan.why)
        feed(policy, 1, 3 if plan.n_draft else 0, 0, 2.0 if plan.n_draft else 1.0, 0.6 if plan.n_draft else 0.0)

    assert reasons == {None, WHY_MEASURING, WHY_OFF}


def test_plain_time_is_never_assumed():
    """Until plain rounds were timed nothing is judged; three of them come early."""
    policy = CostPolicy()
    plans = []
    for _ in range(9):
        plans.append(policy.plan(LIMITS))
        feed(policy, 1, 3 if plans[-1].n_draft else 0, 0, draft_ms=0.6 if plans[-1].n_draft else 0.0)

    assert [plan.n_draft > 0 for plan in plans] == [True, True, False] * 3


def test_full_acceptance_only_bounds():
    """Acceptance at a depth that was not offered, or cut away by a stop, is not guessed from the rounds."""
    seen, cut = AcceptanceModel(), AcceptanceModel()
    before = seen.expected_tokens(logprobs(0.5, 0.5, 0.2), chain(3), None)
    for _ in range(50):
        seen.observe(observation(logprobs(0.5, 0.5), 2))
        cut.observe(observation(logprobs(0.5, 0.5), 0, cut=True))
    after = seen.expected_tokens(logprobs(0.5, 0.5, 0.2), chain(3), None)

    assert after[2] > 2.9 and after[3] - after[2] < 0.3
    assert cut.expected_tokens(logprobs(0.5, 0.5, 0.2), chain(3), None) == before


def test_acceptance_is_calibrated():
    """A drafter that says 0.9 where 0.4 is true is not believed; confidences of a chain replace its probabilities."""
    model = AcceptanceModel()
    rng = np.random.default_rng(0)
    for _ in range(400):
        model.observe(observation(logprobs(0.9), int(rng.random() < 0.4)))
    by_confidence = model.expected_tokens(logprobs(0.9), chain(1), np.array([0.3], dtype=np.float32))

    assert model.expected_tokens(logprobs(0.9), chain(1), None)[1] == pytest.approx(1.4, abs=0.12)
    assert by_confidence[1] != model.expected_tokens(logprobs(0.9), chain(1), None)[1]


def test_trees_teach_siblings():
    """Of the children of accepted nodes one is a hit and the others are misses; nodes off the path say nothing."""
    model = AcceptanceModel()
    parents = np.array([-1, 0, 0, 1, 2], dtype=np.int32)
    values = np.log([1, 0.6, 0.3, 0.9, 0.2]).astype(np.float32)
    depths = np.array([0, 1, 1, 2, 2], dtype=np.int32)
    for _ in range(100):
        model.observe(RoundObservation(values, parents, depths, (0, 1), 4, 1, False, True, None, 0.6, 2.0, 0.1))
    expected = model.expected_tokens(values, parents, None)

    assert expected[1] > 1.9 and expected[2] - expected[1] < 0.1  # the second child never is the target's
    assert expected[3] - expected[2] < 0.2  # the hit's child never
    assert expected[4] - expected[3] < 0.02  # a child of what is never accepted


def test_times_ignore_outliers():
    """Neither the first sample (it may build a graph) nor pauses of the machine move an estimate by much."""
    time = TypicalTime()
    for i in range(200):
        time.observe(500.0 if i == 0 else 20.0 if i % 9 == 4 else 2.0)

    assert time.value == pytest.approx(2.0, rel=0.1)


def test_times_follow_change():
    """A longer context makes every width slower, the unused ones too."""
    times = WidthTimes()
    for _ in range(10):
        times.observe(1, 1.0)
        times.observe(4, 2.0)
    for _ in range(200):
        times.observe(4, 4.0)

    assert times.measured(4) == pytest.approx(4.0, rel=0.05)
    assert 1.2 < times.measured(1) < 2.5


def test_unmeasured_widths_are_hoped_for():
    """Between their neighbours' times, on the optimistic side; nothing without any."""
    times = WidthTimes()
    assert times.hoped(3) is None and times.measured(3) is None
    for _ in range(3):
        times.observe(1, 1.0)
        times.observe(5, 3.0)

    assert times.hoped(3) == pytest.approx(1.5)
    assert times.hoped(9) == pytest.approx(4.0)


@pytest.mark.parametrize("n_nodes", [1, 2, 8, 9, 23, 65, 128])
def test_candidate_widths(n_nodes: int):
    """Ascending, ending with everything, few in number."""
    widths = _candidates(n_nodes)

    assert widths == tuple(sorted(set(widths))) and widths[0] == 1 and widths[-1] == n_nodes
    assert len(widths) <= 26


def test_ema_bursts_and_probes():
    """Under 0.8 (ratio - 1) accepted tokens a round come 40 plain rounds, then a probe that counts for half."""
    policy = EmaPolicy()
    n_until_off = 0
    while policy.plan(LIMITS).n_draft:
        feed(policy, 1, 7, 0)
        n_until_off += 1
    feed(policy, 39, 0, 0, draft_ms=0.0, verify_ms=1.0)

    assert 5 < n_until_off < 15
    assert policy.plan(LIMITS).why and not policy.plan(LIMITS).n_draft
    feed(policy, 1, 0, 0, draft_ms=0.0, verify_ms=1.0)
    assert policy.plan(LIMITS).n_draft == HORIZON
    feed(policy, 1, 7, 0)  # the probe fails
    assert not policy.plan(LIMITS).n_draft
    feed(policy, 40, 0, 0, draft_ms=0.0, verify_ms=1.0)
    feed(policy, 1, 7, 7)  # the probe succeeds
    assert policy.plan(LIMITS).n_draft == HORIZON
    assert policy.ratio == pytest.approx(2.7 / 1.1, rel=0.01)


def test_shelf():
    """Each policy is made once and kept; the mode decides when none is named; chains and trees learn apart."""
    shelf = PolicyShelf()

    assert isinstance(shelf.choose(None, "auto"), CostPolicy)
    assert isinstance(shelf.choose(None, "chain"), FixedPolicy)
    assert isinstance(shelf.choose("ema", "auto"), EmaPolicy)
    assert shelf.choose("cost", "chain") is shelf.choose(None, "auto") is not shelf.choose("cost", "tree")
    with pytest.raises(OptionError, match="policy is 'best': it must be one of fixed, ema, cost"):
        shelf.choose("best", "auto")
    with pytest.raises(OptionError, match="policy is"):
        shelf.choose(["cost"], "auto")


@pytest.mark.parametrize("mode", ["auto", "chain", "tree"])
@pytest.mark.parametrize("quality", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("name", ["ema", "cost"])
def test_sessions_with_policies(mode: str, quality: float, name: str):
    """Tokens do not depend on the policy, up to a full context and with a drafter whose own context is smaller."""

    def generate(spec: SpecOptions) -> list[int]:
        target = FakeTarget(n_ctx=150)
        drafter = FakeDrafter(target, quality)
        drafter.n_ctx = 100
        session = Session(target, drafter, n_vocab=N_VOCAB, policies=PolicyShelf(), clock=FakeClock())
        for _ in session.generate([1, 2, 3], spec=spec):
            pass
        return session.tokens

    assert generate(SpecOptions(mode, policy=name)) == generate(SpecOptions("off"))
