"""Frozen records that cross layers: a leaf module that imports nothing of ours.

Shapes of weights follow ggml's order ne = [fastest, ...]; NumPy arrays are (rows, cols).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

DrafterKind = Literal["dflash", "dspark", "dflash2"]
KV_TYPES = ("f32", "f16", "q8_0", "q4_0")  # of cached keys and values
MAX_VERIFY_WIDTH = 128  # most nodes of one verify, the root of a tree included
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class TargetConfig:
    """A `qwen35` target as its file describes it; every layer index is 0-based."""

    architecture: str
    n_layers: int
    n_embd: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int
    n_heads: int
    n_heads_kv: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_dims: int  # leading dimensions of a head that rotate
    rope_sections: tuple[int, int, int, int]
    recurrent_layers: tuple[bool, ...]  # per layer: Gated DeltaNet (True) or full attention (False)
    conv_taps: int
    state_size: int  # S_k == S_v, rows and columns of one head's recurrent state
    n_heads_k: int  # key heads of a recurrent layer (H_k)
    n_heads_v: int  # value heads of a recurrent layer (H_v), a multiple of n_heads_k
    tied_embeddings: bool  # the output head is the embedding table

    @property
    def n_conv_channels(self) -> int:
        """Channels of the convolution: queries, keys and values side by side (C)."""
        return self.state_size * (2 * self.n_heads_k + self.n_heads_v)


@dataclass(frozen=True)
class RopeScaling:
    """YaRN scaling of a drafter's rotary embedding."""

    factor: float
    n_ctx_original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # on top of YaRN's own 1 + 0.1 ln(factor), as ggml's rope takes it


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter as its file describes it, dialects A and B alike; layer ids mean "output of target layer i"."""

    kind: DrafterKind
    dialect: Literal["llama.cpp", "lucebox"]
    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_heads_kv: int
    head_dim: int
    n_vocab: int  # rows of the head the drafter predicts with
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    draft_block_size: int  # slots of a block, anchor included
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    n_embd_target: int
    causal: bool = False
    sliding_window: int = 0  # tokens; 0 = none
    sliding_layers: tuple[bool, ...] = ()  # per drafter layer; empty = none slides
    sample_from_anchor: bool = False  # slot 0 already predicts
    has_confidence_head: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    final_logit_softcapping: float = 0.0
    conv_taps: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    markov_rank: int = 0
    has_own_embeddings: bool = False
    has_own_head: bool = False
    has_reduced_vocabulary: bool = False  # a d2t table maps draft rows to target ids
    has_confidence_bias: bool = False
    n_vocab_target: int = 0  # token ids the drafter knows: rows of its embeddings and codebooks
    n_ctx_train: int = 0  # tokens; 0 = the file does not say
    rope_dims: int = 0  # leading dimensions of a head that rotate

    @property
    def draft_horizon(self) -> int:
        """New tokens one block can propose."""
        return self.draft_block_size if self.sample_from_anchor else self.draft_block_size - 1


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as its file describes it; the long lists are decoded at first use."""

    file: str  # for error messages
    model: str  # kind of tokenizer, "gpt2" = byte-level BPE
    pre_tokenizer: str  # name of the rule that splits text into words
    n_tokens: int
    load_tokens: Callable[[], list[bytes]]
    load_merges: Callable[[], list[bytes]]
    load_token_types: Callable[[], list[int]]
    bos_id: int | None = None
    eos_id: int | None = None
    eot_id: int | None = None
    pad_id: int | None = None
    mask_id: int | None = None
    add_bos: bool = False
    chat_template: str | None = None

    @cached_property
    def tokens(self) -> list[bytes]:
        """Text of every token as stored: byte-level BPE spells bytes as printable characters, in UTF-8."""
        return self.load_tokens()

    @cached_property
    def merges(self) -> list[bytes]:
        """Merge rules, best first: two tokens separated by a space."""
        return self.load_merges()

    @cached_property
    def token_types(self) -> list[int]:
        """Kind of every token in GGUF's numbering (1 normal, 3 control, 4 user-defined, 5 unused)."""
        return self.load_token_types()


@dataclass(frozen=True)
class SamplingParams:
    """How the target's next token is chosen; the defaults are greedy decoding without penalties."""

    temperature: float = 0.0  # 0 = greedy: top_k, top_p, min_p and seed must be left as they are
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    min_p: float = 0.0  # 0 = off
    repeat_penalty: float = 1.0  # 1 = off
    presence_penalty: float = 0.0  # 0 = off
    frequency_penalty: float = 0.0  # 0 = off
    penalty_last_n: int = 64  # tokens that the penalties look back on
    seed: int | None = None  # None = fresh entropy
    logprobs: int = 0  # top log-probabilities to report per token; 0 = none

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of the options that were set although greedy decoding samples nothing."""
        names = ("top_k", "top_p", "min_p", "seed") if self.temperature == 0 else ()
        return tuple(name for name in names if getattr(self, name) != getattr(SamplingParams, name))

    @property
    def needs_logits(self) -> bool:
        """Whether the device-side argmax does not suffice."""
        return self.temperature > 0 or self.has_penalties or self.logprobs > 0

    @property
    def has_penalties(self) -> bool:
        """Whether a token's probability depends on the tokens before it beyond the model itself."""
        return self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one committed token and of the best alternatives at its position (natural log)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = field(default=())
