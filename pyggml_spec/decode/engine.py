"""The engine: a target, optionally its drafter, and a tokenizer on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import ref

from pyggml_spec import assets
from pyggml_spec.decode.arguments import (
    as_int,
    as_limit,
    check_callback,
    check_flags,
    check_integer,
    check_length,
    check_messages,
    check_path,
    check_stops,
    check_text,
    refusal,
)
from pyggml_spec.decode.completion import Completion, Stream
from pyggml_spec.decode.drafter import Drafter
from pyggml_spec.decode.loader import (
    OpenPair,
    Progress,
    load_drafter,
    load_drafter_weights,
    load_target,
    load_target_weights,
    open_pair,
    shared_tables,
)
from pyggml_spec.decode.prefix_cache import PrefixCache
from pyggml_spec.decode.round import SPEC_MODES, SpecMode, SpecOptions, refuse_ignored
from pyggml_spec.decode.session import Session
from pyggml_spec.decode.target import MAX_SLOTS, Target, TargetLimits
from pyggml_spec.errors import OptionError
from pyggml_spec.ggml import Backend, type_by_name
from pyggml_spec.ggml.backend import choose_device, default_threads
from pyggml_spec.policy import PolicyName, PolicyShelf
from pyggml_spec.records import KV_TYPES, MAX_VERIFY_WIDTH, SamplingParams
from pyggml_spec.state.kv_cells import KvTypes
from pyggml_spec.tokenizer.chat import encode_chat
from pyggml_spec.tree.build import TreeOptions

ModelPath = str | PathLike[str]
DEFAULT_PREFIX_CACHE_MIB = 1024  # hundreds of snapshots of a small model, half a dozen of one with 27 B parameters
MAX_PREFIX_CACHE_MIB = 1 << 24
_CPUS = ", the CPUs of this process, as threads beyond that only wait for each other"
_CLOSED = "the engine was closed before this stream ended: what was read is valid, load an engine again for the rest"


class Engine:
    """Generates text from a target, several tokens a round when it has a drafter. Use `Engine.load`.

    One generation runs at a time; close the engine (or leave its `with` block) to free the device.
    """

    def __init__(self, target: Target, drafter: Drafter | None, pair: OpenPair, prefixes: PrefixCache) -> None:
        self.target = target
        self.drafter = drafter
        self.tokenizer = pair.tokenizer
        self.prefixes = prefixes
        self._policies = PolicyShelf()
        self._pair = pair
        device = target.backend.device
        self._names = {**pair.names(), "device": device.name, "device_kind": device.kind}
        self._stack = ExitStack()
        self._running: ref[Stream] | None = None  # weak: a stream that an interrupt lost has ended
        self._share_cells()

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
        kv_type_draft_k: str = "f16",
        kv_type_draft_v: str = "f16",
        rotate_keys: bool = False,
        rotate_draft_keys: bool = False,
        max_width: int = 32,
        n_parallel: int = 1,
        exact: bool = False,
        prefix_cache_mib: int = DEFAULT_PREFIX_CACHE_MIB,
        drafter_settings: Mapping[str, Any] | None = None,
        on_progress: Progress | None = None,
    ) -> Engine:
        """Load a target GGUF and its drafter GGUF; without arguments the embedded pair.

        Args:
            n_ctx: tokens of context; None = what the target was trained with, at most 8192.
            n_threads: CPU threads; None = one per core.
            kv_type_k, kv_type_v: types of cached keys and values: f32, f16, q8_0 or q4_0.
            kv_type_draft_k, kv_type_draft_v: the same for the drafter's own cache, whatever the target's is.
            rotate_keys: spread the values of the target's keys (and queries) by a Hadamard rotation, so that a cache of
                few bits loses less; the head size must be a power of two. rotate_draft_keys: the same for the drafter.
            max_width: most nodes of a verify, the anchor included.
            n_parallel: sessions that may be open at a time, each with n_ctx tokens of cache.
            exact: what is generated depends on the tokens alone, bit for bit, never on how many were computed together:
                the same with and without speculation, for cached prompts and after recovered faults. Without it, a
                device or type whose products add up differently by width may decide near-ties differently. Costs a
                few trial calls at loading; after that calls are padded to the widths that the trial found exact
                (max_width at worst) and prompts are read max_width tokens at a time.
            prefix_cache_mib: host memory for snapshots of earlier prompts, so that a prompt that begins like one of
                them is not computed from its start (see decode/prefix_cache.py); 0 = keep none.
            drafter_settings: for files that say something wrong: what to replace, by the field names of DrafterConfig
                that `decode.loader.ADJUSTABLE` lists; see `pyggml-spec bench --drafter-check`.
            on_progress: called with (bytes loaded, bytes in all).

        Raises:
            ModelFileError: a file is missing, damaged, or the drafter was made for another target.
            OptionError: an option is out of range.
            DeviceError: the device has too little memory or cannot be opened.
        """
        paths = _model_paths(target, drafter)
        check_text("device", device, "the name of a device, or 'auto'")
        check_callback("on_progress", on_progress)
        check_flags(exact=exact, rotate_keys=rotate_keys, rotate_draft_keys=rotate_draft_keys)
        n_threads = None if n_threads is None else check_integer("n_threads", n_threads, 1, default_threads(), _CPUS)
        n_slots = check_integer("n_parallel", n_parallel, 1, MAX_SLOTS)
        width = check_integer("max_width", max_width, 1, MAX_VERIFY_WIDTH)
        cache_mib = check_integer("prefix_cache_mib", prefix_cache_mib, 0, MAX_PREFIX_CACHE_MIB, " (0 = none)")
        kv_types = _kv_types(kv_type_k=kv_type_k, kv_type_v=kv_type_v)
        draft_kv_types = _kv_types(kv_type_draft_k=kv_type_draft_k, kv_type_draft_v=kv_type_draft_v)
        with ExitStack() as stack:
            pair = open_pair(stack, *paths).with_drafter_settings(drafter_settings)
            if pair.drafter_file is None and (rotate_draft_keys or {kv_type_draft_k, kv_type_draft_v} != {"f16"}):
                raise OptionError("options of the drafter's cache were given without a drafter: give `drafter` too")
            limits = TargetLimits(pair.choose_n_ctx(n_ctx), n_slots, width, exact=exact, rotates_keys=rotate_keys)
            backend = stack.enter_context(Backend(choose_device(device), n_threads))
            loaded = load_target(stack, backend, pair, limits, kv_types, on_progress)
            drafting = load_drafter(stack, loaded, pair, draft_kv_types, on_progress, rotates_keys=rotate_draft_keys)
            engine = cls(loaded, drafting, pair, PrefixCache(cache_mib << 20, backend.lock))
            engine._stack = stack.pop_all()
        return engine

    def _share_cells(self) -> None:
        """Cells of cached prefixes go to whoever needs cells."""
        for owner in (self.target, self.drafter):
            if owner is not None:
                owner.state.kv.pool.reclaim = self.prefixes.evict

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
        confidence: float = 0.0,
        policy: PolicyName | None = None,
        on_prefill: Progress | None = None,
    ) -> Stream:
        """Start a generation from a text or token ids; yields a Piece per round.

        The spelling of a control token in a text, such as <|im_end|>, becomes that token; see `chat_prompt` for words
        of others.

        Args:
            max_tokens: most tokens to generate; None (or -1) = until a stop or the end of the context.
            temperature: 0 = greedy. top_k, top_p, min_p, the penalties and `seed` as in llama.cpp; greedy decoding
                samples nothing and refuses all of them but the penalties.
            logprobs: top log-probabilities to report per token, at most 20; 0 = none.
            stop: strings that end the text (not included in it). ignore_eos: go on after an end token.
            spec: "off" decodes plainly, "chain" and "tree" speculate, "auto" drafts chains when there is a drafter.
            draft_max: most draft tokens in sequence; None = the drafter's horizon, 0 = none.
            budget, tree_top_k, tau: draft tree (spec="tree"): most nodes, candidates per node, score window (nats).
            policy: how much is drafted: "fixed" always all of it, "cost" what pays by measured times and acceptance,
                "ema" all or nothing; learned for as long as the engine lives. None = cost for spec="auto", else fixed.
            confidence: end chains before the first token that the drafter's confidence head trusts less; 0 = off.
            on_prefill: called with (prompt tokens done, prompt tokens in all).

        Raises:
            OptionError, ContextLimitError: before anything is computed.
        """
        self._refuse_running()
        token_ids = self._token_ids(prompt)
        params = SamplingParams(
            temperature, as_int(top_k), top_p, min_p, repeat_penalty, presence_penalty, frequency_penalty,
            as_int(penalty_last_n), as_int(seed), as_int(logprobs),
        )  # fmt: skip
        tree = TreeOptions(budget=as_int(budget), top_k=as_int(tree_top_k), tau=tau)
        check_callback("on_prefill", on_prefill)
        check_flags(ignore_eos=ignore_eos)
        check_text("spec", spec, f"one of {', '.join(SPEC_MODES)}")
        how = SpecOptions(spec, as_int(draft_max), tree, confidence, policy)
        refuse_ignored(how, has_drafter=self.drafter is not None)
        return self._start(
            token_ids,
            params,
            max_tokens=as_limit(max_tokens),
            stop_ids=() if ignore_eos else self.tokenizer.end_ids,
            stop_strings=check_stops(stop),
            spec=how,
            on_prefill=on_prefill,
        )

    def _start(self, token_ids: list[int], params: SamplingParams, **options: Any) -> Stream:
        """A stream on a session of its own, which it closes at its end."""
        session = self.open_session()
        try:
            emissions = session.generate(token_ids, params, decoder=self.tokenizer.stream(), **options)
        except BaseException:
            session.close()
            raise
        stream = Stream(session, emissions, len(token_ids), self._end_stream)
        self._running = ref(stream)
        return stream

    def _refuse_running(self) -> None:
        running = None if self._running is None else self._running()
        if running is not None and not running.has_ended:
            raise OptionError("a generation of this engine is still running: exhaust or close its stream first")
        self._running = None

    def _end_stream(self, session: Session) -> None:
        try:
            session.close()
        finally:
            self._running = None

    def _token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, bytes | bytearray | Mapping):
            with suppress(TypeError):
                return list(prompt)
        raise refusal("prompt", prompt, "a text or a list of token ids")

    def refuse_too_long(self, token_ids: Sequence[int]) -> None:
        """Raise ContextLimitError for a prompt that fits into no session, before others are read."""
        check_length(len(token_ids), self.target.limits.n_ctx, self.target.config.n_ctx_train)

    def open_session(self) -> Session:
        """A session of its own, for conversations of several turns; an engine has as many as it has slots."""
        with self.target.backend.lock:  # two threads must not get the same slot
            target = self.target.open_sequence()
            drafter = None if self.drafter is None else self.drafter.open_sequence(target)
        n_vocab = self.target.config.n_vocab
        return Session(target, drafter, n_vocab=n_vocab, prefixes=self.prefixes, policies=self._policies)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """The prompt of a conversation by the model's own chat template, as token ids for `generate` and `stream`.

        Messages are {"role", "content"}. What they say is text: a control token spelled in one, such as <|im_end|>,
        does not become that token, as it does in a prompt given as a text.
        """
        return encode_chat(self.tokenizer, check_messages(messages), **variables)

    def describe(self) -> dict[str, Any]:
        """Names and sizes: model, drafter, device, memory in bytes."""
        state = self.target.state
        return {
            **self._names,
            "parked": self.target.is_parked,
            "n_ctx": self.target.limits.n_ctx,
            "n_threads": self.target.backend.n_threads,
            "draft_chain": self._describe_chain(),
            "memory": {
                "weights": self.target.weights.n_bytes,
                "kv_cache": state.kv.n_bytes,
                "recurrent_state": state.recurrent.state_bytes,
                "factor_banks": state.recurrent.bank_bytes,
                "features": 0 if state.features is None else state.features.n_bytes,
                "drafter_weights": 0 if self.drafter is None else self.drafter.weights.n_bytes,
                "drafter_kv_cache": 0 if self.drafter is None else self.drafter.state.kv.n_bytes,
                "scratch": self.target.arena.n_bytes,
                "prefix_cache": self.prefixes.n_bytes,
            },
        }

    def park(self) -> None:
        """Free the device memory of weights, caches and scratch until `unpark`; the files stay open.

        Sessions stay open too: the next call of one computes its conversation again. Cached prefixes are given up.
        Safe to call twice.

        Raises:
            OptionError: a stream is running, or the engine is closed.
        """
        self._refuse_running()
        if self.target.why_unusable is not None and not self.target.is_parked:
            raise OptionError(self.target.why_unusable)
        self._free_memory()

    def _free_memory(self) -> None:
        with self.target.backend.lock:
            self.prefixes.clear()
            if self.drafter is not None:
                self.drafter.close()
            self.target.park()

    def unpark(self, on_progress: Progress | None = None) -> None:
        """Load weights again and make new caches; safe to call when the engine is not parked.

        Raises:
            DeviceError: the device has too little memory now; the engine stays parked.
            OptionError: the engine is closed.
        """
        check_callback("on_progress", on_progress)
        with self.target.backend.lock:  # nobody may take the target for usable before its drafter is
            if self.target.is_parked:
                self._load_again(on_progress)
            self.target.refuse_unusable()

    def _load_again(self, on_progress: Progress | None) -> None:
        target, drafter, pair = self.target, self.drafter, self._pair
        try:
            target.unpark(load_target_weights(target.backend, pair, on_progress))
            if drafter is not None:
                weights = load_drafter_weights(target.backend, pair, on_progress)
                tables = shared_tables(target, drafter.config, weights)
                drafter.unpark(weights, tables, target.arena, target.feature_ring)
        except BaseException:
            self._free_memory()
            raise
        self._share_cells()

    def _describe_chain(self) -> str | None:
        """How a DSpark drafter's chain runs; None for other drafters."""
        if self.drafter is None or self.drafter.config.kind != "dspark":
            return None
        why = self.drafter.why_stepped
        return f"step by step ({why})" if why else "in one graph"

    def close(self) -> None:
        """Free all device memory; safe to call twice.

        Who reads a stream of this engine gets an OptionError; what another thread has on the device is waited for.
        """
        running = None if self._running is None else self._running()
        if running is not None:
            running.abandon(_CLOSED)
        with self.target.backend.lock:
            self.prefixes.clear()
            self._stack.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _model_paths(target: ModelPath | None, drafter: ModelPath | None) -> tuple[Path, Path | None]:
    """Both files; the embedded pair when neither is named."""
    if target is not None:
        return check_path("target", target), None if drafter is None else check_path("drafter", drafter)
    if drafter is not None:
        raise OptionError(f"drafter '{drafter}' needs its target: give both, or neither for the embedded pair")
    return assets.embedded_target_path(), assets.embedded_drafter_path()


def _kv_types(**names: str) -> KvTypes:
    """The types of keys and values, in this order."""
    for argument, name in names.items():
        if not isinstance(name, str) or name not in KV_TYPES:
            raise refusal(argument, name, f"one of {', '.join(KV_TYPES)}")
    return KvTypes(*map(type_by_name, names.values()))
