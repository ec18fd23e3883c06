"""Turning rows of values into rows of an output type, a piece at a time and on several threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import gguf
import numpy as np

from pyggml_spec.errors import ModelFileError

PIECE_VALUES = 1 << 21  # 8 MiB of f32: large enough that Python costs nothing, small enough to hold several

ReadRows = Callable[[int, int], np.ndarray]  # rows begin .. end of a tensor as (n_rows, n_values) f32


def encode_rows(
    read: ReadRows, n_rows: int, n_values: int, tensor_type: gguf.GGMLQuantizationType, what: str, n_threads: int
) -> Iterator[np.ndarray]:
    """The rows of a tensor in ggml's layout of `tensor_type`, as (n_rows of the piece, bytes of a row) uint8.

    `what` names the tensor in errors. Raises ModelFileError when a value cannot be stored.
    """

    def encode(begin: int) -> np.ndarray:
        return _encode(read(begin, min(begin + step, n_rows)), tensor_type, what)

    step = max(1, PIECE_VALUES // n_values)
    if n_threads == 1 or n_rows <= step:
        yield from map(encode, range(0, n_rows, step))
        return
    with ThreadPoolExecutor(n_threads) as pool:
        yield from _in_order(pool, encode, range(0, n_rows, step), n_threads + 1)


def _encode(values: np.ndarray, tensor_type: gguf.GGMLQuantizationType, what: str) -> np.ndarray:
    if tensor_type == gguf.GGMLQuantizationType.F32:
        return values.view(np.uint8)
    from pyggml_spec.ggml.quantise import quantise_rows  # native code: not needed to plan and check a file

    try:
        return quantise_rows(values, int(tensor_type))
    except ValueError as error:
        raise ModelFileError(f"tensor '{what}' cannot become {tensor_type.name.lower()}: {error}") from error


def _in_order(
    pool: ThreadPoolExecutor, encode: Callable[[int], np.ndarray], begins: range, n_ahead: int
) -> Iterator[np.ndarray]:
    """Results in order, with at most n_ahead in memory (Executor.map would hold all of them)."""
    running: deque[Future[np.ndarray]] = deque()
    try:
        for begin in begins:
            if len(running) == n_ahead:
                yield running.popleft().result()
            running.append(pool.submit(encode, begin))
        while running:
            yield running.popleft().result()
    finally:
        for future in running:
            future.cancel()
