"""Engines on the embedded models and on files derived from them; loaded once a run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import parametrise_devices
from reference.model_files import write_f32_copy, write_f32_drafter

from pyggml_spec import Engine, assets

TESTS = Path(__file__).parents[1]
DATA, GOLDEN = TESTS / "data", TESTS / "golden"
DRAFTERS = {  # one of every kind; tests that mean the default ask `assets` for it
    "dflash": DATA / "minnow-dflash-q8_0.gguf",
    "dspark": DATA / "minnow-dspark-q8_0.gguf",
    "dflash2": assets.embedded_drafter_path(),
}
N_CTX = 1024  # enough for most tests; the caches of an engine stay small


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, Any, Any]:
    """Fixtures open files too."""
    return (yield from skipped_where_a_file_is_missing())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """The test itself."""
    return (yield from skipped_where_a_file_is_missing())


def skipped_where_a_file_is_missing() -> Generator[None, Any, Any]:
    """A failure over a file of tests/data that is not there skips the test on a machine to which not all of them
    travelled (tools/gpu_session.sh says so); everywhere else it stays a failure."""
    try:
        return (yield)
    except Exception as error:
        named = re.findall(r"data/([\w./-]*\w)", str(error)) if "PYGGML_SPEC_FILES_LEFT_AT_HOME" in os.environ else []
        missing = [name for name in named if not (DATA / name).exists()]
        if not missing:
            raise
        pytest.skip(f"file {missing[0]} did not travel")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Engines of this file are loaded once a device."""
    parametrise_devices(metafunc, scope="session")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Name of the device that `engine` and `f32_engine` compute on."""
    return request.param


@pytest.fixture(scope="session")
def golden() -> list[dict[str, Any]]:
    """Reference prompts; each has its arrays (float32) under "arrays", names without the prompt's number."""
    prompts = json.loads((GOLDEN / "golden.json").read_text())["prompts"]
    arrays = np.load(GOLDEN / "golden.npz")
    for i, prompt in enumerate(prompts):
        prompt["arrays"] = {name.rsplit("_", 1)[0]: arrays[name] for name in arrays.files if name.endswith(f"_{i}")}
    return prompts


@pytest.fixture(scope="session")
def f32_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The target and the DFlash drafter with every weight as f32."""
    folder = tmp_path_factory.mktemp("f32")
    target = write_f32_copy(DATA / "minnow-f16.gguf", folder / "minnow-f32.gguf")
    return target, write_f32_drafter(DATA / "minnow-dflash", DRAFTERS["dflash"], folder / "minnow-dflash-f32.gguf")


def load(target: Path, drafter: Path | None, **options: Any) -> Engine:
    """An engine with f32 caches and one thread (two wait for each other where other work runs), or as told.

    Upstream's products on a GPU depend on the width of a call, so there it is exact mode that keeps its promises.
    """
    device = options.get("device", "CPU")
    names = ("kv_type_k", "kv_type_v", *(("kv_type_draft_k", "kv_type_draft_v") if drafter else ()))
    caches = dict.fromkeys(names, "f32")
    defaults = {"n_ctx": N_CTX, "n_threads": 1, "exact": device != "CPU"} | caches
    return Engine.load(target, drafter, **(defaults | options | {"device": device}))


@pytest.fixture(scope="session")
def f32_engine(f32_files: tuple[Path, Path], device: str) -> Iterator[Engine]:
    """Everything in f32, DFlash drafter."""
    with load(*f32_files, device=device) as engine:
        yield engine


@pytest.fixture(scope="session")
def engine(device: str) -> Iterator[Engine]:
    """The embedded pair, q8_0 weights and f32 caches, wide enough for trees of budget 64."""
    options = {"n_ctx": 4096, "max_width": 65, "device": device}
    with load(assets.embedded_target_path(), assets.embedded_drafter_path(), **options) as engine:
        yield engine


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """40 prompts, one a paragraph of the file."""
    return (Path(__file__).parent / "prompts.txt").read_text().split("\n---\n")
