"""Gated delta rule in float64: one token at a time, one path at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Inputs:
    """Inputs of n tokens, float arrays: q, k (n, H_k, S), v (n, H_v, S), alpha, b (n, H_v), dt_bias, a (H_v,)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    alpha: np.ndarray
    b: np.ndarray
    dt_bias: np.ndarray
    a: np.ndarray
    eps: float


def log_decay(alpha: float, dt_bias: float, a: float) -> float:
    """softplus(alpha + dt_bias) * a."""
    x = float(alpha) + float(dt_bias)
    return (x if x > 20 else float(np.log1p(np.exp(x)))) * float(a)


def sigmoid(x: float) -> float:
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + float(np.exp(-float(x))))


def l2_normalise(x: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(sum(x^2) + eps), x (S,)."""
    x = x.astype(np.float64)
    return x / np.sqrt(np.sum(x * x) + eps)


def step(state: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, log_g: float, beta: float):
    """One token of one head: state (S_k, S_v), q, k (S_k,), v (S_v,) -> (output (S_v,), new state)."""
    decay = np.exp(log_g)
    delta = beta * (v - decay * (state.T @ k))
    state = decay * state + np.outer(k, delta)
    return state.T @ q / np.sqrt(len(q)), state


def run_path(states: np.ndarray, inputs: Inputs, path: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens `path` of `inputs` one after another from states (H_v, S_k, S_v).

    Returns the last token's output (H_v, S_v) and the states after it (H_v, S_k, S_v).
    """
    states = states.astype(np.float64)
    outputs = np.zeros(inputs.v.shape[1:])
    n_heads_k = inputs.q.shape[1]
    for token in path:
        for head in range(inputs.v.shape[1]):
            q = l2_normalise(inputs.q[token, head % n_heads_k], inputs.eps)
            k = l2_normalise(inputs.k[token, head % n_heads_k], inputs.eps)
            log_g = log_decay(inputs.alpha[token, head], inputs.dt_bias[head], inputs.a[head])
            v = inputs.v[token, head].astype(np.float64)
            outputs[head], states[head] = step(states[head], q, k, v, log_g, sigmoid(inputs.b[token, head]))
    return outputs, states
