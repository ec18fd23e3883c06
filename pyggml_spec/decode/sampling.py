"""Choosing a token from the target's logits, with the samplers of llama.cpp in its usual order.

Order: penalties, top-k, top-p, min-p, temperature, draw. Each stage sees what the one before it left; top-p and min-p
measure probabilities before temperature is applied. Temperature 0 takes the highest logit after the penalties.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pyggml_spec.errors import DeviceError, OptionError
from pyggml_spec.records import SamplingParams, TokenLogprob

_RULES: dict[str, tuple[Callable[[float], bool], str]] = {  # option -> (test, rule as text); a NaN passes none of them
    "temperature": (lambda x: x == 0 or 1e-3 <= x < float("inf"), "0 (greedy) or at least 0.001, and finite"),
    "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1 (1 = off)"),
    "min_p": (lambda x: 0 <= x <= 1, "from 0 (off) to 1"),
    "repeat_penalty": (lambda x: 1e-3 <= x <= 1e3, "0.001 to 1000 (1 = off)"),
    "presence_penalty": (lambda x: abs(x) <= 100, "from -100 to 100 (0 = off)"),
    "frequency_penalty": (lambda x: abs(x) <= 100, "from -100 to 100 (0 = off)"),
}
_INTEGER_RULES = {  # option -> least value, greatest one, rule as text
    "top_k": (0, None, "an integer of at least 0 (0 = off)"),
    "penalty_last_n": (-1, None, "an integer of at least -1 (0 = off, -1 = all tokens)"),
    "logprobs": (0, 20, "an integer from 0 (none) to 20"),
}

_N_SORTED_FIRST = 256  # values that top-p looks at first


def check_sampling(params: SamplingParams) -> None:
    """Refuse sampling options outside their range, and those that greedy decoding would ignore.

    Raises:
        OptionError: naming the option, its value and the rule.
    """
    for name, (is_valid, rule) in _RULES.items():
        value = getattr(params, name)
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not is_valid(float(value)):
            raise OptionError(f"`{name}` is {value!r}: it must be a number {rule}")
    for name, (least, greatest, rule) in _INTEGER_RULES.items():
        value = getattr(params, name)
        if not _is_integer(value) or value < least or (greatest is not None and value > greatest):
            raise OptionError(f"`{name}` is {value!r}: it must be {rule}")
    seed = params.seed
    if seed is not None and (not _is_integer(seed) or not 0 <= seed < 1 << 64):
        raise OptionError(f"`seed` is {seed!r}: it must be an integer from 0 to 2**64 - 1, or None for a fresh one")
    for name in params.ignored:
        raise OptionError(
            f"`{name}` is {getattr(params, name)!r}, but `temperature` 0 is greedy and samples nothing: "
            "give another temperature, or leave the option out"
        )


def _is_integer(value: object) -> bool:
    """As NumPy or Python has them."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


class Sampler:
    """Draws tokens from a logits row; seeded runs repeat.

    The draft has no part in it: a speculative and a plain run follow the same law, though not the same random numbers.

    Raises:
        OptionError: an option is outside its range, or would be ignored.
    """

    def __init__(self, params: SamplingParams, n_vocab: int) -> None:
        check_sampling(params)
        self.params = params
        self.n_vocab = n_vocab
        self._rng = np.random.Generator(np.random.PCG64(params.seed))

    @property
    def n_prefix(self) -> int | None:
        """How many tokens of a prefix the penalties look at; None = all of them."""
        if not self.params.has_penalties or self.params.penalty_last_n == 0:
            return 0
        return None if self.params.penalty_last_n < 0 else self.params.penalty_last_n

    def choose(self, logits: NDArray[np.float32], prefix: Sequence[int]) -> int:
        """The next token after `prefix`.

        Shapes: logits (n_vocab,) float32, left unchanged; prefix: the token ids before, the last ones suffice.

        Raises:
            DeviceError: a logit is NaN or +inf, or all are -inf.
        """
        if self.params.temperature == 0:
            return _argmax(self._penalised(logits, prefix))
        ids, weights = self._candidates(logits, prefix)
        cumulative = np.cumsum(weights)
        drawn = int(np.searchsorted(cumulative, self._rng.random() * cumulative[-1], side="right"))
        return int(ids[min(drawn, len(ids) - 1)])

    def distribution(self, logits: NDArray[np.float32], prefix: Sequence[int]) -> NDArray[np.float64]:
        """The exact law of `choose`.

        Shapes: logits (n_vocab,) float32 -> (n_vocab,) float64 that sums to 1.
        """
        law = np.zeros(len(logits))
        if self.params.temperature == 0:
            law[_argmax(self._penalised(logits, prefix))] = 1.0
            return law
        ids, weights = self._candidates(logits, prefix)
        law[ids] = weights / weights.sum()
        return law

    def logprob(self, logits: NDArray[np.float32], token_id: int) -> TokenLogprob:
        """Log-softmax of the unmodified logits for one token and the `logprobs` best ones.

        Shapes: logits (n_vocab,) float32.
        """
        values = logits.astype(np.float64)
        log_total = values.max() + np.log(np.exp(values - values.max()).sum())
        best = _best_ids(logits, self.params.logprobs) if self.params.logprobs else ()
        top = tuple((int(i), float(values[i] - log_total)) for i in best)
        return TokenLogprob(token_id, float(values[token_id] - log_total), top)

    def _penalised(self, logits: NDArray[np.float32], prefix: Sequence[int]) -> NDArray[np.float32]:
        n_prefix = self.n_prefix
        recent = prefix if n_prefix is None else prefix[max(len(prefix) - n_prefix, 0) :]
        if not self.params.has_penalties or not recent:
            return logits
        counts = Counter(recent)
        ids = np.fromiter(counts.keys(), dtype=np.int64, count=len(counts))
        times = np.fromiter(counts.values(), dtype=np.float32, count=len(counts))
        values = logits[ids]
        values = np.where(values <= 0, values * self.params.repeat_penalty, values / self.params.repeat_penalty)
        out: NDArray[np.float32] = logits.copy()
        out[ids] = values - times * self.params.frequency_penalty - self.params.presence_penalty
        return out

    def _candidates(
        self, logits: NDArray[np.float32], prefix: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Tokens that can be drawn and their unnormalised probabilities, best first when top-k or top-p sorted them."""
        params = self.params
        row = self._penalised(logits, prefix)
        _argmax(row)  # refuses broken logits before the stages below drop the evidence
        ids = _best_ids(row, params.top_k) if params.top_k else np.flatnonzero(row > -np.inf)
        values = row[ids].astype(np.float64)
        if params.top_p < 1:
            kept = _nucleus(values, params.top_p)
            ids, values = ids[kept], values[kept]
        if params.min_p > 0:
            kept = values >= values.max() + np.log(params.min_p)
            ids, values = ids[kept], values[kept]
        return ids, np.exp((values - values.max()) / params.temperature)


def _argmax(logits: NDArray[np.float32]) -> int:
    best = int(np.argmax(logits))  # a NaN counts as the highest
    if not np.isfinite(logits[best]):
        raise DeviceError(
            f"the target's logit for token {best} is {logits[best]}: no token can be chosen from broken logits"
        )
    return best


def _best_ids(values: NDArray[np.floating], k: int) -> NDArray[np.int64]:
    """Indices of the k highest values, best first, equal ones by lower index."""
    k = min(k, len(values))
    least = np.partition(values, len(values) - k)[len(values) - k]
    above = np.flatnonzero(values > least)
    ties = np.flatnonzero(values == least)[: k - len(above)]
    return np.concatenate([above[np.argsort(-values[above], kind="stable")], ties])


def _nucleus(values: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Indices of the fewest best values whose probability reaches top_p, best first, equal ones by lower index.

    Sorts only as many of the best values as it takes: of a large vocabulary that is a small part.
    """
    wanted = top_p * float(np.exp(values - values.max()).sum())
    n_best = _N_SORTED_FIRST
    while True:
        order = _best_ids(values, n_best)
        cumulative = np.cumsum(np.exp(values[order] - values[order[0]]))
        if cumulative[-1] >= wanted or len(order) == len(values):
            return order[: int(np.searchsorted(cumulative, wanted, side="left")) + 1]
        n_best *= 16
