"""Whether a drafter was made for a target: compared at load, because a mismatch only shows as bad drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyggml_spec.errors import ModelFileError
from pyggml_spec.records import DrafterConfig, TargetConfig, Vocabulary

_UNUSED = 5
_PADDING_PREFIX = b"[PAD"


@dataclass(frozen=True)
class FitRow:
    """One comparison; `detail` names both sides."""

    check: str
    ok: bool
    detail: str


def check_drafter_fits(
    drafter: DrafterConfig, drafter_vocabulary: Vocabulary | None, target: TargetConfig, target_vocabulary: Vocabulary
) -> None:
    """Raise ModelFileError, with both sides of every failed comparison, unless the drafter was made for the target."""
    rows = explain_fit(drafter, drafter_vocabulary, target, target_vocabulary)
    failed = [f"{row.check}: {row.detail}" for row in rows if not row.ok]
    if failed:
        raise ModelFileError(
            f"the drafter does not fit the target ({'; '.join(failed)}); use the drafter trained for this target"
        )


def explain_fit(
    drafter: DrafterConfig, drafter_vocabulary: Vocabulary | None, target: TargetConfig, target_vocabulary: Vocabulary
) -> list[FitRow]:
    """Every comparison of a drafter with a target, failed or not, in the order a reader would ask."""
    rows = [
        _compare_hidden_size(drafter, target),
        _compare_embeddings(drafter, target),
        _compare_layers(drafter, target),
        _compare_mask_token(drafter, target, target_vocabulary),
        _compare_rows(drafter, target_vocabulary),
        _compare_context(drafter, target),
    ]
    if drafter_vocabulary is None:
        detail = f"the drafter's file has none; its tables are for {drafter.n_vocab_target} ids"
        return [*rows, FitRow("vocabulary", True, detail)]
    return [*rows, _compare_token_texts(drafter_vocabulary, target_vocabulary)]


def _compare_hidden_size(drafter: DrafterConfig, target: TargetConfig) -> FitRow:
    detail = f"drafter reads features of {drafter.n_embd_target} values, target's hidden size is {target.n_embd}"
    return FitRow("hidden size", drafter.n_embd_target == target.n_embd, detail)


def _compare_embeddings(drafter: DrafterConfig, target: TargetConfig) -> FitRow:
    if drafter.has_own_embeddings:  # they serve as the head too when the file has no other
        return FitRow("embeddings", True, "the drafter brings its own")
    detail = f"drafter of width {drafter.n_embd} borrows them from the target of width {target.n_embd}"
    return FitRow("embeddings", drafter.n_embd == target.n_embd, detail)


def _compare_layers(drafter: DrafterConfig, target: TargetConfig) -> FitRow:
    ids = ", ".join(map(str, drafter.target_layer_ids))
    detail = f"drafter reads the outputs of layers {ids} (0-based), target has {target.n_layers} layers"
    return FitRow("target layers", max(drafter.target_layer_ids) < target.n_layers, detail)


def _compare_mask_token(drafter: DrafterConfig, target: TargetConfig, vocabulary: Vocabulary) -> FitRow:
    n_rows = drafter.n_vocab_target if drafter.has_own_embeddings else target.n_vocab
    mask_id = drafter.mask_token_id
    text = _show(vocabulary.tokens[mask_id]) if mask_id < vocabulary.n_tokens else "unnamed"
    detail = f"drafter was trained with id {mask_id} ({text}), the embedding table has {n_rows} rows"
    return FitRow("mask token", mask_id < n_rows, detail)


def _compare_rows(drafter: DrafterConfig, vocabulary: Vocabulary) -> FitRow:
    n_used = _n_used(vocabulary)
    detail = f"drafter's tables are for {drafter.n_vocab_target} ids, target uses {n_used} of {vocabulary.n_tokens}"
    return FitRow("vocabulary size", drafter.n_vocab_target >= n_used, detail)


def _compare_context(drafter: DrafterConfig, target: TargetConfig) -> FitRow:
    trained = f"{drafter.n_ctx_train} tokens" if drafter.n_ctx_train else "an unknown number of tokens"
    return FitRow("context", True, f"drafter was made for {trained}, target for {target.n_ctx_train}")


def _compare_token_texts(drafter: Vocabulary, target: Vocabulary) -> FitRow:
    n_shared = min(drafter.n_tokens, target.n_tokens)
    if drafter.tokens[:n_shared] != target.tokens[:n_shared]:
        mismatch = _first(n_shared, lambda token_id: not _is_same(drafter, target, token_id))
        if mismatch is not None:
            ours, theirs = _show(drafter.tokens[mismatch]), _show(target.tokens[mismatch])
            return FitRow("vocabulary", False, f"token {mismatch} is {ours} to the drafter but {theirs} to the target")
    longer, side = (drafter, "drafter") if drafter.n_tokens > n_shared else (target, "target")
    extra = _first(longer.n_tokens, lambda token_id: token_id >= n_shared and not _is_padding(longer, token_id))
    if extra is not None:
        return FitRow("vocabulary", False, f"only the {side} has token {extra}, {_show(longer.tokens[extra])}")
    n_extra = longer.n_tokens - n_shared
    padding = f", and {n_extra} more of the {side} are padding" if n_extra else ""
    return FitRow("vocabulary", True, f"{n_shared} tokens are equal{padding}")


def _is_same(drafter: Vocabulary, target: Vocabulary, token_id: int) -> bool:
    if drafter.tokens[token_id] == target.tokens[token_id]:
        return True
    return _is_padding(drafter, token_id) and _is_padding(target, token_id)


def _is_padding(vocabulary: Vocabulary, token_id: int) -> bool:
    text = vocabulary.tokens[token_id]
    return not text or vocabulary.token_types[token_id] == _UNUSED or text.startswith(_PADDING_PREFIX)


def _n_used(vocabulary: Vocabulary) -> int:
    n_used = vocabulary.n_tokens
    while n_used and _is_padding(vocabulary, n_used - 1):
        n_used -= 1
    return n_used


def _first(n_items: int, holds: Callable[[int], bool]) -> int | None:
    return next((number for number in range(n_items) if holds(number)), None)


def _show(text: bytes) -> str:
    return repr(text.decode("utf-8", errors="replace"))
