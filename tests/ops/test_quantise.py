"""Rows into ggml's storage types and back: against the `gguf` package, and refused where ggml would abort."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from pyggml_spec.errors import OptionError, ShapeError
from pyggml_spec.ggml.quantise import WRITABLE_TYPES, dequantise_rows, quantise_rows

pytestmark = pytest.mark.native

# Root of the mean squared error of normal values, relative: what a type's bits allow, measured and rounded up.
MOST_ERROR = {
    **{"f32": 0.0, "f16": 3e-4, "bf16": 3e-3, "q8_0": 0.007, "q6_k": 0.02, "q5_k": 0.04, "q5_1": 0.04, "q5_0": 0.05},
    **{"q4_k": 0.08, "q4_1": 0.08, "q4_0": 0.10, "iq4_nl": 0.08, "iq4_xs": 0.09, "q3_k": 0.18, "q2_k": 0.31},
}


@pytest.fixture
def values() -> np.ndarray:
    """(12, 512) f32"""
    return np.random.default_rng(0).standard_normal((12, 512)).astype(np.float32)


@pytest.mark.parametrize("name", WRITABLE_TYPES)
def test_every_type(name: str, values: np.ndarray) -> None:
    """Rows come back near what they were, and our decoder says the same as the package's."""
    number = WRITABLE_TYPES[name]
    raw = quantise_rows(values, number)
    back = dequantise_rows(raw, number, 512)
    error = np.linalg.norm(back - values) / np.linalg.norm(values)

    assert gguf.GGMLQuantizationType(number).name.lower() == name
    np.testing.assert_array_equal(back, gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(number)).reshape(12, 512))
    assert MOST_ERROR[name] / 3 <= error <= MOST_ERROR[name]


@pytest.mark.parametrize("name", WRITABLE_TYPES)
def test_rows_are_independent(name: str, values: np.ndarray) -> None:
    """A row's bytes do not depend on the rows beside it: pieces can be written one by one."""
    number = WRITABLE_TYPES[name]
    pieces = [quantise_rows(values[begin : begin + 5], number) for begin in (0, 5, 10)]

    np.testing.assert_array_equal(np.concatenate(pieces), quantise_rows(values, number))


@pytest.mark.parametrize("name", ["f16", "bf16", "q8_0"])
def test_simple_types_equal_the_packages_encoders(name: str, values: np.ndarray) -> None:
    """Where the package can encode, the bytes are the same."""
    reference = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name.upper()])

    np.testing.assert_array_equal(quantise_rows(values, WRITABLE_TYPES[name]), reference.view(np.uint8).reshape(12, -1))


@pytest.mark.parametrize("name", WRITABLE_TYPES)
def test_zeros_and_no_rows(name: str) -> None:
    """Blocks of zeros stay zero, and no rows are no error."""
    number = WRITABLE_TYPES[name]
    zeros = np.zeros((2, 256), np.float32)

    assert not dequantise_rows(quantise_rows(zeros, number), number, 256).any()
    assert quantise_rows(zeros[:0], number).shape[0] == 0


def test_refused(values: np.ndarray) -> None:
    """Everything ggml would abort or read wild on is an exception."""
    q8_0, q4_k, iq2_xxs = WRITABLE_TYPES["q8_0"], WRITABLE_TYPES["q4_k"], 16
    for bad in (values.astype(np.float64), values[:, ::2], values[0]):
        with pytest.raises(ShapeError, match="must be"):
            quantise_rows(bad, q8_0)
    with pytest.raises(ShapeError, match=r"q4_K packs 256 values, so no row of 96 fits"):
        quantise_rows(np.zeros((1, 96), np.float32), q4_k)
    with pytest.raises(OptionError, match="cannot be written; choose one of f32"):
        quantise_rows(values, iq2_xxs)
    with pytest.raises(ShapeError, match="does not have 7 bytes"):
        dequantise_rows(np.zeros((1, 7), np.uint8), q8_0, 32)
    with pytest.raises(ShapeError, match="must be"):
        dequantise_rows(np.zeros((2, 68), np.uint8)[:, ::2], q8_0, 32)
    with pytest.raises(OptionError, match="i32 cannot be decoded"):
        dequantise_rows(np.zeros((1, 4), np.uint8), 26, 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(bad: float, values: np.ndarray) -> None:
    """One bad weight would spoil its block silently."""
    values[3, 100] = bad
    with pytest.raises(ValueError, match="infinite or not a number"):
        quantise_rows(values, WRITABLE_TYPES["q6_k"])


def test_range_of_f16(values: np.ndarray) -> None:
    """Too large for f16 is an error, at its limit it is none."""
    values[0, 0] = -65504
    assert dequantise_rows(quantise_rows(values, WRITABLE_TYPES["f16"]), WRITABLE_TYPES["f16"], 512)[0, 0] == -65504
    values[0, 0] = -70000
    with pytest.raises(ValueError, match="70000 is beyond f16's 65504"):
        quantise_rows(values, WRITABLE_TYPES["f16"])
    quantise_rows(values, WRITABLE_TYPES["bf16"])
