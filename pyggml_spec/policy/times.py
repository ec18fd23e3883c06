"""What things cost, learned from noisy times: every estimate shrugs off outliers and follows slow change."""

from __future__ import annotations

from bisect import bisect_left, insort
from math import exp

_N_EARLY = 8  # samples of which the lower quartile is taken; later ones move the estimate by steps
_CLIP = 0.3  # the most a later sample counts for, relative to the estimate
_STEP_UP, _STEP_DOWN = 0.05, 0.15  # other work makes calls slower, never faster
_SHARED = 0.5  # part of a step that all widths take together
_REFRESH = 32  # observations for which interpolated times are kept
_FADING = 512.0  # observations in which the estimate of an unused width falls by the factor e


class TypicalTime:
    """A running estimate in milliseconds of what a call takes when nothing disturbs it.

    The first sample, which may have built a graph, is left out.
    """

    def __init__(self) -> None:
        self.n_samples = 0
        self.value: float | None = None
        self._early: list[float] = []

    def observe(self, ms: float) -> float:
        """Take a sample in and return the relative step that the estimate should take, 0 while it is young."""
        self.n_samples += 1
        if self.n_samples == 1:
            return 0.0
        if self.value is None or self.n_samples <= _N_EARLY + 1:
            insort(self._early, max(ms, 1e-6))
            self.value = self._early[(len(self._early) - 1) // 4]
            return 0.0
        error = min(max(ms / self.value - 1, -_CLIP), _CLIP)
        step = error * (_STEP_UP if error > 0 else _STEP_DOWN)
        self.value *= 1 + step
        return step


class WidthTimes:
    """Milliseconds of a verify by its width, whatever the shape of the curve.

    Widths share a level: what makes one slower (a longer context, a busier machine) is expected of the others too.
    What is hoped of a width that was not used for long gets better and better, so that no bad luck with its first
    samples excludes it for ever.
    """

    def __init__(self) -> None:
        self._each: dict[int, TypicalTime] = {}
        self._known: list[int] = []  # widths with an estimate, ascending
        self._level = 1.0
        self._guesses: dict[int, float] = {}
        self._n_observed = 0
        self._last_used: dict[int, int] = {}

    def n_samples(self, width: int) -> int:
        """Samples of this width, the first one included."""
        each = self._each.get(width)
        return 0 if each is None else each.n_samples

    def observe(self, width: int, ms: float) -> None:
        """Take in the time of one verify."""
        each = self._each.setdefault(width, TypicalTime())
        was_known = each.value is not None
        self._level *= 1 + _SHARED * each.observe(ms / self._level)
        self._n_observed += 1
        self._last_used[width] = self._n_observed
        if each.value is not None and not was_known:
            insort(self._known, width)
            self._guesses.clear()
        elif self._n_observed % _REFRESH == 0:
            self._guesses.clear()

    def measured(self, width: int) -> float | None:
        """The estimate of a width that was measured often enough."""
        each = self._each.get(width)
        return None if each is None or each.value is None else each.value * self._level

    def hoped(self, width: int, *, unmeasured: bool = True) -> float | None:
        """The estimate, faded; None when nothing is known, or not enough of this width and `unmeasured` is False.

        For a width not measured yet it lies half-way between what its neighbours suggest and the time of the narrower
        one: times may grow by steps, and a width that may be a bargain shall be tried.
        """
        each = self._each.get(width)
        if each is not None and each.value is not None:
            unused = self._n_observed - self._last_used[width]
            return each.value * self._level * (1.0 if unused < 32 else exp(-unused / _FADING))
        if not self._known or not unmeasured:
            return None
        if width not in self._guesses:
            self._guesses[width] = self._guess(width)
        return self._guesses[width] * self._level

    def _guess(self, width: int) -> float:
        known = self._known
        above = bisect_left(known, width)
        if above == 0:
            return self._value(known[0])
        low = known[above - 1]
        if above < len(known):
            slope = (self._value(known[above]) - self._value(low)) / (known[above] - low)
        elif above > 1:
            slope = (self._value(low) - self._value(known[0])) / (low - known[0])
        else:
            slope = 0.0
        return self._value(low) + 0.5 * slope * (width - low)

    def _value(self, width: int) -> float:
        value = self._each[width].value
        assert value is not None, "only widths with an estimate are known"
        return value
