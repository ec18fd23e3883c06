"""Exact mode: what is generated depends on the tokens alone, also where products add up differently by width.

On a CPU the products of most types do not (the tests below say which); q3_k is one that has one kernel for few columns
and another for many, so it gives these tests their teeth. On a GPU those of every type do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from pyggml_spec import Engine, assets
from pyggml_spec.cli import main
from pyggml_spec.decode.exact import find_exact_widths
from pyggml_spec.decode.parity import compare_with_plain
from pyggml_spec.decode.protocols import Posterior
from pyggml_spec.decode.round import SpecOptions
from pyggml_spec.decode.target_sequence import NativeTargetSequence
from pyggml_spec.errors import DeviceError
from pyggml_spec.tree.build import TreeOptions
from pyggml_spec.tree.draft_tree import DraftTree

from .conftest import DATA, load

pytestmark = pytest.mark.native

SOURCE = DATA / "minnow-f16.gguf"
Q4_K_M = DATA / "minnow-q4_k_m.gguf"
DRAFTER = assets.embedded_drafter_path()
EVERY_WIDTH = (1, 2, 4, 8, 12, 16, 24, 32)
CHAIN, TREE, OFF = SpecOptions("chain"), SpecOptions("tree", tree=TreeOptions(budget=22)), SpecOptions("off")


def in_type(name: str, folder: Path) -> Path:
    """The target with all matrices in one type."""
    file = folder / f"minnow-{name}.gguf"
    result = CliRunner().invoke(main, ["quantize", str(SOURCE), str(file), name, "-t", "1"])
    assert result.exit_code == 0, result.output
    return file


@pytest.fixture(scope="module")
def q3_k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target in q3_k."""
    return in_type("q3_k", tmp_path_factory.mktemp("q3_k"))


@pytest.fixture(scope="module", params=["q3_k", "q4_k_m"])
def exact(request: pytest.FixtureRequest, q3_k: Path) -> Iterator[Engine]:
    """An exact engine on either file."""
    with load(q3_k if request.param == "q3_k" else Q4_K_M, DRAFTER, n_ctx=512, exact=True) as engine:
        yield engine


def generate(engine: Engine, prompt: str, options: SpecOptions, n_tokens: int) -> tuple[list[int], list[str]]:
    """Greedy tokens, and the recurrent state behind them."""
    session = engine.open_session()
    try:
        for _ in session.generate(engine.tokenizer.encode(prompt), spec=options, max_tokens=n_tokens):
            pass
        return session.tokens, session.target.state_hashes()
    finally:
        session.close()


@pytest.mark.parametrize("file", [assets.embedded_target_path(), Q4_K_M], ids=["q8_0", "q4_k_m"])
def test_forty_prompts(file: Path, prompts: list[str], device: str) -> None:
    """The text of chains and trees is that of plain decoding, with f16 caches: all 40 prompts x 256 tokens on a GPU,
    where nothing promises it without exact mode; a few on a CPU, where the other tests have many."""
    chosen, n_tokens = (prompts[::8], 48) if device == "CPU" else (prompts, 256)
    caches = dict.fromkeys(("kv_type_k", "kv_type_v", "kv_type_draft_k", "kv_type_draft_v"), "f16")
    different, n_tokens_a_round = [], []
    with load(file, DRAFTER, device=device, exact=True, **caches) as engine:
        for prompt in chosen:
            runs = {
                mode: engine.generate(prompt, max_tokens=n_tokens, ignore_eos=True, spec=mode)
                for mode in ("off", "chain", "tree")
            }
            wanted = runs.pop("off").tokens
            assert len(wanted) == n_tokens
            n_tokens_a_round += [run.stats["acceptance_length"] for run in runs.values()]
            different += [
                f"{mode} from token {np.not_equal(run.tokens, wanted).argmax()}: {prompt!r}"
                for mode, run in runs.items()
                if run.tokens != wanted
            ]

    assert not different, f"{len(different)} of {2 * len(chosen)} runs: {different}"
    assert np.mean(n_tokens_a_round) > 2


@pytest.mark.parametrize("options", [CHAIN, TREE, SpecOptions("tree", tree=TreeOptions(budget=3))], ids=str)
def test_speculation_changes_no_bit(exact: Engine, prompts: list[str], options: SpecOptions) -> None:
    """Tokens and recurrent state after speculating equal those after plain decoding."""
    for prompt in prompts[::10]:
        assert generate(exact, prompt, options, 80) == generate(exact, prompt, OFF, 80), prompt


def test_the_default_mode_does_change_bits(q3_k: Path, prompts: list[str]) -> None:
    """What exact mode is for: without it the same tokens leave another state where products depend on the width."""
    with load(q3_k, DRAFTER, n_ctx=256) as engine:
        if 1 in find_exact_widths(engine.target):
            pytest.skip("on this CPU products of this type do not depend on the width")
        plain, chain = (generate(engine, prompts[0], options, 32) for options in (OFF, CHAIN))

    assert plain[1] != chain[1]


def test_parity_of_two_runs(exact: Engine, prompts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal runs tell their closest decision; a verify that errs is found at its token, with both gaps."""
    ids = exact.tokenizer.encode(prompts[1])
    parity = compare_with_plain(exact, ids, CHAIN, max_tokens=24)
    assert parity.is_equal
    assert parity.n_tokens == 24
    assert 0 < parity.smallest_gap < 20

    honest = NativeTargetSequence.verify

    def erring(self: NativeTargetSequence, tree: DraftTree, **options: Any) -> Posterior:
        found = honest(self, tree, **options)
        if tree.n_nodes == 1 or self.length <= len(ids) + 8:
            return found
        logits = found.logits.copy()
        logits[:, 77] = logits.max() + 0.5
        return Posterior(np.full(tree.n_nodes, 77, np.int32), logits)

    monkeypatch.setattr(NativeTargetSequence, "verify", erring)
    parity = compare_with_plain(exact, ids, CHAIN, max_tokens=24)
    assert 8 < parity.first_divergence < 24
    assert parity.speculative_id == 77 != parity.plain_id
    assert parity.speculative_gap >= 0.5
    assert not parity.is_within(0.4)


def test_only_exact_widths_are_run(exact: Engine, prompts: list[str]) -> None:
    """Plain rounds are padded too, and prompts are read by the same graphs."""
    generate(exact, prompts[0], OFF, 4)
    widths = {width for _, width, head, _ in exact.target._graphs if head == "top"}

    assert widths
    assert widths <= set(exact.target.exact_widths)
    assert not any(head == "none" for _, _, head, _ in exact.target._graphs)


def test_prompt_reading_equals_decoding(exact: Engine) -> None:
    """Tokens read in chunks leave the state that the same tokens leave one by one: a rebuilt session is the same."""
    ids = [int(i) for i in np.random.default_rng(3).integers(5, 8000, size=75)]
    session = exact.open_session()
    sequence = session.target
    sequence.prefill(ids)
    wanted = sequence.state_hashes()
    sequence.reset()
    for token_id in ids:
        sequence.verify(DraftTree.root(token_id))
        sequence.accept([0])
    found = sequence.state_hashes()
    session.close()

    assert found == wanted


@pytest.mark.parametrize("max_width", [8, 13])
def test_narrow_engines_agree_among_themselves(q3_k: Path, prompts: list[str], max_width: int) -> None:
    """`max_width` bounds the cost: everything is padded to it at most."""
    with load(q3_k, DRAFTER, n_ctx=256, exact=True, max_width=max_width) as engine:
        assert engine.target.exact_widths[-1] == max_width
        assert generate(engine, prompts[3], CHAIN, 64) == generate(engine, prompts[3], OFF, 64)


@pytest.mark.parametrize("name", ["f32", "f16", "q8_0", "q6_k", "q5_k", "q4_k", "q4_k_m"])
def test_cpu_products_of_these_types_do_not_depend_on_the_width(name: str, tmp_path: Path) -> None:
    """What the default mode promises on a CPU: speculation changes no bit, exact mode pads nothing."""
    with load(in_type(name, tmp_path), None, n_ctx=64) as engine:
        assert find_exact_widths(engine.target) == EVERY_WIDTH


def test_rows_that_depend_on_their_column_are_refused(exact: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device where even equal widths disagree has no exact mode, and says so."""
    honest = NativeTargetSequence.trial

    def skewed(self: NativeTargetSequence, built: Any, tree: DraftTree) -> np.ndarray:
        return honest(self, built, tree) + 1e-3 * np.arange(built.n_columns, dtype=np.float32)[:, None]

    monkeypatch.setattr(NativeTargetSequence, "trial", skewed)
    with pytest.raises(DeviceError, match="at width 32 a row's bits depend on its column"):
        find_exact_widths(exact.target)


def test_a_trial_leaves_nothing_behind(exact: Engine) -> None:
    """The slot is free again, with all of its cells."""
    n_free = exact.target.state.kv.pool.n_free
    find_exact_widths(exact.target)

    assert exact.target.state.kv.pool.n_free == n_free
    exact.open_session().close()


def test_the_command_line_has_the_mode() -> None:
    """`run --exact` prints the same tokens for every way of speculating."""
    files = ["-m", str(Q4_K_M), "-md", str(DRAFTER), "-c", "256", "-t", "1"]
    found = []
    for spec in ("off", "chain", "tree"):
        arguments = ["run", *files, "-p", "import os\n", "-n", "40", "--exact", "--json", "--spec", spec]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout)["tokens"])

    assert found[0] == found[1] == found[2]
