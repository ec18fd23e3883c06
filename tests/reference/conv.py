"""Causal depthwise convolution with SiLU in float64: one token at a time, one path at a time."""

from __future__ import annotations

import numpy as np


def step(window: np.ndarray, weights: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One token: window (C, K-1) oldest first, weights (C, K), x (C,) -> (output (C,), new window)."""
    taps = np.concatenate([window, x[:, None]], axis=1)
    y = np.sum(taps * weights, axis=1)
    return y / (1.0 + np.exp(-y)), taps[:, 1:]


def run_path(window: np.ndarray, weights: np.ndarray, x: np.ndarray, path: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens `path` of x (n, C) one after another: the last output (C,) and the window after it (C, K-1)."""
    window, weights, x = window.astype(np.float64), weights.astype(np.float64), x.astype(np.float64)
    output = np.zeros(x.shape[1])
    for token in path:
        output, window = step(window, weights, x[token])
    return output, window
