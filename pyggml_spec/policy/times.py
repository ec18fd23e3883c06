"""What things cost, learned from noisy times: every estimate shrugs off outliers and follows slow change."""

from __future__ import annotations

from bisect import bisect_left, insort

_N_MEDIAN = 5  # the first samples are averaged by their median
_CLIP = 0.3  # the most a later sample counts for, relative to the estimate
_STEP, _SHARED_STEP = 0.1, 0.05
_REFRESH = 32  # observations for which interpolated times are kept


class TypicalTime:
    """One running estimate in milliseconds; the first sample, which may have built a graph, is left out."""

    def __init__(self) -> None:
        self.n_samples = 0
        self.value: float | None = None
        self._early: list[float] = []

    def observe(self, ms: float) -> float:
        """Take a sample in and return its clipped relative error, 0 while the estimate is young."""
        self.n_samples += 1
        if self.n_samples == 1:
            return 0.0
        if self.value is None or self.n_samples <= _N_MEDIAN + 1:
            insort(self._early, max(ms, 1e-6))
            self.value = self._early[(len(self._early) - 1) // 2]  # the lower one: noise makes things slow, not fast
            return 0.0
        error = min(max(ms / self.value - 1, -_CLIP), _CLIP)
        self.value *= 1 + _STEP * error
        return error


class WidthTimes:
    """Milliseconds of a verify by its width, whatever the shape of the curve.

    Widths share a level: what makes one slower (a longer context, a busier machine) is expected of the others too.
    """

    def __init__(self) -> None:
        self._each: dict[int, TypicalTime] = {}
        self._known: list[int] = []  # widths with an estimate, ascending
        self._level = 1.0
        self._guesses: dict[int, float] = {}
        self._n_observed = 0

    def n_samples(self, width: int) -> int:
        """Samples of this width, the first one included."""
        each = self._each.get(width)
        return 0 if each is None else each.n_samples

    def observe(self, width: int, ms: float) -> None:
        """Take in the time of one verify."""
        each = self._each.setdefault(width, TypicalTime())
        was_known = each.value is not None
        error = each.observe(ms / self._level)
        self._level *= 1 + _SHARED_STEP * error
        self._n_observed += 1
        if each.value is not None and not was_known:
            insort(self._known, width)
            self._guesses.clear()
        elif self._n_observed % _REFRESH == 0:
            self._guesses.clear()

    def measured(self, width: int) -> float | None:
        """The estimate of a width that was measured often enough."""
        each = self._each.get(width)
        return None if each is None or each.value is None else each.value * self._level

    def hoped(self, width: int) -> float | None:
        """The estimate; for a width not measured yet, half-way between what its neighbours suggest and the time of the
        narrower one, as times may grow by steps: a width that may be a bargain is tried. None when nothing is known."""
        each = self._each.get(width)
        if each is not None and each.value is not None:
            return each.value * self._level
        if not self._known:
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
