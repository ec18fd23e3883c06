"""Plain and speculative greedy text of every prompt, side by side."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..decode.parity import Parity, compare_with_plain
from ..decode.round import SpecOptions
from ..tree.build import TreeOptions

if TYPE_CHECKING:
    from ..decode.engine import Engine
    from .progress import StageBar


def compare_texts(
    engine: Engine,
    texts: list[str],
    prompts: list[list[int]],
    ways: dict[str, dict[str, Any]],
    n_tokens: int,
    near_tie: float,
    bar: StageBar,
) -> list[dict[str, Any]]:
    """One row per prompt and speculative way; gaps in nats, None where they mean nothing."""
    rows = []
    drafting = {name: spec_options(options) for name, options in ways.items() if options["spec"] != "off"}
    for text, prompt in zip(texts, prompts, strict=True):
        for name, spec in drafting.items():
            parity = compare_with_plain(engine, prompt, spec, max_tokens=n_tokens)
            rows.append({"prompt": text, "mode": name, **_row(engine, parity, near_tie)})
            bar.update("comparing", len(rows), len(texts) * len(drafting))
    return rows


def spec_options(options: dict[str, Any]) -> SpecOptions:
    """A way of decoding, given by options of Engine.stream, as a session takes it."""
    if options["spec"] != "tree":
        return SpecOptions(options["spec"], options.get("draft_max"))
    return SpecOptions("tree", tree=TreeOptions(options["budget"], options["tree_top_k"], options["tau"]))


def _row(engine: Engine, parity: Parity, near_tie: float) -> dict[str, Any]:
    def text_of(token_id: int | None) -> str | None:
        return None if token_id is None else engine.tokenizer.decode([token_id], with_special=True)

    return {
        "n_tokens": parity.n_tokens,
        "smallest_gap": round(parity.smallest_gap, 4) if math.isfinite(parity.smallest_gap) else None,
        "first_divergence": parity.first_divergence,
        "plain_text": text_of(parity.plain_id),
        "speculative_text": text_of(parity.speculative_id),
        "plain_gap": parity.plain_gap,
        "speculative_gap": parity.speculative_gap,
        "is_near_tie": not parity.is_equal and parity.is_within(near_tie),
    }
