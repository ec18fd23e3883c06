"""Opening a target and its drafter: every check first, then memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyggml_spec.decode.drafter import Drafter, DrafterLimits
from pyggml_spec.decode.target import Target, TargetLimits
from pyggml_spec.errors import OptionError
from pyggml_spec.ggml import Backend
from pyggml_spec.gguf_io.dialects import canonical_tensors
from pyggml_spec.gguf_io.drafter import drafter_tensors, read_drafter_config
from pyggml_spec.gguf_io.fit import check_drafter_fits
from pyggml_spec.gguf_io.reader import GgufFile, open_gguf
from pyggml_spec.gguf_io.target import read_target_config, target_tensors
from pyggml_spec.gguf_io.vocab import find_vocabulary, read_vocabulary
from pyggml_spec.gguf_io.weights import Weights
from pyggml_spec.models import dflash, qwen35
from pyggml_spec.records import DrafterConfig, TargetConfig
from pyggml_spec.state.kv_cells import KvTypes
from pyggml_spec.tokenizer import Tokenizer

ADJUSTABLE = (
    "target_layer_ids",
    "mask_token_id",
    "rope_theta",
    "rope_scaling",
    "sliding_window",
    "sliding_layers",
    "causal",
)
DEFAULT_N_CTX = 8192  # tokens; a model trained with less gets its own length
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class OpenPair:
    """A target file and its drafter's, open and checked; nothing is on a device yet."""

    target_file: GgufFile
    target_config: TargetConfig
    tokenizer: Tokenizer
    drafter_file: GgufFile | None = None
    drafter_config: DrafterConfig | None = None

    def choose_n_ctx(self, n_ctx: int | None) -> int:
        """The context asked for if it can be had; None = what the target was trained with, at most 8192."""
        trained = self.target_config.n_ctx_train
        if n_ctx is None:
            return min(trained, DEFAULT_N_CTX)
        if not 1 <= n_ctx <= trained:
            raise OptionError(f"n_ctx is {n_ctx}: it must be 1 to {trained}, what the target was trained with")
        return n_ctx

    def with_drafter_settings(self, settings: Mapping[str, Any]) -> OpenPair:
        """The same pair with some fields of the drafter's configuration replaced, checked like what a file says."""
        unknown = sorted(set(settings) - set(ADJUSTABLE))
        if self.drafter_config is None or self.drafter_file is None or unknown:
            found = f"are for a field {unknown[0]!r}" if unknown else "were given without a drafter"
            raise OptionError(f"drafter_settings {found}: they replace {', '.join(ADJUSTABLE)} of a drafter's file")
        config = replace(self.drafter_config, **settings)
        check_drafter_fits(config, find_vocabulary(self.drafter_file), self.target_config, self.tokenizer.vocabulary)
        return replace(self, drafter_config=config)

    @property
    def n_bytes(self) -> int:
        """Bytes of all weights."""
        return self.target_file.n_bytes + (0 if self.drafter_file is None else self.drafter_file.n_bytes)


def open_pair(stack: ExitStack, target_path: Path, drafter_path: Path | None) -> OpenPair:
    """Open both files (they close with `stack`) and check that they are what they should be and fit together."""
    file = stack.enter_context(open_gguf(target_path))
    config = read_target_config(file)
    tokenizer = Tokenizer(read_vocabulary(file))
    if drafter_path is None:
        return OpenPair(file, config, tokenizer)
    drafter_file = stack.enter_context(open_gguf(drafter_path))
    drafter_config = read_drafter_config(drafter_file)
    check_drafter_fits(drafter_config, find_vocabulary(drafter_file), config, tokenizer.vocabulary)
    return OpenPair(file, config, tokenizer, drafter_file, drafter_config)


def load_target_weights(backend: Backend, pair: OpenPair, report: Progress | None) -> Weights:
    """The target's weights on the device; `report(bytes done, bytes in all)` covers both files."""
    config, file = pair.target_config, pair.target_file
    stacks, on_progress = qwen35.target_stacks(config), _shifted(report, 0, pair.n_bytes)
    return Weights(backend, file.tensors, target_tensors(config), stacks, file.path.name, on_progress)


def load_drafter_weights(backend: Backend, pair: OpenPair, report: Progress | None) -> Weights:
    """The drafter's weights on the device."""
    config, file = pair.drafter_config, pair.drafter_file
    assert config is not None and file is not None, "the pair has no drafter"
    stacks, on_progress = dflash.drafter_stacks(config), _shifted(report, pair.target_file.n_bytes, pair.n_bytes)
    return Weights(backend, canonical_tensors(file), drafter_tensors(config), stacks, file.path.name, on_progress)


def load_target(
    stack: ExitStack, backend: Backend, pair: OpenPair, limits: TargetLimits, kv_types: KvTypes, report: Progress | None
) -> Target:
    """The target on the device, with its caches."""
    weights = load_target_weights(backend, pair, report)
    stack.callback(weights.close)
    layers = () if pair.drafter_config is None else pair.drafter_config.target_layer_ids
    target = Target(backend, pair.target_config, weights, limits, kv_types=kv_types, feature_layers=layers)
    stack.callback(target.close)
    return target


def load_drafter(
    stack: ExitStack,
    target: Target,
    pair: OpenPair,
    kv_types: KvTypes,
    report: Progress | None,
    *,
    rotates_keys: bool = False,
) -> Drafter:
    """The drafter of an open pair beside its target."""
    config, weights = pair.drafter_config, load_drafter_weights(target.backend, pair, report)
    assert config is not None, "the pair has no drafter"
    stack.callback(weights.close)
    drafter = Drafter(
        target.backend,
        target.arena,
        config,
        weights,
        DrafterLimits(target.limits.n_ctx, target.limits.n_slots, rotates_keys),
        tables=shared_tables(target, config, weights),
        features=target.feature_ring,
        kv_types=kv_types,
    )
    stack.callback(drafter.close)
    return drafter


def shared_tables(target: Target, config: DrafterConfig, own: Weights) -> dflash.SharedTables:
    """The embedding table and the output head that the drafter works with."""
    embeddings = target.weights["token_embd.weight"]
    head = embeddings if target.config.tied_embeddings else target.weights["output.weight"]
    if config.has_own_embeddings:  # which serve as the head too when the file has no other
        embeddings = head = own["token_embd.weight"]
    if config.has_own_head:
        head = own["output.weight"]
    return dflash.SharedTables(embeddings, head, target.weights.generation)


def _shifted(report: Progress | None, n_before: int, n_all: int) -> Progress | None:
    if report is None:
        return None
    return lambda n_done, _: report(min(n_before + n_done, n_all), n_all)
