"""How far products on a GPU may be from the exact ones: oracles computed again with factors of 11 bits.

Matrix units take f32 factors as TF32: a sign, 8 bits of exponent and 11 of mantissa (one of them implied), so each
factor is off by at most 2^-11 of itself where it is rounded and 2^-10 where low bits are cut off, which kernels may
leave to the hardware. Factors of f16 have as many bits. Sums are f32. What that does to a result depends on the
numbers: errors of a sum of n products grow with n where factors shrink alike and with sqrt(n) otherwise, norms divide
them, activations amplify them. So it is not estimated but tried: an oracle in float64 runs again with every factor of
every matrix product rounded to 11 bits: cut off, to nearest, and up or down by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

DROPPED_BITS = 13  # of the 24 of a f32 mantissa
N_RANDOM = 3
SAFETY = 4  # a device rounds in one more way than those tried here; of the largest deviation among them

Arrays = dict[str, np.ndarray]
Round = Callable[[np.ndarray], np.ndarray]


def roundings() -> list[Round]:
    """Ways of making 11 bits of a factor: cut off, to nearest, and by chance (mean: the factor itself)."""
    spacing = 1 << DROPPED_BITS

    def to_11_bits(x: np.ndarray, added: Any) -> np.ndarray:
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        return ((bits + added) & np.uint32(-spacing & 0xFFFFFFFF)).view(np.float32).astype(np.float64)

    def by_chance(seed: int) -> Round:
        rng = np.random.default_rng(seed)
        return lambda x: to_11_bits(x, rng.integers(0, spacing, np.shape(x), np.uint32))

    return [
        lambda x: to_11_bits(x, np.uint32(0)),
        lambda x: to_11_bits(x, np.uint32(spacing // 2)),
        *(by_chance(seed) for seed in range(N_RANDOM)),
    ]


def with_rounded_factors(arrays: Mapping[str, np.ndarray], round_: Round) -> Arrays:
    """The arrays; factors of matrix products (operator @) that they or their results take part in will be rounded."""

    class Factors(np.ndarray):
        def __array_ufunc__(
            self, ufunc: np.ufunc, method: str, *inputs: Any, out: tuple[Any, ...] = (), **options: Any
        ) -> Any:
            plain = [x.view(np.ndarray) if isinstance(x, Factors) else x for x in inputs]
            if ufunc is np.matmul:
                plain = [round_(x) for x in plain]
            if out:
                options["out"] = tuple(x.view(np.ndarray) if isinstance(x, Factors) else x for x in out)
            result = getattr(ufunc, method)(*plain, **options)
            return result.view(Factors) if isinstance(result, np.ndarray) else result

    return {name: array.view(Factors) if array.dtype.kind == "f" else array for name, array in arrays.items()}


def errors_of_11_bits(oracle: Callable[[Arrays], Arrays], arrays: Mapping[str, np.ndarray]) -> dict[str, float]:
    """For each result of an oracle of these arrays: how far it may be off where factors have 11 bits."""
    exact = oracle(dict(arrays))
    largest = dict.fromkeys(exact, 0.0)
    for round_ in roundings():
        for name, values in oracle(with_rounded_factors(arrays, round_)).items():
            deviation = np.abs(np.asarray(values) - exact[name]).max(initial=0.0)
            largest[name] = max(largest[name], float(deviation))
    return {name: SAFETY * deviation for name, deviation in largest.items()}
