"""`bench --drafter-check` without models: which settings are tried, and what the results mean."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pyggml_spec.cli.drafter_findings import find_remedies, read_contexts, read_curve, read_files
from pyggml_spec.cli.drafter_trials import DraftedRound, Trial, list_trials, summarise
from pyggml_spec.gguf_io.dialects import Dialect

LLAMA_CPP = Dialect(
    "llama.cpp", "dflash.", "dflash.block_size", ("mask", "other"), "dflash.target_layers", 1, "dflash."
)


def drafter(**changes: Any) -> SimpleNamespace:
    """A drafter's configuration, as far as it is looked at."""
    settings = {"target_layer_ids": (1, 5), "mask_token_id": 7, "rope_theta": 1e6, "rope_scaling": None}
    sizes = {"n_vocab": 10, "n_vocab_target": 10, "n_ctx_train": 100, "has_reduced_vocabulary": False}
    return SimpleNamespace(**{**settings, **sizes, "sliding_window": 0, "causal": False, **changes})


def trials_of(n_layers: int = 8, kv_type: str = "f32", **changes: Any) -> dict[str, Trial]:
    """Every trial by its name."""
    tokens = [b"a", b"<|mask|>", b"c", b"d", b"e", b"f", b"g", b"h", b"<pad>", b"<end>", b"[MASK]"]
    vocabulary = SimpleNamespace(tokens=tokens, n_tokens=len(tokens), mask_id=7, pad_id=8, eos_id=8)
    target = SimpleNamespace(n_layers=n_layers, rope_theta=1e7)
    caches = {"kv_type_k": kv_type, "kv_type_draft_v": "f32"}
    found = list_trials(drafter(**changes), target, vocabulary, LLAMA_CPP, caches)
    return {trial.name: trial for trial in found}


def test_layers_are_moved_in_the_files_own_numbering():
    """What is stored is the number of the layer whose input is read: one more than the layer we name."""
    later = trials_of()["features one layer later"]
    assert later.settings == {"target_layer_ids": (2, 6)} and "[3, 7] to 'dflash.target_layers'" in later.remedy


def test_only_what_the_pair_allows_is_tried():
    """No layer outside the target, no mask the drafter's tables lack, nothing that is the case already."""
    names = list(trials_of(n_layers=6, target_layer_ids=(0, 5)))
    assert names == [
        "as the file says",
        "mask token 1 (<|mask|>)",
        "mask token 8 (<pad>)",
        "rope base 1e+07",
        "rope base 10000",
        "tokens of a block see earlier ones only",
    ]


def test_optional_features_are_tried_without():
    """Rope scaling, windows, a causal block, narrow caches."""
    found = trials_of(kv_type="f16", causal=True, sliding_window=9)
    scaled = trials_of(rope_scaling=SimpleNamespace(factor=4.0))

    assert found["no sliding window"].settings == {"sliding_window": 0, "sliding_layers": ()}
    assert found["tokens of a block see each other"].settings == {"causal": False}
    assert found["all caches f32"].loading == {"kv_type_k": "f32", "kv_type_draft_v": "f32"}
    assert scaled["no rope scaling"].settings == {"rope_scaling": None}


def rounds(accepted: list[int], *, n_context: int = 50, n_offered: int = 3) -> list[DraftedRound]:
    """Rounds of one length."""
    return [DraftedRound(n_context + i, n_offered, n) for i, n in enumerate(accepted)]


def test_summary():
    """A depth's share is of the rounds that offered it."""
    found = summarise([DraftedRound(1, 3, 3), DraftedRound(2, 3, 0), DraftedRound(3, 1, 1)])

    assert found["rounds"] == 3 and found["mean_accepted"] == pytest.approx(4 / 3, abs=1e-4)
    assert found["accepted_share_per_depth"] == [0.6667, 0.5, 0.5]
    assert summarise([]) == {"rounds": 0, "mean_accepted": 0.0, "standard_error": 0.0, "accepted_share_per_depth": []}


def verdicts(*rows: tuple[str, list[int]]) -> str:
    """Findings about trials, the first of which is the file's own settings."""
    trials = [
        (Trial(kind, f"trial {i}", remedy=f"remedy {i}"), summarise(rounds(a))) for i, (kind, a) in enumerate(rows)
    ]
    return "\n".join(find_remedies(trials))


def test_the_best_trial_of_a_kind_is_recommended():
    """Clear differences only: chance and small gains are no advice."""
    base, same, good, best = [0, 1] * 30, [1, 0] * 29 + [1, 1], [1, 2] * 30, [2, 3] * 30
    text = verdicts(("base", base), ("mask", good), ("mask", best), ("rope", same), ("layers", best))

    assert "remedy 2" in text and "remedy 4" in text and "2.50 tokens a round are accepted instead of 0.50" in text
    assert "remedy 1" not in text and "remedy 3" not in text


def test_the_likelier_of_two_equals_is_recommended():
    """The vocabulary's own mask comes first, and its padding may serve as well by chance."""
    base, mask, padding = [0, 1] * 30, [2, 3] * 30, [3, 2] * 29 + [3, 3]

    text = verdicts(("base", base), ("mask", mask), ("mask", padding))

    assert "remedy 1" in text and "remedy 2" not in text


def test_nothing_better():
    """Said, and also when features seem not to matter or too little was drafted to tell."""
    base = [0, 1] * 30
    assert (
        verdicts(("base", base), ("mask", [0] * 60))
        == "no setting that was tried does clearly better than what the file says"
    )
    assert "about as well" in verdicts(("base", base), ("layers", base), ("layers", base))
    assert verdicts(("base", [0] * 29), ("mask", [3] * 29)).startswith("only 29 rounds were drafted")


@pytest.mark.parametrize(
    ("curve", "texts"),
    [
        ([], ["nothing was drafted"]),
        ([0.8, 0.6, 0.5], []),
        ([0.2, 0.1, 0.05], ["only 20% of rounds", "--draft-max 2"]),
        ([0.9, 0.2, 0.15], ["from depth 1 to 2 acceptance falls to 22%"]),
        ([0.05], ["only 5% of rounds"]),
        ([0.0, 0.0, 0.0], ["only 0% of rounds"]),
    ],
)
def test_curves(curve: list[float], texts: list[str]):
    """A poor first token, a cliff, and depths that are hardly ever reached."""
    found = list(read_curve(curve))
    assert len(found) == len(texts) and all(text in line for text, line in zip(texts, found, strict=True))


def test_contexts():
    """Long contexts that are drafted worse, and those beyond the training length."""
    worse = rounds([2, 3] * 30 + [0, 1] * 30)
    assert "behind more than 110 tokens 0.50 a round are accepted, before that 2.50" in next(
        read_contexts(worse, drafter())
    )
    assert "contexts reach 169 tokens, the drafter was made for 100" in list(read_contexts(worse, drafter()))[1]
    assert list(read_contexts(rounds([1, 2] * 60), drafter(n_ctx_train=0))) == []


def test_files():
    """Narrow weights, a reduced vocabulary, a thinking template."""
    plain, thinking = SimpleNamespace(chat_template=None), SimpleNamespace(chat_template="{{ '<think>' }}")
    assert list(read_files(drafter(), 8.5, ["q8_0"], plain)) == []
    found = list(read_files(drafter(has_reduced_vocabulary=True, n_vocab=4), 4.5, ["q4_0"], thinking))
    assert "4.5 bits a weight (q4_0)" in found[0] and "4 of 10 tokens (40%)" in found[1] and "thinking" in found[2]
