"""Block drafters in float64: one slot at a time where the definition is by slot, nothing shared with the package.

A block stands on a context of committed feature rows. Slot 0 holds the anchor at position T, the others the mask token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pyggml_spec.records import DrafterConfig
from reference.heads import conv_weights, convolve

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Block:
    """hidden (n, n_embd) of the slots that predict, after the final norm; logits (n, n_rows) before any head."""

    hidden: np.ndarray
    logits: np.ndarray


def draft(config: DrafterConfig, weights: Arrays, embeddings: np.ndarray, head: np.ndarray, features: np.ndarray,
          anchor: int) -> Block:  # fmt: skip
    """One block after `features` (T, n_features * n_embd_target); matrices are (rows, cols), rows = outputs."""
    n_context, n_slots = len(features), config.draft_block_size
    context = rms_norm(features @ weights["fc.weight"].T, weights["enc.output_norm.weight"], config.norm_eps)
    ids = [anchor] + [config.mask_token_id] * (n_slots - 1)
    x = embeddings[ids].astype(np.float64) * config.embedding_scale
    for layer in range(config.n_layers):
        w = {name.split(".", 2)[2]: array for name, array in weights.items() if name.startswith(f"blk.{layer}.")}
        x = x + _sublayer(config, w, x, "attn", lambda y, w=w, i=layer: attention(config, w, context, y, i))
        x = x + _sublayer(config, w, x, "ffn", lambda y, w=w: feed_forward(w, y))
    hidden = rms_norm(x, weights["output_norm.weight"], config.norm_eps)[n_slots - config.draft_horizon :]
    assert n_context + n_slots > len(hidden)
    logits = hidden @ head.astype(np.float64).T * config.logit_scale
    if config.final_logit_softcapping:
        logits = np.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
    return Block(hidden, logits)


def _sublayer(config: DrafterConfig, w: Arrays, x: np.ndarray, part: str, mix) -> np.ndarray:
    y = rms_norm(x, w[f"{part}_norm.weight"], config.norm_eps)
    if config.kind != "dflash2":
        return mix(y)
    taps = conv_weights(y, w[f"{part}_conv_proj.weight"], w[f"{part}_conv_base"], config.conv_group_size)
    return convolve(mix(convolve(y, taps, 0)), taps, 1)


def attention(config: DrafterConfig, w: Arrays, context: np.ndarray, y: np.ndarray, layer: int) -> np.ndarray:
    """Every slot over the context features and the block's own slots."""
    n_context, n_slots, d = len(context), len(y), config.head_dim
    positions = np.arange(n_context + n_slots)
    q = rotate(config, _heads(y @ w["attn_q.weight"].T, d, w["attn_q_norm.weight"], config), positions[n_context:])
    rows = np.concatenate([context, y])
    k = rotate(config, _heads(rows @ w["attn_k.weight"].T, d, w["attn_k_norm.weight"], config), positions)
    v = (rows @ w["attn_v.weight"].T).reshape(len(rows), config.n_heads_kv, d)
    window = config.sliding_window if config.sliding_layers and config.sliding_layers[layer] else 0
    out = np.empty((n_slots, config.n_heads, d))
    for slot in range(n_slots):
        position = n_context + slot
        seen = [p for p in positions if (not window or p > position - window) and (not config.causal or p <= position)]
        for h in range(config.n_heads):
            h_kv = h * config.n_heads_kv // config.n_heads
            scores = k[seen, h_kv] @ q[slot, h] / math.sqrt(d)
            p = np.exp(scores - scores.max())
            out[slot, h] = p @ v[seen, h_kv] / p.sum()
    return out.reshape(n_slots, -1) @ w["attn_output.weight"].T


def feed_forward(w: Arrays, y: np.ndarray) -> np.ndarray:
    """down(silu(gate y) * (up y))."""
    gate = y @ w["ffn_gate.weight"].T
    return (gate / (1 + np.exp(-gate)) * (y @ w["ffn_up.weight"].T)) @ w["ffn_down.weight"].T


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Over the last axis."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def _heads(x: np.ndarray, d: int, norm: np.ndarray, config: DrafterConfig) -> np.ndarray:
    return rms_norm(x.reshape(len(x), -1, d), norm, config.norm_eps)


def rotate(config: DrafterConfig, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rotary embedding of x (n, heads, d), pairs half a rotated part apart."""
    n_dims = config.rope_dims or config.head_dim
    frequencies, amplitude = rope_frequencies(config, n_dims)
    angles = positions[:, None, None] * frequencies
    a, b, rest = x[..., : n_dims // 2], x[..., n_dims // 2 : n_dims], x[..., n_dims:]
    cos, sin = np.cos(angles) * amplitude, np.sin(angles) * amplitude
    return np.concatenate([a * cos - b * sin, a * sin + b * cos, rest], axis=-1)


def rope_frequencies(config: DrafterConfig, n_dims: int) -> tuple[np.ndarray, float]:
    """Frequencies (n_dims / 2,) and the factor on sine and cosine; YaRN as its paper and Hugging Face define it."""
    exponents = np.arange(0, n_dims, 2) / n_dims
    plain = config.rope_theta**-exponents
    yarn = config.rope_scaling
    if yarn is None:
        return plain, 1.0

    def dimension(n_turns: float) -> float:
        return n_dims * math.log(yarn.n_ctx_original / (n_turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension(yarn.beta_slow)), n_dims - 1)
    ramp = np.clip((np.arange(n_dims // 2) - low) / max(high - low, 0.001), 0, 1)
    amplitude = (0.1 * math.log(yarn.factor) + 1) * yarn.attention_factor
    return plain / yarn.factor * ramp + plain * (1 - ramp), amplitude
