"""What the trials of `bench --drafter-check` mean, in sentences; every rule states the numbers it rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .drafter_trials import LAYERS, DraftedRound, Trial, summarise

if TYPE_CHECKING:
    from ..records import DrafterConfig, Vocabulary

LEAST_ROUNDS = 30  # below that nothing is said of differences
CLEAR_GAIN = 0.15  # of mean accepted tokens, relative; and twice the standard error of the difference
POOR_FIRST_TOKEN = 0.35  # share of rounds
RARE = 0.1  # share of rounds in which a depth must be accepted to be worth its verification
COMMON = 0.3  # share of rounds at a depth for its successor's acceptance to mean something
LOW_BITS = 8.0  # per weight of the drafter's matrices
NOT_CHECKED = (
    "whether the drafter was trained for these very target weights: only shapes and vocabularies were compared",
    "what the drafter loses by its own quantisation: run this check on a less quantised file of it",
    "what the target loses by its quantisation or by a fine-tune",
    "other layers than all of them one earlier or later, and their order",
    "other rope bases, windows, block sizes and mask tokens than those tried",
    "other forms of the prompts: drafters are often trained on the target's answers to chats (--chat), thinking or not",
    "contexts longer than those of these prompts",
)


def find_remedies(trials: Sequence[tuple[Trial, dict[str, Any]]]) -> Iterator[str]:
    """Changes that clearly help: of each kind the first one that none is clearly better than, as they are tried in the
    order of how likely they are; and features that make no difference."""
    base = trials[0][1]
    if base["rounds"] < LEAST_ROUNDS:
        yield f"only {base['rounds']} rounds were drafted: give more or longer prompts (-f, -n) to tell settings apart"
        return
    better = [(trial, row) for trial, row in trials[1:] if is_clearly_better(row, base)]
    for kind in dict.fromkeys(trial.kind for trial, _ in better):
        rivals = [entry for entry in better if entry[0].kind == kind]
        best = max((row for _, row in rivals), key=lambda row: row["mean_accepted"])
        trial, row = next(entry for entry in rivals if not is_clearly_better(best, entry[1]))
        yield (
            f"with {trial.name} {row['mean_accepted']:.2f} tokens a round are accepted instead of "
            f"{base['mean_accepted']:.2f}: {trial.remedy}"
        )
    moved = [row for trial, row in trials if trial.kind == LAYERS]
    if not better and moved and all(_is_alike(row, base) for row in moved):
        yield "features from neighbouring layers do about as well: this cannot tell whether the layer numbers are right"
    if not better:
        yield "no setting that was tried does clearly better than what the file says"


def is_clearly_better(row: dict[str, Any], base: dict[str, Any]) -> bool:
    """Beyond chance and worth a change."""
    gain = row["mean_accepted"] - base["mean_accepted"]
    return gain > CLEAR_GAIN * base["mean_accepted"] and gain > 2 * _error(row, base)


def _is_alike(row: dict[str, Any], base: dict[str, Any]) -> bool:
    return abs(row["mean_accepted"] - base["mean_accepted"]) <= 2 * _error(row, base)


def _error(row: dict[str, Any], base: dict[str, Any]) -> float:
    """Standard error of the difference, as if the rounds were independent (they share a text, so it is a bound)."""
    return float((row["standard_error"] ** 2 + base["standard_error"] ** 2) ** 0.5)


def read_curve(curve: Sequence[float]) -> Iterator[str]:
    """Where along the block the draft goes wrong."""
    if not curve:
        yield "nothing was drafted"
        return
    if curve[0] < POOR_FIRST_TOKEN:
        yield (
            f"the first drafted token is accepted in only {curve[0]:.0%} of rounds: it depends on no other draft "
            "token, so suspect the features, the mask token, the rope base, or a target it was not made for"
        )
    deep = next((depth for depth, share in enumerate(curve, 1) if share < RARE), None)
    if deep is not None and deep > 1:
        yield (
            f"depth {deep} is reached in {curve[deep - 1]:.0%} of rounds: --draft-max {deep - 1} spares verifying what "
            "lies deeper"
        )
    steps = [(curve[depth - 1], curve[depth - 2], depth) for depth in range(2, len(curve) + 1)]
    steepest = min(((after / before, depth) for after, before, depth in steps if before >= COMMON), default=None)
    if steepest is not None and curve[0] >= POOR_FIRST_TOKEN and steepest[0] < 0.5 * curve[0]:
        yield (
            f"from depth {steepest[1] - 1} to {steepest[1]} acceptance falls to {steepest[0]:.0%} of what it was, "
            f"while the first token has {curve[0]:.0%}: the block's own attention or heads are worth a look"
        )


def read_contexts(rounds: Sequence[DraftedRound], drafter: DrafterConfig) -> Iterator[str]:
    """Whether long contexts are drafted worse than short ones."""
    if len(rounds) < 2 * LEAST_ROUNDS:
        return
    ordered = sorted(rounds, key=lambda each: each.n_context)
    half = len(ordered) // 2
    short, long = summarise(ordered[:half]), summarise(ordered[half:])
    if is_clearly_better(short, long):
        yield (
            f"behind more than {ordered[half].n_context} tokens {long['mean_accepted']:.2f} a round are accepted, "
            f"before that {short['mean_accepted']:.2f}: check the drafter's rope base and scaling, its window and the "
            "length it was trained for"
        )
    if drafter.n_ctx_train and ordered[-1].n_context > drafter.n_ctx_train:
        yield f"contexts reach {ordered[-1].n_context} tokens, the drafter was made for {drafter.n_ctx_train}"


def read_files(drafter: DrafterConfig, bits: float, types: Sequence[str], vocabulary: Vocabulary) -> Iterator[str]:
    """What the files themselves give away."""
    if bits < LOW_BITS:
        yield (
            f"the drafter's matrices take {bits:.1f} bits a weight ({', '.join(types)}): a drafter is small, q8_0 "
            "costs little and accepts more"
        )
    if drafter.has_reduced_vocabulary:
        share = drafter.n_vocab / max(drafter.n_vocab_target, 1)
        yield f"the drafter can only propose {drafter.n_vocab} of {drafter.n_vocab_target} tokens ({share:.0%})"
    if "think" in (vocabulary.chat_template or ""):
        yield "the target's template knows thinking: compare with --chat, the drafter may be trained on that form only"
