"""The configuration and tensor table of a `qwen35` target, as llama.cpp's converter writes it."""

from __future__ import annotations

from pyggml_spec.errors import ModelFileError
from pyggml_spec.gguf_io.metadata import Metadata
from pyggml_spec.gguf_io.reader import GgufFile
from pyggml_spec.gguf_io.shapes import Shape, check_tensors
from pyggml_spec.records import TargetConfig

ARCHITECTURE = "qwen35"
MAX_LAYERS = 1024
MAX_EMBD = 1 << 17
MAX_FF = 1 << 20
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_CTX = (1 << 31) - 1
MAX_VOCAB = 1 << 22
MAX_CONV_TAPS = 16

_UNSUPPORTED = {
    "qwen35moe": "its mixture-of-experts layers are not supported yet",
    "dflash": "it is a drafter: pass it as the drafter, next to a qwen35 target",
    "qwen35-dflash-draft": "it is a drafter: pass it as the drafter, next to a qwen35 target",
    "dflash-draft": "it is a drafter: pass it as the drafter, next to a qwen35 target",
}


def read_target_config(file: GgufFile) -> TargetConfig:
    """The configuration of a target file; every tensor of every layer is checked against it.

    Blocks for multi-token prediction (`nextn_predict_layers`, after the trunk) are skipped.
    Raises ModelFileError when the architecture, a key or a tensor does not fit.
    """
    _check_architecture(file)
    config = _config_from_keys(file)
    mtp_prefixes = tuple(f"blk.{layer}." for layer in range(config.n_layers, config.n_layers + _n_mtp(file.metadata)))
    check_tensors(file, target_tensors(config), file.tensors, skipped_prefixes=mtp_prefixes)
    return config


def target_tensors(config: TargetConfig) -> dict[str, Shape]:
    """Every tensor that a target of this configuration has, name -> ne (fastest first)."""
    table: dict[str, Shape] = {"token_embd.weight": (config.n_embd, config.n_vocab)}
    for layer, is_recurrent in enumerate(config.recurrent_layers):
        mixer = _recurrent_tensors(config) if is_recurrent else _attention_tensors(config)
        table |= {f"blk.{layer}.{name}": ne for name, ne in (mixer | _ffn_tensors(config)).items()}
    table["output_norm.weight"] = (config.n_embd,)
    if not config.tied_embeddings:
        table["output.weight"] = (config.n_embd, config.n_vocab)
    return table


def _attention_tensors(config: TargetConfig) -> dict[str, Shape]:
    n_query, n_key = config.head_dim * config.n_heads, config.head_dim * config.n_heads_kv
    return {
        "attn_norm.weight": (config.n_embd,),
        "attn_q.weight": (config.n_embd, 2 * n_query),  # per head: query, then output gate
        "attn_k.weight": (config.n_embd, n_key),
        "attn_v.weight": (config.n_embd, n_key),
        "attn_q_norm.weight": (config.head_dim,),
        "attn_k_norm.weight": (config.head_dim,),
        "attn_output.weight": (n_query, config.n_embd),
    }


def _recurrent_tensors(config: TargetConfig) -> dict[str, Shape]:
    n_value = config.state_size * config.n_heads_v
    return {
        "attn_norm.weight": (config.n_embd,),
        "attn_qkv.weight": (config.n_embd, config.n_conv_channels),
        "attn_gate.weight": (config.n_embd, n_value),
        "ssm_conv1d.weight": (config.conv_taps, config.n_conv_channels),
        "ssm_dt.bias": (config.n_heads_v,),
        "ssm_a": (config.n_heads_v,),
        "ssm_beta.weight": (config.n_embd, config.n_heads_v),
        "ssm_alpha.weight": (config.n_embd, config.n_heads_v),
        "ssm_norm.weight": (config.state_size,),
        "ssm_out.weight": (n_value, config.n_embd),
    }


def _ffn_tensors(config: TargetConfig) -> dict[str, Shape]:
    return {
        "post_attention_norm.weight": (config.n_embd,),
        "ffn_gate.weight": (config.n_embd, config.n_ff),
        "ffn_up.weight": (config.n_embd, config.n_ff),
        "ffn_down.weight": (config.n_ff, config.n_embd),
    }


def _check_architecture(file: GgufFile) -> None:
    architecture = file.architecture
    if architecture != ARCHITECTURE:
        reason = _UNSUPPORTED.get(architecture, f"targets must be '{ARCHITECTURE}' (Qwen3.5 text models)")
        raise ModelFileError.about(file.path, f"has architecture '{architecture}': {reason}")


def _n_mtp(keys: Metadata) -> int:
    return keys.find_int(f"{ARCHITECTURE}.nextn_predict_layers", 0, MAX_LAYERS, default=0)


def _config_from_keys(file: GgufFile) -> TargetConfig:
    keys, prefix = file.metadata, f"{ARCHITECTURE}."
    refuse_rope_scaling(keys, prefix)
    n_layers = _read_n_layers(keys)
    head_dim = read_head_dim(keys, prefix)
    n_heads, n_heads_kv = read_head_counts(keys, prefix)
    rope_dims = keys.require_int(prefix + "rope.dimension_count", 2, head_dim)
    state_size, n_heads_k, n_heads_v = _read_recurrent_sizes(keys)
    return TargetConfig(
        architecture=ARCHITECTURE,
        n_layers=n_layers,
        n_embd=keys.require_int(prefix + "embedding_length", 1, MAX_EMBD),
        n_ff=keys.require_int(prefix + "feed_forward_length", 1, MAX_FF),
        n_vocab=_read_n_vocab(file),
        n_ctx_train=keys.require_int(prefix + "context_length", 1, MAX_CTX),
        n_heads=n_heads,
        n_heads_kv=n_heads_kv,
        head_dim=head_dim,
        norm_eps=keys.require_float(prefix + "attention.layer_norm_rms_epsilon", 0.0, 0.1),
        rope_theta=keys.require_float(prefix + "rope.freq_base", 1.0, 1e12),
        rope_dims=rope_dims,
        rope_sections=_read_rope_sections(keys, rope_dims),
        recurrent_layers=_read_recurrent_layers(keys, n_layers),
        conv_taps=keys.require_int(prefix + "ssm.conv_kernel", 2, MAX_CONV_TAPS),
        state_size=state_size,
        n_heads_k=n_heads_k,
        n_heads_v=n_heads_v,
        tied_embeddings="output.weight" not in file.tensors,
    )


def _read_n_layers(keys: Metadata) -> int:
    n_blocks = keys.require_int(f"{ARCHITECTURE}.block_count", 1, MAX_LAYERS)
    if _n_mtp(keys) >= n_blocks:
        keys.fail(f"{ARCHITECTURE}.nextn_predict_layers", f"must be below the {n_blocks} blocks of block_count")
    return n_blocks - _n_mtp(keys)


def _read_n_vocab(file: GgufFile) -> int:
    table = file.tensors.get("token_embd.weight")
    n_vocab = table.ne[1] if table is not None and len(table.ne) == 2 else 0
    if not 1 <= n_vocab <= MAX_VOCAB:
        raise ModelFileError.about(
            file.path,
            f"has no embedding table 'token_embd.weight' of 1 to {MAX_VOCAB} rows",
            way_out="is it a whole model?",
        )
    tokens = file.metadata.find_string_array("tokenizer.ggml.tokens")
    if tokens is not None and tokens.n_items > n_vocab:
        file.metadata.fail("tokenizer.ggml.tokens", f"token_embd.weight has only {n_vocab} rows")
    return n_vocab


def _read_recurrent_sizes(keys: Metadata) -> tuple[int, int, int]:
    prefix = f"{ARCHITECTURE}.ssm."
    state_size = keys.require_int(prefix + "state_size", 1, MAX_HEAD_DIM)
    n_heads_k = keys.require_int(prefix + "group_count", 1, MAX_HEADS)
    n_heads_v = keys.require_int(prefix + "time_step_rank", 1, MAX_HEADS)
    if n_heads_v % n_heads_k:
        keys.fail(prefix + "time_step_rank", f"must be a multiple of {prefix}group_count = {n_heads_k}")
    if keys.require_int(prefix + "inner_size", 1, 1 << 24) != state_size * n_heads_v:
        keys.fail(prefix + "inner_size", f"must be state_size x time_step_rank = {state_size * n_heads_v}")
    return state_size, n_heads_k, n_heads_v


def _read_rope_sections(keys: Metadata, rope_dims: int) -> tuple[int, int, int, int]:
    key = f"{ARCHITECTURE}.rope.dimension_sections"
    time, height, width, extra = keys.require_ints(key, 0, rope_dims, n_items=4)
    if rope_dims % 2 or time < 1 or time + height + width + extra > rope_dims // 2:
        keys.fail(key, f"must start above 0 and sum to at most half of an even rope.dimension_count = {rope_dims}")
    return time, height, width, extra


def _read_recurrent_layers(keys: Metadata, n_layers: int) -> tuple[bool, ...]:
    key = f"{ARCHITECTURE}.attention.recurrent_layers"
    if key in keys:
        return keys.require_bools(key, n_layers + _n_mtp(keys))[:n_layers]
    interval = keys.require_int(f"{ARCHITECTURE}.full_attention_interval", 1, MAX_LAYERS)
    return tuple((layer + 1) % interval != 0 for layer in range(n_layers))


def read_head_dim(keys: Metadata, prefix: str) -> int:
    """Size of an attention head; keys and values must agree (drafters share this rule)."""
    head_dim = keys.require_int(prefix + "attention.key_length", 1, MAX_HEAD_DIM)
    if keys.require_int(prefix + "attention.value_length", 1, MAX_HEAD_DIM) != head_dim:
        keys.fail(prefix + "attention.value_length", f"must equal attention.key_length = {head_dim}")
    return head_dim


def read_head_counts(keys: Metadata, prefix: str) -> tuple[int, int]:
    """Query heads and key/value heads, the first a multiple of the second (drafters share this rule)."""
    n_heads = keys.require_int(prefix + "attention.head_count", 1, MAX_HEADS)
    n_heads_kv = keys.require_int(prefix + "attention.head_count_kv", 1, n_heads)
    if n_heads % n_heads_kv:
        keys.fail(prefix + "attention.head_count_kv", f"must divide attention.head_count = {n_heads}")
    return n_heads, n_heads_kv


def refuse_rope_scaling(keys: Metadata, prefix: str) -> None:
    """A target with a scaled rotary embedding is refused: ignoring the scaling would degrade it silently."""
    scaling = keys.find_string(prefix + "rope.scaling.type", default="none")
    if scaling != "none" and keys.find_float(prefix + "rope.scaling.factor", 0.0, 1e9, default=1.0) != 1.0:
        keys.fail(prefix + "rope.scaling.type", "targets with rope scaling are not supported", "convert without it")
