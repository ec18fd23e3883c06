"""Opening a target and its drafter: every check first, then memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyggml_spec.decode.arguments import as_int, check_integer, is_int, refusal
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
from pyggml_spec.records import DrafterConfig, RopeScaling, TargetConfig
from pyggml_spec.state.kv_cells import KvTypes
from pyggml_spec.tokenizer import Tokenizer

ADJUSTABLE: dict[str, tuple[Callable[[Any], bool], str]] = {  # field of DrafterConfig -> (test of a value, its rule)
    "target_layer_ids": (lambda x: _is_tuple_of(x, is_int), "a list of integers"),
    "mask_token_id": (is_int, "an integer"),
    "rope_theta": (lambda x: isinstance(x, int | float) and x > 0, "a number above 0"),
    "rope_scaling": (lambda x: x is None or isinstance(x, RopeScaling), "a RopeScaling, or None"),
    "sliding_window": (lambda x: is_int(x) and x >= 0, "an integer of at least 0 (0 = none)"),
    "sliding_layers": (lambda x: _is_tuple_of(x, lambda each: isinstance(each, bool)), "a list of truth values"),
    "causal": (lambda x: isinstance(x, bool), "True or False"),
}
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
        return check_integer("n_ctx", n_ctx, 1, trained, ", what the target was trained with")

    def with_drafter_settings(self, settings: Mapping[str, Any] | None) -> OpenPair:
        """The same pair with some fields of the drafter's configuration replaced, checked like what a file says."""
        if settings is None:
            return self
        if not isinstance(settings, Mapping) or any(name not in ADJUSTABLE for name in settings):
            raise refusal("drafter_settings", settings, f"a mapping with some of {', '.join(ADJUSTABLE)}")
        if not settings:
            return self
        if self.drafter_config is None or self.drafter_file is None:
            raise OptionError("`drafter_settings` were given without a drafter: give `drafter` too, or leave them out")
        values = {name: _plain(value) for name, value in settings.items()}
        for name, value in values.items():
            is_valid, rule = ADJUSTABLE[name]
            if not is_valid(value):
                raise OptionError(f"`drafter_settings` has {value!r:.80} for {name}: it must be {rule}")
        config = replace(self.drafter_config, **values)
        check_drafter_fits(config, find_vocabulary(self.drafter_file), self.target_config, self.tokenizer.vocabulary)
        return replace(self, drafter_config=config)

    def names(self) -> dict[str, str | None]:
        """What to call the two models."""
        path = self.target_file.path
        return {
            "model": self.target_file.metadata.find_string("general.name", default=path.stem),
            "drafter": None if self.drafter_file is None else self.drafter_file.path.stem,
        }

    @property
    def n_bytes(self) -> int:
        """Bytes of all weights."""
        return self.target_file.n_bytes + (0 if self.drafter_file is None else self.drafter_file.n_bytes)


def _plain(value: Any) -> Any:
    """NumPy's integers as int, a list as the tuple that configurations have."""
    return tuple(map(as_int, value)) if isinstance(value, list | tuple) else as_int(value)


def _is_tuple_of(value: object, is_item: Callable[[Any], bool]) -> bool:
    return isinstance(value, tuple) and all(map(is_item, value))


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
) -> Drafter | None:
    """The drafter of an open pair beside its target; None when the pair has none."""
    config = pair.drafter_config
    if config is None:
        return None
    weights = load_drafter_weights(target.backend, pair, report)
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
