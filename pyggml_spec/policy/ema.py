"""The simple policy: plain rounds for a while whenever drafts are accepted too seldom to pay."""

from __future__ import annotations

from pyggml_spec.policy.fixed import FixedPolicy
from pyggml_spec.policy.protocol import DraftLimits, DraftPlan, RoundObservation

WHY_BURST = "too few drafted tokens were accepted lately"

_MARGIN = 0.8  # of the break-even point, below which drafting stops
_FIRST_RATIO = 1.9  # time of a drafting round over a plain one's, until both are known
_FIRST_ACCEPTED = 2.0
_STEP, _PROBE_STEP, _TIME_STEP = 0.1, 0.5, 0.1


class EmaPolicy(FixedPolicy):
    """Draft everything, or nothing for `n_burst` rounds.

    A drafting round that accepts a tokens commits a + 1 in `ratio` times a plain round's time, so it breaks even at
    a = ratio - 1. The first drafting round after a burst is a probe and counts for half.
    """

    def __init__(self, n_burst: int = 40) -> None:
        self.n_burst = n_burst
        self._accepted = _FIRST_ACCEPTED
        self._plain_left = 0
        self._is_probe = False
        self._n_seen = {True: 0, False: 0}  # drafting, plain
        self._ms: dict[bool, float] = {}

    @property
    def ratio(self) -> float:
        """Time of a drafting round over that of a plain one."""
        return self._ms[True] / self._ms[False] if len(self._ms) == 2 else _FIRST_RATIO

    def plan(self, limits: DraftLimits) -> DraftPlan:
        """The limits themselves, or a plain round during a burst."""
        if self._plain_left > 0:
            return DraftPlan(0, 0, WHY_BURST)
        return super().plan(limits)

    def observe(self, observation: RoundObservation) -> None:
        """Follow times and accepted tokens; a round that a stop cut short says nothing of the latter unless good."""
        self._time(observation)
        if not observation.drafted:
            self._plain_left = max(self._plain_left - 1, 0)
            return
        if observation.cut and observation.n_accepted < self._accepted:
            return
        step = _PROBE_STEP if self._is_probe else _STEP
        self._accepted += step * (observation.n_accepted - self._accepted)
        self._is_probe = False
        if self._accepted < _MARGIN * (self.ratio - 1):
            self._plain_left, self._is_probe = self.n_burst, True

    def _time(self, observation: RoundObservation) -> None:
        drafted = observation.drafted
        ms = max(observation.draft_ms + observation.verify_ms + observation.host_ms, 1e-6)
        self._n_seen[drafted] += 1
        if self._n_seen[drafted] > 1:  # the first of a kind may have built its graph
            before = self._ms.setdefault(drafted, ms)
            self._ms[drafted] = before + _TIME_STEP * (min(ms, 2 * before) - before)
