"""Sampling against a literal transcription of the documented order, and its options."""

from __future__ import annotations

import math

import numpy as np
import pytest
from decode_fakes import chi_square_excess

from pyggml_spec.decode.sampling import Sampler, check_sampling
from pyggml_spec.errors import DeviceError, OptionError
from pyggml_spec.records import SamplingParams

N_VOCAB = 12
LOGITS = np.array([2.0, 1.5, 1.5, 0.5, 0.0, -0.5, -1.0, 3.0, 2.5, -2.0, 0.25, 1.0], dtype=np.float32)
PREFIX = [7, 8, 7, 0, 6, 7]


def reference_law(params: SamplingParams, logits: np.ndarray, prefix: list[int]) -> np.ndarray:
    """Penalties, top-k, top-p, min-p, temperature, over Python lists."""
    values = {i: float(x) for i, x in enumerate(logits)}
    n = params.penalty_last_n
    recent = list(prefix) if n < 0 else prefix[-n:] if n else []
    for token in set(recent):
        x = values[token]
        x = x * params.repeat_penalty if x <= 0 else x / params.repeat_penalty
        values[token] = x - recent.count(token) * params.frequency_penalty - params.presence_penalty
    order = sorted(values, key=lambda i: (-values[i], i))
    if params.temperature == 0:
        order = order[:1]
    if params.top_k:
        order = order[: params.top_k]
    total, kept, mass = sum(math.exp(values[i]) for i in order), [], 0.0
    for i in order:
        if mass >= params.top_p:
            break
        kept.append(i)
        mass += math.exp(values[i]) / total
    kept = [i for i in kept if math.exp(values[i] - values[kept[0]]) >= params.min_p - 1e-12]
    weights = {i: math.exp((values[i] - values[kept[0]]) / (params.temperature or 1.0)) for i in kept}
    law = np.zeros(len(logits))
    for i, weight in weights.items():
        law[i] = weight / sum(weights.values())
    return law


CASES = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 0.7, "top_k": 3},  # the third place is a tie: the lower id stays
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.3, "top_p": 0.01},
    {"temperature": 0.5, "min_p": 0.2},
    {"temperature": 0.5, "min_p": 1.0},
    {"temperature": 2.0, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 100, "top_p": 0.999},
    {"temperature": 1.0, "repeat_penalty": 1.4},
    {"temperature": 1.0, "repeat_penalty": 1.4, "penalty_last_n": 2},
    {"temperature": 1.0, "repeat_penalty": 1.4, "penalty_last_n": 0},
    {"temperature": 1.0, "frequency_penalty": 0.6, "presence_penalty": -0.3, "penalty_last_n": -1},
    {"temperature": 0.9, "repeat_penalty": 0.8, "frequency_penalty": 0.2, "top_k": 6, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0.0},
    {"temperature": 0.0, "repeat_penalty": 1.5, "frequency_penalty": 0.1},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_law_equals_reference(options: dict):
    """`distribution` is what the documented order gives, and leaves the logits alone."""
    params = SamplingParams(**options)
    before = LOGITS.copy()
    law = Sampler(params, N_VOCAB).distribution(LOGITS, PREFIX)

    assert law == pytest.approx(reference_law(params, LOGITS, PREFIX), abs=1e-7)
    assert law.sum() == pytest.approx(1.0) and (before == LOGITS).all()


@pytest.mark.parametrize("options", [CASES[0], CASES[7], CASES[13]], ids=str)
def test_choose_follows_the_law(options: dict):
    """Draws are distributed as `distribution` says (chi-square)."""
    sampler = Sampler(SamplingParams(seed=5, **options), N_VOCAB)
    law, n_draws = sampler.distribution(LOGITS, PREFIX), 1500
    counts = np.bincount([sampler.choose(LOGITS, PREFIX) for _ in range(n_draws)], minlength=N_VOCAB)

    assert counts[law == 0].sum() == 0
    assert chi_square_excess(counts.astype(float), law * n_draws) < 4.5


def test_greedy_takes_the_argmax():
    """Temperature 0 is the argmax, ties by lower id, after the penalties."""
    assert Sampler(SamplingParams(), N_VOCAB).choose(LOGITS, PREFIX) == 7
    assert Sampler(SamplingParams(frequency_penalty=1.0), N_VOCAB).choose(LOGITS, [7]) == 8
    assert Sampler(SamplingParams(), 3).choose(np.array([0, 1, 1], dtype=np.float32), []) == 1


def test_seeds_repeat():
    """Equal seeds give equal draws, others do not; no seed means fresh entropy."""

    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.5, seed=seed), N_VOCAB)
        return [sampler.choose(LOGITS, []) for _ in range(40)]

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)
    assert draws(None) != draws(None)


def test_logprobs_are_those_of_the_model():
    """Log-softmax of the unmodified logits, whatever the samplers do, best alternatives first, ties by lower id."""
    sampler = Sampler(SamplingParams(temperature=0.3, top_k=1, logprobs=4), N_VOCAB)
    expected = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum())
    entry = sampler.logprob(LOGITS, 9)

    assert entry.token_id == 9 and entry.logprob == pytest.approx(expected[9])
    assert [token_id for token_id, _ in entry.top] == [7, 8, 0, 1]
    assert [value for _, value in entry.top] == pytest.approx(expected[[7, 8, 0, 1]].tolist())
    n_all = len(Sampler(SamplingParams(logprobs=20), N_VOCAB).logprob(LOGITS, 0).top)
    assert n_all == N_VOCAB


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999, 1 - 1e-12])
def test_top_p_of_a_large_vocabulary(top_p: float):
    """Sorting only part of the vocabulary finds the same nucleus as sorting all of it, ties included."""
    logits = np.round(np.random.default_rng(0).normal(size=5000) * 2, 1).astype(np.float32)
    weights = np.exp(logits.astype(np.float64))
    order = np.argsort(-logits, kind="stable")
    n_kept = int((np.cumsum(weights[order]) < top_p * weights.sum()).sum()) + 1
    law = Sampler(SamplingParams(temperature=1.0, top_p=top_p), 5000).distribution(logits, [])

    assert set(np.flatnonzero(law)) == set(order[:n_kept])


def test_masked_logits_are_never_drawn():
    """-inf hides a token (a grammar may do so); nothing else changes."""
    masked = np.where(np.arange(N_VOCAB) % 2 == 0, LOGITS, -np.inf).astype(np.float32)
    sampler = Sampler(SamplingParams(temperature=5.0, seed=0), N_VOCAB)

    assert {sampler.choose(masked, []) % 2 for _ in range(100)} == {0}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_are_an_error(bad: float):
    """NaN and +inf come from a broken model or device: no token is made up from them."""
    broken = LOGITS.copy()
    broken[3] = bad
    for temperature in (0.0, 1.0):
        with pytest.raises(DeviceError, match="broken logits"):
            Sampler(SamplingParams(temperature=temperature), N_VOCAB).choose(broken, [])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("temperature", value) for value in (-0.1, math.nan, math.inf, "1", True)],
        *[("top_k", value) for value in (-1, 1.5, None)],
        *[("top_p", value) for value in (0.0, 1.01, -1, math.nan)],
        *[("min_p", value) for value in (-0.01, 1.5, math.nan)],
        *[("repeat_penalty", value) for value in (0.0, -1.0, math.inf)],
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        *[("penalty_last_n", value) for value in (-2, 0.5)],
        *[("seed", value) for value in (-1, 1.0, 2**64)],
        *[("logprobs", value) for value in (-1, True, 21)],
    ],
)
def test_options_are_checked(option: str, value: object):
    """The error names the option, its value and the rule."""
    with pytest.raises(OptionError, match=f"{option} is {value!r}: it must be"):
        check_sampling(SamplingParams(**{option: value}))


@pytest.mark.parametrize("option", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"seed": 0}], ids=str)
def test_greedy_decoding_ignores_nothing(option: dict):
    """What only matters to a draw is refused at temperature 0, and fine at another or at its default."""
    (name, value), = option.items()
    with pytest.raises(OptionError, match=f"^{name} is {value}, but temperature 0 is greedy and samples nothing: give"):
        check_sampling(SamplingParams(**option))

    check_sampling(SamplingParams(temperature=0.5, **option))
    check_sampling(SamplingParams(top_k=0, top_p=1, min_p=0, seed=None, repeat_penalty=1.1, logprobs=2))
