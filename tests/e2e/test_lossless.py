"""Speculation changes nothing: the same greedy tokens and the same bits of state as a run that never speculated."""

from __future__ import annotations

from typing import Any

import pytest

from pyggml_spec import Engine, assets
from pyggml_spec.decode.round import SpecOptions
from pyggml_spec.tree.build import TreeOptions

from .conftest import load

pytestmark = pytest.mark.native


def greedy(engine: Engine, prompt: str, **options: Any) -> list[int]:
    """128 greedy tokens."""
    return engine.generate(prompt, **{"max_tokens": 128, "ignore_eos": True, **options}).tokens


@pytest.fixture(scope="module")
def plain(engine: Engine, prompts: list[str]) -> list[list[int]]:
    """Greedy continuations of all prompts without speculation."""
    return [greedy(engine, prompt, spec="off") for prompt in prompts]


def test_chain_drafts_change_no_token(engine: Engine, prompts: list[str], plain: list[list[int]]) -> None:
    """40 prompts x 128 tokens."""
    for prompt, wanted in zip(prompts, plain, strict=True):
        completion = engine.generate(prompt, max_tokens=128, ignore_eos=True, spec="chain")

        assert completion.tokens == wanted, prompt
        assert completion.stats["spec"]["engaged"]


@pytest.mark.parametrize("budget", [1, 2, 12, 15, 16, 22, 64])
def test_tree_drafts_change_no_token(
    engine: Engine, prompts: list[str], plain: list[list[int]], budget: int
) -> None:
    """Six of the prompts for every budget."""
    chosen = range(budget % 7, len(prompts), 7)
    for i in chosen:
        assert greedy(engine, prompts[i], spec="tree", budget=budget) == plain[i], prompts[i]


@pytest.mark.parametrize("n_draft", [1, 2, 3, 4, 5, 6])
def test_short_drafts_change_no_token(
    engine: Engine, prompts: list[str], plain: list[list[int]], n_draft: int
) -> None:
    """Every verify width up to the horizon."""
    for i in range(n_draft, len(prompts), 10):
        assert greedy(engine, prompts[i], spec="chain", draft_max=n_draft) == plain[i], prompts[i]


@pytest.mark.parametrize("spec", ["auto", "chain", "tree"])
@pytest.mark.parametrize("policy", ["cost", "ema"])
def test_policies_change_no_token(
    engine: Engine, prompts: list[str], plain: list[list[int]], spec: str, policy: str
) -> None:
    """However rounds are cut; what a policy learns from one prompt goes into the next."""
    for i in range(len(spec), len(prompts), 7):
        assert greedy(engine, prompts[i], spec=spec, policy=policy) == plain[i], prompts[i]


@pytest.mark.parametrize(("kv_type", "rotates"), [("f16", False), ("q8_0", False), ("q4_0", False), ("q4_0", True)])
def test_smaller_caches_change_no_token(prompts: list[str], kv_type: str, rotates: bool, device: str) -> None:
    """A cell holds the same bits whoever wrote it."""
    options = {"n_ctx": 512, "kv_type_k": kv_type, "kv_type_v": kv_type, "rotate_keys": rotates, "device": device}
    with load(assets.embedded_target_path(), assets.embedded_drafter_path(), **options) as engine:
        for prompt in prompts[::8]:
            assert greedy(engine, prompt, spec="chain") == greedy(engine, prompt, spec="off"), prompt


def test_f32_weights_change_no_token(f32_engine: Engine, prompts: list[str]) -> None:
    """The same at full precision."""
    for prompt in prompts[::5]:
        wanted = greedy(f32_engine, prompt, spec="off")

        assert greedy(f32_engine, prompt, spec="chain") == wanted
        assert greedy(f32_engine, prompt, spec="tree") == wanted


def test_counting_to_twenty(engine: Engine) -> None:
    """The task that drops numbers when rolled-back state leaks (users' reports): equal with and without a drafter."""
    prompt = "# Count from 1 to 20, one number per line.\n" + "".join(f"{i}\n" for i in range(1, 15))
    wanted = greedy(engine, prompt, spec="off")

    assert greedy(engine, prompt, spec="chain") == wanted
    assert greedy(engine, prompt, spec="tree", budget=12) == wanted
    assert "15\n16\n17\n" in engine.tokenizer.decode(wanted)


def state_by_length(engine: Engine, prompt: str, options: SpecOptions, lengths: set[int] | None, n_rounds: int) -> dict:
    """Hashes of every recurrent layer after each round, by committed length; `lengths` = only these."""
    session = engine.open_session()
    hashes: dict[int, list[str]] = {}
    emissions = session.generate(engine.tokenizer.encode(prompt), spec=options, max_tokens=None)
    for n_done, _ in enumerate(emissions, start=1):
        length = session.target.length
        if lengths is None or length in lengths:
            hashes[length] = session.target.state_hashes()
        if n_done == n_rounds or (lengths is not None and length >= max(lengths)):
            break
    emissions.close()
    session.close()
    return hashes


@pytest.mark.parametrize(("budget", "n_rounds"), [(0, 500), (12, 500), (22, 100), (64, 100)])
def test_state_is_bit_equal_after_every_round(engine: Engine, budget: int, n_rounds: int) -> None:
    """State and convolution window of every recurrent layer equal plain decoding's at each length; 0 = chains."""
    options = SpecOptions("tree", tree=TreeOptions(budget=budget)) if budget else SpecOptions("chain")
    prompt = "class Parser:\n    def __init__(self, text):\n"
    speculative = state_by_length(engine, prompt, options, None, n_rounds)
    plain_run = state_by_length(engine, prompt, SpecOptions("off"), set(speculative), n_rounds=10**6)

    assert len(speculative) == n_rounds
    assert plain_run == speculative


def test_pending_rows_survive_without_a_flush(engine: Engine) -> None:
    """The same state when 60 rounds run with nothing but the fold inside each verify."""
    prompt = "def walk(root):\n"
    runs = []
    for mode in ("off", "chain", "tree"):
        session = engine.open_session()
        for _ in session.generate(engine.tokenizer.encode(prompt), spec=SpecOptions(mode), max_tokens=200):
            pass
        runs.append((session.tokens, session.target.state_hashes()))
        session.close()

    assert runs[1] == runs[0]
    assert runs[2] == runs[0]
