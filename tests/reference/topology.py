"""Gated delta rule over a draft tree in float64, all nodes at once: a triangular system masked by the topology.

Unrolled along a path, the state after node n is a sum over its ancestors a (itself included):

    S_n = e^(c_n) S_0 + sum_a e^(c_n - c_a) k_a u_a^T        c_n = sum of log decays from the root to n

so the deltas solve (I + L) U = diag(beta) (V - e^c K S_0) with L[n, a] = beta_n e^(c_n - c_a) (k_n . k_a) for strict
ancestors a, and 0 elsewhere: siblings meet nowhere. No state is formed per node and nothing is walked, which is what
makes this a second opinion beside `delta_net.run_path`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reference.delta_net import Inputs


@dataclass(frozen=True)
class Factors:
    """One value head over n nodes: k (n, S_k) normalised, u (n, S_v) deltas, c (n,) decay from the root (log)."""

    k: np.ndarray
    u: np.ndarray
    c: np.ndarray
    output: np.ndarray  # (n, S_v)


def ancestor_matrix(parents: Sequence[int]) -> np.ndarray:
    """(n, n) bool: [n, a] whether a lies on the path from the root to n, n itself included."""
    n = len(parents)
    step = np.zeros((n, n))
    for node, parent in enumerate(parents):
        if parent >= 0:
            step[node, parent] = 1.0
    reach = np.linalg.inv(np.eye(n) - step)  # a path counts each of its nodes once: entries are 0 or 1
    return np.rint(reach).astype(bool)


def log_decays(alpha: np.ndarray, dt_bias: float, a: float) -> np.ndarray:
    """softplus(alpha + dt_bias) * a, alpha (n,)."""
    x = alpha.astype(np.float64) + float(dt_bias)
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20)))) * float(a)


def unit_rows(x: np.ndarray, eps: float) -> np.ndarray:
    """Rows of x (n, S) divided by sqrt(sum of squares + eps)."""
    x = x.astype(np.float64)
    return x / np.sqrt(np.sum(x * x, axis=1, keepdims=True) + eps)


def solve_head(state: np.ndarray, inputs: Inputs, parents: Sequence[int], head: int) -> Factors:
    """All nodes of one value head from its state (S_k, S_v)."""
    key_head = head % inputs.q.shape[1]
    reach = ancestor_matrix(parents)
    q = unit_rows(inputs.q[:, key_head], inputs.eps)
    k = unit_rows(inputs.k[:, key_head], inputs.eps)
    v = inputs.v[:, head].astype(np.float64)
    beta = 1.0 / (1.0 + np.exp(-inputs.b[:, head].astype(np.float64)))
    c = reach @ log_decays(inputs.alpha[:, head], inputs.dt_bias[head], inputs.a[head])
    decay = np.exp(np.where(reach, c[:, None] - c[None, :], -np.inf))  # masked before exp: elsewhere it may overflow
    start = np.exp(c)[:, None] * (k @ state)
    lower = beta[:, None] * np.tril(decay * (k @ k.T), -1)
    u = np.linalg.solve(np.eye(len(c)) + lower, beta[:, None] * (v - start))
    output = (np.exp(c)[:, None] * (q @ state) + (decay * (q @ k.T)) @ u) / np.sqrt(k.shape[1])
    return Factors(k, u, c, output)


def state_after(state: np.ndarray, factors: Factors, path: Sequence[int]) -> np.ndarray:
    """State (S_k, S_v) once the nodes of `path`, root first, are committed."""
    last = path[-1]
    weights = np.exp(factors.c[last] - factors.c[path])
    return np.exp(factors.c[last]) * state + (weights[:, None] * factors.k[path]).T @ factors.u[path]
