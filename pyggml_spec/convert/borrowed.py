"""What a drafter takes over from its target: vocabulary, kind of rotary embedding, tables it repeats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pyggml_spec.convert.checkpoint import Checkpoint, StoredTensor
from pyggml_spec.convert.settings import Settings
from pyggml_spec.convert.vocabulary import vocabulary_keys
from pyggml_spec.errors import ModelFileError
from pyggml_spec.gguf_io import open_gguf

_COMPARED_ROWS = 4096  # at a time


@dataclass(frozen=True)
class BorrowedFromTarget:
    """The target's side of a drafter's conversion."""

    vocabulary: Callable[[int], dict[str, bytes]]  # its keys, by the number of ids the drafter knows
    has_sections: bool  # whether its rotary embedding is a multi-section one
    n_embd: int  # 0 = unknown, as for the next
    n_layers: int
    inputs: tuple[Path, ...]  # the target's files
    tables: Mapping[str, StoredTensor]  # "token_embd.weight" and "output.weight", where they can be compared


def open_borrowed(path: Path) -> BorrowedFromTarget:
    """The target at `path`: a directory in Hugging Face layout, or a GGUF file.

    Raises ModelFileError when there is neither.
    """
    return _from_checkpoint(Checkpoint(path)) if path.is_dir() else _from_gguf(path)


def _from_checkpoint(checkpoint: Checkpoint) -> BorrowedFromTarget:
    settings = checkpoint.settings.merged("text_config")
    sections = settings.find("rope_parameters.mrope_section", "rope_scaling.mrope_section")
    return BorrowedFromTarget(
        vocabulary=lambda n_vocab: vocabulary_keys(checkpoint.directory, n_vocab),
        has_sections=sections is not None,
        n_embd=settings.find_int("hidden_size", low=1, high=1 << 17, default=0),
        n_layers=settings.find_int("num_hidden_layers", low=1, high=1024, default=0),
        inputs=checkpoint.files(),
        tables=_find_tables(checkpoint, settings),
    )


def _find_tables(checkpoint: Checkpoint, settings: Settings) -> dict[str, StoredTensor]:
    is_whole = any(checkpoint.directory.glob("*.safetensors"))  # the tokenizer's files alone will do
    by_ending = (
        {name.rpartition("model.")[2]: tensor for name, tensor in checkpoint.tensors.items()} if is_whole else {}
    )
    embeddings, head = by_ending.get("embed_tokens.weight"), by_ending.get("lm_head.weight")
    if settings.find_bool("tie_word_embeddings"):
        head = embeddings
    tables = {"token_embd.weight": embeddings, "output.weight": head}
    return {name: tensor for name, tensor in tables.items() if tensor is not None}


def _from_gguf(path: Path) -> BorrowedFromTarget:
    with open_gguf(path) as file:
        if "dflash" in file.architecture:
            raise ModelFileError(f"'{path}' is a drafter; give the drafter's target")
        keys = {key: file.metadata.stored_value(key) for key in file.metadata if key.startswith("tokenizer.")}
        tokens = file.metadata.find_string_array("tokenizer.ggml.tokens")
        n_tokens = 0 if tokens is None else tokens.n_items
        prefix = f"{file.architecture}."
        has_sections = prefix + "rope.dimension_sections" in file.metadata
        n_embd = file.metadata.find_int(prefix + "embedding_length", 1, 1 << 17, default=0)
        n_layers = file.metadata.find_int(prefix + "block_count", 1, 1024, default=0)

    def vocabulary(n_vocab: int) -> dict[str, bytes]:
        if n_tokens != n_vocab:
            raise ModelFileError(f"'{path}' has {n_tokens} tokens but the drafter knows {n_vocab}; give its own target")
        return dict(keys)

    return BorrowedFromTarget(vocabulary, has_sections, n_embd, n_layers, file.paths, tables={})


def repeats(own: StoredTensor, theirs: StoredTensor | None) -> bool:
    """Whether a drafter's table holds the same values as the target's, so that it can be left out."""
    if theirs is None or own.shape != theirs.shape or len(own.shape) != 2:
        return False
    pieces = (slice(begin, begin + _COMPARED_ROWS) for begin in range(0, own.shape[0], _COMPARED_ROWS))
    return all(np.array_equal(own.widened(piece), theirs.widened(piece)) for piece in pieces)
