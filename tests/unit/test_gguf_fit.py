"""Drafter and target compared: what fits passes, and a mismatch lists both sides."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gguf_samples import DRAFTER, TARGET

from pyggml_spec.errors import ModelFileError
from pyggml_spec.gguf_io import check_drafter_fits, explain_fit
from pyggml_spec.records import DrafterConfig, TargetConfig, Vocabulary

NORMAL, UNUSED = 1, 5


def vocabulary(tokens: list[bytes], types: list[int] | None = None) -> Vocabulary:
    """A vocabulary of these tokens."""
    return Vocabulary(
        file="x.gguf",
        model="gpt2",
        pre_tokenizer="qwen35",
        n_tokens=len(tokens),
        load_tokens=lambda: tokens,
        load_merges=list,
        load_token_types=lambda: types or [NORMAL] * len(tokens),
    )


TOKENS = [b"t%d" % number for number in range(40)]
VOCABULARY = vocabulary(TOKENS)


def failures(
    drafter: DrafterConfig = DRAFTER,
    target: TargetConfig = TARGET,
    drafter_vocabulary: Vocabulary | None = VOCABULARY,
    target_vocabulary: Vocabulary = VOCABULARY,
) -> dict[str, str]:
    """The failed checks; the raised error must name them all."""
    rows = explain_fit(drafter, drafter_vocabulary, target, target_vocabulary)
    failed = {row.check: row.detail for row in rows if not row.ok}
    if failed:
        with pytest.raises(ModelFileError) as caught:
            check_drafter_fits(drafter, drafter_vocabulary, target, target_vocabulary)
        assert all(detail in str(caught.value) for detail in failed.values())
    else:
        check_drafter_fits(drafter, drafter_vocabulary, target, target_vocabulary)
    return failed


def test_a_fitting_pair() -> None:
    """With the same vocabulary, or none in the drafter's file."""
    assert failures() == {}
    assert failures(drafter_vocabulary=None) == {}


def test_hidden_size() -> None:
    """Both widths are named; borrowed embeddings need the same width, own ones do not."""
    assert failures(replace(DRAFTER, n_embd_target=32)) == {
        "hidden size": "drafter reads features of 32 values, target's hidden size is 16"
    }
    assert failures(replace(DRAFTER, n_embd=32)).keys() == {"embeddings"}
    assert failures(replace(DRAFTER, n_embd=32, has_own_embeddings=True)) == {}


def test_layers() -> None:
    """The last layer's output may be read, the one after it not."""
    assert failures(replace(DRAFTER, target_layer_ids=(1, 3))) == {}
    assert "1, 4" in failures(replace(DRAFTER, target_layer_ids=(1, 4)))["target layers"]


def test_mask_token() -> None:
    """The id must have a row in the table it is looked up in."""
    assert "id 40" in failures(replace(DRAFTER, mask_token_id=40))["mask token"]
    assert failures(replace(DRAFTER, mask_token_id=40), replace(TARGET, n_vocab=48)) == {}


def test_padding_is_no_difference() -> None:
    """Either side may have more padding than the other."""
    padding = [b"[PAD40]", b"[PAD41]"]
    padded = vocabulary(TOKENS + padding)
    unused = vocabulary([*TOKENS, b"\xff", b""], [NORMAL] * 40 + [UNUSED] * 2)

    assert failures(target=replace(TARGET, n_vocab=42), target_vocabulary=padded) == {}
    assert failures(drafter_vocabulary=padded) == {}
    assert failures(target=replace(TARGET, n_vocab=42), drafter_vocabulary=unused, target_vocabulary=padded) == {}


def test_the_first_other_token_is_named() -> None:
    """Vocabularies of one size but other texts are told apart."""
    other = [*TOKENS]
    other[7], other[9] = b"x", b"y"
    assert failures(drafter_vocabulary=vocabulary(other)) == {
        "vocabulary": "token 7 is 'x' to the drafter but 't7' to the target"
    }


def test_an_additional_token_is_named() -> None:
    """A real token beyond the other side's end is no padding."""
    longer = vocabulary([*TOKENS, b"new"])
    assert failures(drafter_vocabulary=longer) == {"vocabulary": "only the drafter has token 40, 'new'"}
    failed = failures(target=replace(TARGET, n_vocab=41), target_vocabulary=longer)
    assert failed["vocabulary"] == "only the target has token 40, 'new'"
    assert "40 ids, target uses 41 of 41" in failed["vocabulary size"]


def test_everything_at_once() -> None:
    """One error lists all failed checks."""
    drafter = replace(DRAFTER, n_embd_target=8, target_layer_ids=(9,), mask_token_id=99, n_vocab_target=10)
    assert failures(drafter).keys() == {"hidden size", "target layers", "mask token", "vocabulary size"}
