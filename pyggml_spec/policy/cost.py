"""The policy that weighs: it verifies as many drafted tokens as their expected gain is worth the time.

With `rate` the tokens per millisecond that decoding reaches at present, a verify of n nodes is worth
    expected_tokens(n) - rate * time(n),
and the width with the highest value is the one that makes the long-run rate highest (the draft is paid for by then).
Whether to draft at all is accounted for in plain tokens: a drafting round earns the tokens it committed and pays the
plain rounds that would have fitted into its time. Its credit runs out soon where drafts do not pay; then plain rounds
follow, interrupted by short trials that become rarer the more of them fail.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from pyggml_spec.policy.acceptance import AcceptanceModel
from pyggml_spec.policy.protocol import DraftLimits, DraftPlan, RoundObservation
from pyggml_spec.policy.times import TypicalTime, WidthTimes

WHY_OFF = "drafting took more time than it saved lately"
WHY_MEASURING = "plain rounds are timed now and then, for comparison"

_FIRST_CREDIT, _TRIAL_CREDIT, _MOST_CREDIT = 4.0, 1.0, 8.0  # plain tokens
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 64  # plain rounds between trials
_N_EARLY = 3  # plain rounds timed at the beginning, one after every _EARLY_GAP drafting ones
_EARLY_GAP, _GAP = 2, 64
_TRY_GAP = 5  # rounds between two of unmeasured widths
_FIRST_WIDTH = 4  # before anything was timed
_MEMORY = 0.98  # weight that a round keeps at the next one
_EVERY_WIDTH_TO = 8  # above it only some widths are used, as each needs a graph and measurements
_STEPS = 4  # widths per doubling there


class CostPolicy:
    """Maximises expected tokens per second; costs and acceptance are learned and kept."""

    def __init__(self) -> None:
        self._times = WidthTimes()  # of verify and host work
        self._draft = TypicalTime()
        self._acceptance = AcceptanceModel()
        self._tokens = self._ms = 0.0  # decayed sums
        self._credit = _FIRST_CREDIT
        self._pause = _FIRST_PAUSE  # length of the next run of plain rounds
        self._plain_left = 0
        self._n_since_plain = 0
        self._n_since_try = 0  # rounds since the last one of a width that is not measured yet

    def plan(self, limits: DraftLimits) -> DraftPlan:
        """Draft as far as the limits allow, or a plain round; how much is verified is `choose_width`'s to say."""
        if self._plain_left > 0:
            return DraftPlan(0, 0, WHY_OFF)
        is_early = self._times.n_samples(1) < _N_EARLY
        if self._n_since_plain >= (_EARLY_GAP if is_early else _GAP):
            return DraftPlan(0, 0, WHY_MEASURING)
        return DraftPlan(limits.n_draft, limits.budget)

    def choose_width(
        self, logprobs: NDArray[np.float32], parents: NDArray[np.int32], confidence: NDArray[np.float32] | None
    ) -> int:
        """The width of the highest value; some moderate one until a verify was timed."""
        n_nodes = len(logprobs)
        rate = self._rate()
        if n_nodes == 1 or rate is None:
            return min(n_nodes, _FIRST_WIDTH)
        expected = self._acceptance.expected_tokens(logprobs, parents, confidence)
        tries = self._n_since_try >= _TRY_GAP
        best, most = min(n_nodes, _FIRST_WIDTH), -np.inf
        for width in _candidates(n_nodes):
            ms = self._times.hoped(width, unmeasured=tries)
            if ms is None:
                continue
            value = expected[width - 1] - rate * ms
            if value > most:
                best, most = width, value
        return best

    def observe(self, observation: RoundObservation) -> None:
        """Learn times, acceptance, and whether drafting pays."""
        width = observation.n_offered + 1
        self._times.observe(width, observation.verify_ms + observation.host_ms)
        self._n_since_try = 0 if self._times.n_samples(width) <= 2 else self._n_since_try + 1
        if observation.drafted:
            self._draft.observe(observation.draft_ms)
            self._acceptance.observe(observation)
        self._n_since_plain = self._n_since_plain + 1 if observation.n_offered else 0
        self._account(observation)

    def _rate(self) -> float | None:
        """Tokens per millisecond that are reached at present; at least those of plain rounds."""
        plain_ms = self._times.measured(1)
        reached = self._tokens / self._ms if self._ms else None
        if plain_ms is None:
            return reached
        return 1 / plain_ms if reached is None else max(reached, 1 / plain_ms)

    def _account(self, observation: RoundObservation) -> None:
        ms = self._times.measured(observation.n_offered + 1)
        if observation.drafted and ms is not None:
            ms = None if self._draft.value is None else ms + self._draft.value
        if ms is None or observation.cut:
            return
        n_tokens = len(observation.path)
        self._tokens = _MEMORY * self._tokens + n_tokens
        self._ms = _MEMORY * self._ms + ms
        plain_ms = self._times.measured(1)
        if not observation.drafted:
            self._plain_left = max(self._plain_left - 1, 0)
        elif plain_ms is not None:
            self._credit = min(self._credit + n_tokens - ms / plain_ms, _MOST_CREDIT)
            self._judge_credit()

    def _judge_credit(self) -> None:
        if self._credit < 0:
            self._plain_left = self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._credit = _TRIAL_CREDIT
            self._acceptance.forget()
        elif self._credit >= _FIRST_CREDIT:
            self._pause = _FIRST_PAUSE


@cache
def _candidates(n_nodes: int) -> tuple[int, ...]:
    """Widths worth considering for so many nodes, ascending; the last one is all of them."""
    widths = list(range(1, min(n_nodes, _EVERY_WIDTH_TO) + 1))
    step = max(_EVERY_WIDTH_TO // _STEPS, 1)
    while widths[-1] < n_nodes:
        if widths[-1] >= 2 * _STEPS * step:
            step *= 2
        widths.append(min(widths[-1] + step, n_nodes))
    return tuple(widths)
