"""The vocabulary that a model file carries."""

from __future__ import annotations

from pyggml_spec.gguf_io.metadata import Metadata, MetadataArray
from pyggml_spec.gguf_io.reader import GgufFile
from pyggml_spec.records import Vocabulary

_PREFIX = "tokenizer.ggml."
_TEMPLATE_KEY = "tokenizer.chat_template"
_NORMAL = 1


def find_vocabulary(file: GgufFile) -> Vocabulary | None:
    """The vocabulary of a file, or None when it has none (some drafters rely on their target's)."""
    return read_vocabulary(file) if _PREFIX + "tokens" in file.metadata else None


def read_vocabulary(file: GgufFile) -> Vocabulary:
    """The vocabulary of a file; token texts, merges and types stay undecoded until they are asked for.

    Raises ModelFileError when there is none, or when its lists or special ids do not fit together.
    """
    keys = file.metadata
    tokens = keys.find_string_array(_PREFIX + "tokens")
    if tokens is None or tokens.n_items == 0:
        keys.fail(_PREFIX + "tokens", "a model needs the tokens of its vocabulary")
    merges = keys.find_string_array(_PREFIX + "merges")
    types = _find_token_types(keys, tokens.n_items)
    return Vocabulary(
        file=keys.file,
        model=keys.require_name(_PREFIX + "model"),
        pre_tokenizer=keys.require_name(_PREFIX + "pre") if _PREFIX + "pre" in keys else "default",
        n_tokens=tokens.n_items,
        load_tokens=tokens.strings,
        load_merges=merges.strings if merges is not None else list,
        load_token_types=lambda: [_NORMAL] * tokens.n_items if types is None else types.numbers().tolist(),
        bos_id=_find_id(keys, "bos", tokens.n_items),
        eos_id=_find_id(keys, "eos", tokens.n_items),
        eot_id=_find_id(keys, "eot", tokens.n_items),
        pad_id=_find_id(keys, "padding", tokens.n_items),
        mask_id=_find_id(keys, "mask", tokens.n_items),
        add_bos=keys.find_bool(_PREFIX + "add_bos_token", False),
        chat_template=keys.require_string(_TEMPLATE_KEY) if _TEMPLATE_KEY in keys else None,
    )


def _find_id(keys: Metadata, name: str, n_tokens: int) -> int | None:
    key = f"{_PREFIX}{name}_token_id"
    return keys.require_int(key, 0, n_tokens - 1) if key in keys else None


def _find_token_types(keys: Metadata, n_tokens: int) -> MetadataArray | None:
    key = _PREFIX + "token_type"
    types = keys.get(key)
    if types is None:
        return None
    if isinstance(types, MetadataArray) and types.n_items == n_tokens and types.holds_integers:
        return types
    keys.fail(key, f"must be an array of {n_tokens} integers, one per token")
