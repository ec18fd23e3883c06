"""What `bench --drafter-check` tries: the drafter as its file describes it, and with one setting changed at a time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..decode.engine import Engine
    from ..decode.round import RoundResult
    from ..gguf_io.dialects import Dialect
    from ..records import DrafterConfig, TargetConfig, Vocabulary

AS_STORED = "as the file says"
ROPE_BASES = (1e4, 1e6, 1e7)
MASK_WORDS = (b"<|mask|>", b"<|MASK|>", b"<mask>", b"[MASK]")
LAYERS = "layers"  # kind of the trials that move the layers the features come from


@dataclass(frozen=True)
class Trial:
    """One setting changed; `remedy` says how to make the change last."""

    kind: str
    name: str
    settings: dict[str, Any] = field(default_factory=dict)  # for Engine.load(drafter_settings=)
    loading: dict[str, Any] = field(default_factory=dict)  # other options of loading
    remedy: str = ""


@dataclass(frozen=True)
class DraftedRound:
    """A speculating round: committed tokens before it, draft tokens offered and accepted."""

    n_context: int
    n_offered: int
    n_accepted: int


def list_trials(
    drafter: DrafterConfig, target: TargetConfig, vocabulary: Vocabulary, dialect: Dialect, kv_types: dict[str, str]
) -> Iterator[Trial]:
    """Every trial that this pair allows, the unchanged one first."""
    yield Trial("base", AS_STORED)
    yield from _layer_trials(drafter, target, dialect)
    for mask_id in _mask_candidates(drafter, vocabulary):
        text = vocabulary.tokens[mask_id].decode("utf-8", "replace")
        remedy = f"the mask token should be {mask_id} ({text}): write that to '{dialect.mask_keys[0]}'"
        yield Trial("mask", f"mask token {mask_id} ({text})", {"mask_token_id": mask_id}, remedy=remedy)
    for base in dict.fromkeys((target.rope_theta, *ROPE_BASES)):
        if base != drafter.rope_theta:
            remedy = f"the rope base should be {base:g}: write that to '{dialect.prefix}rope.freq_base'"
            yield Trial("rope", f"rope base {base:g}", {"rope_theta": base}, remedy=remedy)
    if drafter.rope_scaling is not None:
        remedy = f"leave out the keys '{dialect.prefix}rope.scaling.*'"
        yield Trial("rope", "no rope scaling", {"rope_scaling": None}, remedy=remedy)
    if drafter.sliding_window:
        remedy = f"leave out '{dialect.prefix}attention.sliding_window': its layers look back without a limit"
        yield Trial("window", "no sliding window", {"sliding_window": 0, "sliding_layers": ()}, remedy=remedy)
    remedy = f"write {str(not drafter.causal).lower()} to '{dialect.prefix}attention.causal'"
    name = "tokens of a block see " + ("each other" if drafter.causal else "earlier ones only")
    yield Trial("causal", name, {"causal": not drafter.causal}, remedy=remedy)
    if set(kv_types.values()) != {"f32"}:
        options = " ".join(f"{option} f32" for option in ("-ctk", "-ctv", "-ctkd", "-ctvd"))
        yield Trial("cache", "all caches f32", {}, dict.fromkeys(kv_types, "f32"), f"load with {options}")


def _layer_trials(drafter: DrafterConfig, target: TargetConfig, dialect: Dialect) -> Iterator[Trial]:
    for shift, word in ((-1, "earlier"), (1, "later")):
        moved = tuple(layer + shift for layer in drafter.target_layer_ids)
        if min(moved) >= 0 and max(moved) < target.n_layers:
            stored = [layer + dialect.target_layer_shift for layer in moved]
            remedy = f"the features come from the wrong layers: write {stored} to '{dialect.target_layers}'"
            yield Trial(LAYERS, f"features one layer {word}", {"target_layer_ids": moved}, remedy=remedy)


def _mask_candidates(drafter: DrafterConfig, vocabulary: Vocabulary) -> list[int]:
    """Other tokens that conversions take for the mask: what the target calls its mask, its padding, its end."""
    named = [i for i, text in enumerate(vocabulary.tokens) if text in MASK_WORDS]
    found = [vocabulary.mask_id, *named, vocabulary.pad_id, vocabulary.eos_id]
    limit = min(drafter.n_vocab_target, vocabulary.n_tokens)
    return list(dict.fromkeys(i for i in found if i is not None and i != drafter.mask_token_id and i < limit))[:3]


def draft_rounds(engine: Engine, prompts: Sequence[list[int]], n_tokens: int) -> list[DraftedRound]:
    """Greedy chains of the whole horizon after every prompt; the text is the target's, whatever the drafter says."""
    from ..decode.round import SpecOptions

    rounds: list[DraftedRound] = []
    for prompt in prompts:
        session = engine.open_session()
        n_context = len(prompt)

        def keep(result: RoundResult) -> None:
            nonlocal n_context
            if result.n_offered:
                rounds.append(DraftedRound(n_context, result.n_offered, result.n_accepted))
            n_context += len(result.token_ids)

        try:
            for _ in session.generate(prompt, max_tokens=n_tokens, spec=SpecOptions("chain"), on_round=keep):
                pass
        finally:
            session.close()
    return rounds


def summarise(rounds: Sequence[DraftedRound]) -> dict[str, Any]:
    """Mean accepted tokens a round with its standard error, and the share of rounds that accepted so deep."""
    accepted = [each.n_accepted for each in rounds]
    n_depths = max((each.n_offered for each in rounds), default=0)
    spread = statistics.stdev(accepted) if len(accepted) > 1 else 0.0
    return {
        "rounds": len(rounds),
        "mean_accepted": round(statistics.fmean(accepted), 4) if accepted else 0.0,
        "standard_error": round(spread / len(accepted) ** 0.5, 4) if accepted else 0.0,
        "accepted_share_per_depth": [round(_share(rounds, depth), 4) for depth in range(1, n_depths + 1)],
    }


def _share(rounds: Sequence[DraftedRound], depth: int) -> float:
    """Of the rounds that offered a token at this depth."""
    offered = [each for each in rounds if each.n_offered >= depth]
    return sum(each.n_accepted >= depth for each in offered) / len(offered)
