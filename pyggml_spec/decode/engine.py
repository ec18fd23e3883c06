"""The engine: a target, optionally its drafter, and a tokenizer on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from pyggml_spec import assets
from pyggml_spec.decode.completion import Completion, Stream
from pyggml_spec.decode.drafter import Drafter, DrafterLimits
from pyggml_spec.decode.round import SpecMode, SpecOptions
from pyggml_spec.decode.session import Session
from pyggml_spec.decode.target import Target, TargetLimits
from pyggml_spec.errors import OptionError
from pyggml_spec.ggml import Backend, type_by_name
from pyggml_spec.ggml.backend import choose_device
from pyggml_spec.gguf_io.dialects import canonical_tensors
from pyggml_spec.gguf_io.drafter import drafter_tensors, read_drafter_config
from pyggml_spec.gguf_io.fit import check_drafter_fits
from pyggml_spec.gguf_io.reader import GgufFile, open_gguf
from pyggml_spec.gguf_io.target import read_target_config, target_tensors
from pyggml_spec.gguf_io.vocab import find_vocabulary, read_vocabulary
from pyggml_spec.gguf_io.weights import Weights
from pyggml_spec.models import dflash, qwen35
from pyggml_spec.records import DrafterConfig, SamplingParams, TargetConfig
from pyggml_spec.state.kv_cells import KvTypes
from pyggml_spec.tokenizer import Tokenizer
from pyggml_spec.tokenizer.chat import render_chat
from pyggml_spec.tree.build import TreeOptions

DEFAULT_N_CTX = 8192  # tokens; a model trained with less gets its own length
Progress = Callable[[int, int], None]
ModelPath = str | PathLike[str]


@dataclass
class _Model:
    """An open model file with its configuration."""

    file: GgufFile
    config: Any


class Engine:
    """Generates text from a target, several tokens a round when it has a drafter. Use `Engine.load`.

    One generation runs at a time; close the engine (or leave its `with` block) to free the device.
    """

    def __init__(self, target: Target, drafter: Drafter | None, tokenizer: Tokenizer, names: dict[str, Any]) -> None:
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self._names = names
        self._stack = ExitStack()
        self._session: Session | None = None
        self._running: Stream | None = None

    @classmethod
    def load(
        cls,
        target: ModelPath | None = None,
        drafter: ModelPath | None = None,
        *,
        device: str = "auto",
        n_ctx: int | None = None,
        n_threads: int | None = None,
        kv_type_k: str = "f16",
        kv_type_v: str = "f16",
        max_width: int = 32,
        on_progress: Progress | None = None,
    ) -> Engine:
        """Load a target GGUF and its drafter GGUF; without arguments the embedded pair.

        Args:
            n_ctx: tokens of context; None = what the target was trained with, at most 8192.
            n_threads: CPU threads; None = one per core.
            kv_type_k, kv_type_v: types of cached keys and values: f32, f16 or q8_0.
            max_width: most nodes of a verify, the anchor included.
            on_progress: called with (bytes loaded, bytes in all).

        Raises:
            ModelFileError: a file is missing, damaged, or the drafter was made for another target.
            OptionError: an option is out of range.
            DeviceError: the device has too little memory or cannot be opened.
        """
        if target is None:
            if drafter is not None:
                raise OptionError(f"drafter '{drafter}' needs its target: give both, or neither for the embedded pair")
            target, drafter = assets.embedded_target_path(), assets.embedded_drafter_path()
        with ExitStack() as stack:
            loader = _Loader(stack, device, n_threads, KvTypes(type_by_name(kv_type_k), type_by_name(kv_type_v)))
            engine = loader.load(Path(target), None if drafter is None else Path(drafter), n_ctx, max_width, on_progress)
            engine._stack = stack.pop_all()
        return engine

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Completion:
        """Generate to the end; options as for `stream`."""
        with self.stream(prompt, **options) as stream:
            for _ in stream:
                pass
        return stream.completion

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repeat_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        penalty_last_n: int = 64,
        seed: int | None = None,
        logprobs: int = 0,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        spec: SpecMode = "auto",
        draft_max: int | None = None,
        budget: int = 22,
        tree_top_k: int = 4,
        tau: float = 6.0,
        on_prefill: Progress | None = None,
    ) -> Stream:
        """Start a generation from a text or token ids; yields a Piece per round.

        Args:
            max_tokens: most tokens to generate; None (or -1) = until a stop or the end of the context.
            temperature: 0 = greedy. top_k, top_p, min_p, the penalties and `seed` as in llama.cpp.
            logprobs: top log-probabilities to report per token; 0 = none.
            stop: strings that end the text (not included in it). ignore_eos: go on after an end token.
            spec: "off" decodes plainly, "chain" and "tree" speculate, "auto" drafts chains when there is a drafter.
            draft_max: most draft tokens in sequence; None = the drafter's horizon.
            budget, tree_top_k, tau: draft tree (spec="tree"): most nodes, candidates per node, score window (nats).
            on_prefill: called with (prompt tokens done, prompt tokens in all).

        Raises:
            OptionError, ContextLimitError: before anything is computed.
        """
        if self._running is not None:
            raise OptionError("a generation of this engine is still running: exhaust or close its stream first")
        params = SamplingParams(
            temperature, top_k, top_p, min_p, repeat_penalty, presence_penalty, frequency_penalty, penalty_last_n,
            seed, logprobs,
        )  # fmt: skip
        options = SpecOptions(spec, draft_max, TreeOptions(budget=budget, top_k=tree_top_k, tau=tau))
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        session = self._fresh_session()
        emissions = session.generate(
            token_ids,
            params,
            max_tokens=None if max_tokens == -1 else max_tokens,
            stop_ids=() if ignore_eos else self.tokenizer.end_ids,
            stop_strings=(stop,) if isinstance(stop, str) else tuple(stop),
            decoder=self.tokenizer.stream(),
            spec=options,
            on_prefill=on_prefill,
        )
        self._running = Stream(session, emissions, len(token_ids), self._end_stream)
        return self._running

    def _end_stream(self) -> None:
        self._running = None

    def _fresh_session(self) -> Session:
        if self._session is None:
            self._session = self.open_session()
        self._session.reset()
        return self._session

    def open_session(self) -> Session:
        """A session of its own, for conversations of several turns; an engine has as many as it has slots."""
        target = self.target.open_sequence()
        drafter = None if self.drafter is None else self.drafter.open_sequence(target)
        return Session(target, drafter, n_vocab=self.target.config.n_vocab)

    def chat_prompt(self, messages: Sequence[dict[str, str]], **variables: Any) -> str:
        """The prompt of a conversation by the model's own chat template; messages are {"role", "content"}."""
        return render_chat(self.tokenizer.vocabulary.chat_template, list(messages), **variables)

    def describe(self) -> dict[str, Any]:
        """Names and sizes: model, drafter, device, memory in bytes."""
        state = self.target.state
        return {
            **self._names,
            "n_ctx": self.target.limits.n_ctx,
            "n_threads": self.target.backend.n_threads,
            "memory": {
                "weights": self.target.weights.n_bytes,
                "kv_cache": state.kv.n_bytes,
                "recurrent_state": state.recurrent.state_bytes,
                "factor_banks": state.recurrent.bank_bytes,
                "features": 0 if state.features is None else state.features.n_bytes,
                "drafter_weights": 0 if self.drafter is None else self.drafter.weights.n_bytes,
                "drafter_kv_cache": 0 if self.drafter is None else self.drafter.state.kv.n_bytes,
                "scratch": self.target.arena.n_bytes,
            },
        }

    def close(self) -> None:
        """Free all device memory; safe to call twice."""
        if self._running is not None:
            self._running.close()
        self._session = None
        self._stack.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass
class _Loader:
    """Opens and checks everything before it allocates; what was opened goes to `stack`, last in first out."""

    stack: ExitStack
    device: str
    n_threads: int | None
    kv_types: KvTypes
    _n_loaded: int = field(default=0, init=False)

    def load(
        self, target_path: Path, drafter_path: Path | None, n_ctx: int | None, max_width: int, on_progress: Progress | None
    ) -> Engine:
        file = self.stack.enter_context(open_gguf(target_path))
        config = read_target_config(file)
        tokenizer = Tokenizer(read_vocabulary(file))
        drafter_model = self._open_drafter(drafter_path, config, tokenizer)
        limits = TargetLimits(n_ctx=_choose_n_ctx(n_ctx, config), max_width=max_width)
        backend = self.stack.enter_context(Backend(choose_device(self.device), self.n_threads))
        report = self._progress(on_progress, file, drafter_model)
        target = self._load_target(backend, file, config, limits, drafter_model, report)
        drafter = None if drafter_model is None else self._load_drafter(target, drafter_model, report)
        names = {
            "model": file.metadata.find_string("general.name", default=target_path.stem),
            "drafter": None if drafter_path is None else drafter_path.stem,
            "device": backend.device.name,
            "device_kind": backend.device.kind,
        }
        return Engine(target, drafter, tokenizer, names)

    def _open_drafter(self, path: Path | None, config: TargetConfig, tokenizer: Tokenizer) -> _Model | None:
        if path is None:
            return None
        file = self.stack.enter_context(open_gguf(path))
        drafter_config: DrafterConfig = read_drafter_config(file)
        check_drafter_fits(drafter_config, find_vocabulary(file), config, tokenizer.vocabulary)
        if drafter_config.kind != "dflash" or drafter_config.has_reduced_vocabulary:
            raise OptionError(f"'{path}' is a {drafter_config.kind} drafter: only plain DFlash drafters are supported yet")
        return _Model(file, drafter_config)

    def _load_target(
        self,
        backend: Backend,
        file: GgufFile,
        config: TargetConfig,
        limits: TargetLimits,
        drafter: _Model | None,
        report: Progress | None,
    ) -> Target:
        weights = Weights(
            backend, file.tensors, target_tensors(config), qwen35.target_stacks(config), file.path.name, report
        )
        self.stack.callback(weights.close)
        layers = () if drafter is None else drafter.config.target_layer_ids
        target = Target(backend, config, weights, limits, kv_types=self.kv_types, feature_layers=layers)
        self.stack.callback(target.close)
        self._n_loaded += weights.n_bytes
        return target

    def _load_drafter(self, target: Target, model: _Model, report: Progress | None) -> Drafter:
        config, tensors = model.config, canonical_tensors(model.file)
        weights = Weights(
            target.backend, tensors, drafter_tensors(config), dflash.drafter_stacks(config), model.file.path.name, report
        )
        self.stack.callback(weights.close)
        embeddings = target.weights["token_embd.weight"]
        head = embeddings if target.config.tied_embeddings else target.weights["output.weight"]
        tables = dflash.SharedTables(
            weights["token_embd.weight"] if config.has_own_embeddings else embeddings,
            weights["output.weight"] if config.has_own_head else head,
        )
        drafter = Drafter(
            target.backend,
            target.arena,
            config,
            weights,
            DrafterLimits(target.limits.n_ctx, target.limits.n_slots),
            tables=tables,
            features=target.state.features,
            kv_types=self.kv_types,
        )
        self.stack.callback(drafter.close)
        return drafter

    def _progress(self, on_progress: Progress | None, file: GgufFile, drafter: _Model | None) -> Progress | None:
        """One progress over both files."""
        if on_progress is None:
            return None
        n_all = file.n_bytes + (0 if drafter is None else drafter.file.n_bytes)
        return lambda done, _: on_progress(min(self._n_loaded + done, n_all), n_all)


def _choose_n_ctx(n_ctx: int | None, config: TargetConfig) -> int:
    if n_ctx is None:
        return min(config.n_ctx_train, DEFAULT_N_CTX)
    if not 1 <= n_ctx <= config.n_ctx_train:
        raise OptionError(f"the context size must be 1 to {config.n_ctx_train} (what the model was trained with), found {n_ctx}")
    return n_ctx
