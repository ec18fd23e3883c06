"""Rounds: what a policy is asked and told, what bounds a draft, and the statistics that follow."""

from __future__ import annotations

import json

import numpy as np
import pytest
from decode_fakes import N_VOCAB, FakeClock, FakeDrafter, FakeTarget, hashed_law

from pyggml_spec.decode.protocols import DraftBlock
from pyggml_spec.decode.round import SpecOptions, draft_limits
from pyggml_spec.decode.session import Session
from pyggml_spec.errors import DeviceError, OptionError
from pyggml_spec.policy import DraftLimits, DraftPlan, FixedPolicy, RoundObservation
from pyggml_spec.tree.build import TreeOptions

PROMPT = [3, 1, 4, 1, 5]


class RecordingPolicy(FixedPolicy):
    """Alternates plain rounds with narrow ones and keeps what it is told."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.limits: list[DraftLimits] = []
        self.observed: list[RoundObservation] = []

    def plan(self, limits: DraftLimits) -> DraftPlan:
        self.limits.append(limits)
        if len(self.limits) % 2:
            return DraftPlan(0, 0, "every other round")
        return DraftPlan(limits.n_draft + 5, limits.budget + 5)

    def choose_width(self, logprobs, parents, confidence) -> int:
        assert len(logprobs) == len(parents)
        return min(self.width, len(logprobs))

    def observe(self, observation: RoundObservation) -> None:
        self.observed.append(observation)


def generate(session: Session, n: int, mode: str = "chain", **options) -> list[int]:
    spec = SpecOptions(mode, tree=TreeOptions(budget=10), **options)
    return sum((e.token_ids for e in session.generate(PROMPT, spec=spec, max_tokens=n)), [])


def make(policy=None, quality: float = 1.0, clock=None, drafter_type=FakeDrafter) -> Session:
    target = FakeTarget()
    options = {} if clock is None else {"clock": clock}
    return Session(target, drafter_type(target, quality), n_vocab=N_VOCAB, policy=policy, **options)


@pytest.mark.parametrize("mode", ["chain", "tree"])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_policy_decides_and_is_told(mode: str, width: int):
    """Plain rounds and widths are the policy's; tokens are not. A plan beyond the limits is cut to them."""
    policy = RecordingPolicy(width)
    session = make(policy, quality=0.8)

    assert generate(session, 30, mode) == generate(make(), 30, "off")
    assert sum(o.n_accepted + 1 for o in policy.observed) == 30 == session.stats.committed
    assert max(session.target.widths) == width and min(session.target.widths) == 1
    for observation in policy.observed:
        assert observation.n_accepted == len(observation.path) - 1 and not observation.cut
        assert len(observation.logprobs) == len(observation.depths) == observation.n_offered + 1
        assert observation.drafted or observation.n_offered == 0
    assert "every other round" in session.stats.report()["spec"]["why"]


def test_observation_of_a_stop_is_marked_as_cut():
    """A stop bounds the acceptance only from below, and the policy must know."""
    policy = RecordingPolicy(8)
    reference = generate(make(), 12, "off")
    session = make(policy)
    assert session.stats.report()["spec"]["mode"] == "off"
    list(session.generate(PROMPT, stop_ids=[reference[4]], max_tokens=30))

    assert session.stats.report()["spec"]["mode"] == "chain"  # what `auto` came to
    assert [o.cut for o in policy.observed] == [False, True]
    assert policy.observed[1].n_accepted == 4 == len(policy.observed[1].path)


class _Limits:
    """Stands for target and drafter: only the numbers that bound a draft."""

    def __init__(self, **numbers: int) -> None:
        self.n_ctx, self.length, self.max_width, self.draft_horizon = 100, 10, 32, 15
        self.__dict__.update(numbers)


@pytest.mark.parametrize(
    ("target", "drafter", "n_wanted", "n_draft", "budget", "why"),
    [
        ({}, {}, None, 15, 22, None),
        ({}, {}, 5, 4, 22, None),
        ({"length": 95}, {}, None, 4, 4, None),
        ({"length": 99}, {}, None, 0, 0, "the context is nearly full"),
        ({"max_width": 4}, {}, None, 3, 3, None),
        ({"max_width": 1}, {}, None, 0, 0, "the target verifies one token at a time"),
        ({}, {"n_ctx": 20}, None, 9, 22, None),
        ({"length": 30}, {"n_ctx": 20}, None, 0, 0, "the drafter's context of 20 tokens is full"),
        ({}, {}, 1, 0, 0, "one token is left to generate"),
    ],
)
def test_limits(target, drafter, n_wanted, n_draft, budget, why):
    """Context, width, horizon, drafter context and wanted tokens bound depth and budget; the tightest is the reason."""
    drafter = _Limits(**{"n_ctx": 1000, **drafter})
    for mode in ("chain", "tree"):
        limits, reason = draft_limits(_Limits(**target), drafter, SpecOptions(mode), n_wanted)
        expected = DraftLimits(n_draft, budget if mode == "tree" else n_draft) if n_draft else None

        assert (limits, reason) == (expected, why)


def test_draft_max_zero_means_plain_rounds():
    """The loader's and the user's draft_max = 0 is a defined way to decode plainly."""
    session = make()

    assert generate(session, 6, draft_max=0) == generate(make(), 6, "off")
    assert session.stats.report()["spec"] == {
        "engaged": False,
        "mode": "chain",
        "drafter_kind": "dflash",
        "why": "6 of 6 rounds plain: draft_max is 0",
    }


def test_small_drafter_context_degrades_to_plain():
    """Past the drafter's context decoding goes on plainly, and the result says so."""
    session = make()
    session.drafter.n_ctx = 20

    assert generate(session, 40) == generate(make(), 40, "off")
    report = session.stats.report()
    assert report["spec"]["engaged"] and report["plain_rounds"] > 10
    assert report["spec"]["why"].endswith("rounds plain: the drafter's context of 20 tokens is full")


class ShortDrafter(FakeDrafter):
    """Drafts fewer positions than asked for, as a confidence gate does; every third time none."""

    def draft(self, anchor_id: int, *, n_draft: int, top_k: int) -> DraftBlock:
        block = super().draft(anchor_id, n_draft=n_draft, top_k=top_k)
        n = len(self.asked) % 3
        return DraftBlock(block.ids[:n], block.logprobs[:n], np.full(n, 0.5, dtype=np.float32))


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_offered_counts_what_was_sent(mode: str):
    """A shortened draft offers less than the horizon, and an empty one makes a plain round."""
    session = make(drafter_type=ShortDrafter)

    assert generate(session, 25, mode) == generate(make(), 25, "off")
    report = session.stats.report()
    assert report["offered"] == sum(width - 1 for width in session.target.widths)
    assert report["plain_rounds"] == session.target.widths.count(1)
    assert "the drafter proposed nothing" in report["spec"]["why"]


class ConditionalDrafter(FakeDrafter):
    """Marginals are useless, but a prefix-conditioned source knows the target."""

    def draft(self, anchor_id: int, *, n_draft: int, top_k: int) -> DraftBlock:
        block, held = super().draft(anchor_id, n_draft=n_draft, top_k=top_k), list(self.target.held)

        def source(prefix, depth):
            right = int(self.target.law([*held, *prefix]).argmax())
            return [right, (right + 1) % N_VOCAB], [-0.1, -2.5]

        return DraftBlock(block.ids, block.logprobs, source=source)


def test_conditional_source_drives_the_tree():
    """A block that brings a source is expanded through it instead of through its marginals."""
    session = make(quality=0.0, drafter_type=ConditionalDrafter)

    assert generate(session, 24, "tree") == generate(make(), 24, "off")
    assert session.stats.report()["acceptance_length"] == 8.0


def test_stats_document():
    """Counts and times against a run that can be followed by hand: 7 drafted, all right, 16 tokens wanted."""
    session = make(clock=FakeClock(0.001))

    assert len(generate(session, 16)) == 16
    assert session.stats.report() == {
        "rounds": 2,
        "plain_rounds": 0,
        "committed": 16,
        "offered": 14,
        "accepted": 14,
        "accept_rate": 1.0,
        "acceptance_length": 8.0,
        "accepted_per_depth": [2, 2, 2, 2, 2, 2, 2],
        "offered_per_depth": [2, 2, 2, 2, 2, 2, 2],
        "confidence_per_depth": [],
        "draft_ms": 2.0,  # the clock moves 1 ms with every look: 6 looks a round
        "verify_ms": 2.0,
        "host_ms": 6.0,
        "prompt_tokens_cached": 0,
        "rebuilds": 0,
        "prefill_tok_s": 4000.0,
        "decode_tok_s": 1600.0,
        "spec": {"engaged": True, "mode": "chain", "drafter_kind": "dflash", "why": None},
    }


def test_stats_of_reject_first():
    """An adversarial drafter: offered in every round, never accepted, one token per round, all of it strict JSON."""
    session = make(quality=0.0)
    generate(session, 9, draft_max=3)
    report = session.stats.report()

    assert report["accepted"] == 0 and report["accept_rate"] == 0.0 and report["acceptance_length"] == 1.0
    assert report["accepted_per_depth"] == [0, 0, 0]
    assert report["rounds"] == 9 and report["plain_rounds"] == 1 and report["offered"] == 3 * 6 + 2 + 1
    assert report["spec"]["why"] == "1 of 9 rounds plain: one token is left to generate"
    assert json.loads(json.dumps(report, allow_nan=False)) == report


class SureDrafter(FakeDrafter):
    """Confidence falls from 0.9 by 0.1 a position."""

    kind = "dspark"
    has_confidence_head = True

    def draft(self, anchor_id: int, *, n_draft: int, top_k: int) -> DraftBlock:
        block = super().draft(anchor_id, n_draft=n_draft, top_k=top_k)
        return DraftBlock(block.ids, block.logprobs, np.linspace(0.9, 0.3, 7, dtype=np.float32)[:n_draft])


@pytest.mark.parametrize(("threshold", "v_len"), [(0.0, 7), (0.25, 7), (0.45, 5), (0.75, 2), (0.85, 1)])
def test_confidence_ends_chains(threshold: float, v_len: int):
    """The verified length drives the verify, the acceptance and the statistics; scores are reported for all."""
    session = make(drafter_type=SureDrafter)
    tokens = generate(session, 8 * (v_len + 1), confidence=threshold)
    report = session.stats.report()

    assert tokens == generate(make(), 8 * (v_len + 1), "off")
    assert session.target.widths == [v_len + 1] * 8
    assert report["offered"] == report["accepted"] == 8 * v_len and report["accept_rate"] == 1.0
    assert report["offered_per_depth"] == report["accepted_per_depth"] == [8] * v_len
    assert report["confidence_per_depth"] == [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]


def test_no_confidence_at_all_is_a_plain_round():
    """Nothing is offered, the round says why, and the text is the same."""
    session = make(drafter_type=SureDrafter)

    assert generate(session, 5, confidence=0.95) == generate(make(), 5, "off")
    assert session.stats.report()["spec"]["why"].startswith("4 of 5 rounds plain: the first token drafted was under")


@pytest.mark.parametrize(
    ("drafter_type", "options", "message"),
    [
        (FakeDrafter, {"confidence": 0.5}, "dflash drafter has no confidence head"),
        (SureDrafter, {"confidence": 0.5, "mode": "tree"}, "budget and tau shape trees instead"),
        (SureDrafter, {"confidence": 0.5, "mode": "off"}, "nothing is drafted"),
        (SureDrafter, {"confidence": 1.0}, "below 1"),
        (SureDrafter, {"confidence": -0.1}, "at least 0"),
        (SureDrafter, {"confidence": float("nan")}, "it must be a number"),
        (SureDrafter, {"confidence": True}, "it must be a number"),
    ],
)
def test_a_gate_that_cannot_be_honoured_is_refused(drafter_type: type, options: dict, message: str):
    """Truncating every draft to one token for want of scores is the known fault."""
    with pytest.raises(OptionError, match=message):
        generate(make(drafter_type=drafter_type), 5, **options)


def test_partial_confidences_are_an_error():
    """A gate needs a score for every position."""

    class Forgetful(SureDrafter):
        def draft(self, anchor_id: int, *, n_draft: int, top_k: int) -> DraftBlock:
            block = super().draft(anchor_id, n_draft=n_draft, top_k=top_k)
            return DraftBlock(block.ids, block.logprobs, block.confidence[:1])

    with pytest.raises(DeviceError, match="only a part"):
        generate(make(drafter_type=Forgetful), 5, confidence=0.5)


def test_short_generations_say_why_nothing_was_offered():
    """max_tokens 1 leaves nothing to draft: `engaged` is false and `why` gives the reason."""
    session = make()
    generate(session, 1)

    spec = session.stats.report()["spec"]
    assert not spec["engaged"] and spec["why"] == "1 of 1 rounds plain: one token is left to generate"


def test_acceptance_per_depth_is_a_count_per_depth():
    """Entry d - 1 counts rounds that accepted at least d draft tokens: recomputed from the policy's observations."""
    policy = RecordingPolicy(99)
    policy.plan = FixedPolicy().plan
    session = make(policy, quality=0.6)
    generate(session, 80)
    accepted = [o.n_accepted for o in policy.observed]

    assert session.stats.accepted_per_depth == [sum(n > depth for n in accepted) for depth in range(7)]
    assert session.stats.accepted == sum(accepted)


def test_greedy_mode_asks_for_no_logits():
    """Logits cross the bus only when a sampler, a penalty or log-probabilities need them."""
    asked: list[bool] = []

    class Target(FakeTarget):
        def verify(self, tree, *, top_k=1, logits=False):
            asked.append(logits)
            return super().verify(tree, top_k=top_k, logits=logits)

    session = Session(Target(hashed_law()), n_vocab=N_VOCAB)
    generate(session, 3, "off")

    assert asked == [False, False, False]
