"""Our extension beside other packages that carry a ggml of another version."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml_spec.assets import embedded_target_path

pytestmark = pytest.mark.native
CHILD = Path(__file__).parent / "neighbours.py"


@cache
def computed(order: str) -> list[dict[str, Any]]:
    """Results of two rounds with the packages loaded in some order, in a process of its own."""
    command = [sys.executable, str(CHILD), order, str(embedded_target_path())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-2000:]}"
    return json.loads(done.stdout.strip().splitlines()[-1])


# The packaged ggml comes after the packaged llama.cpp: the other way round these two crash each other, without us.
@pytest.mark.parametrize("order", ["ours,llama,ggml", "llama,ours,ggml", "llama,ggml,ours"])
def test_three_packages_compute_in_one_process(order: str) -> None:
    """Each computes what it computes alone, whoever came first and whatever symbols the others made global."""
    pytest.importorskip("xllamacpp", reason="needs the extra 'llama': a packaged llama.cpp")
    pytest.importorskip("libggml", reason="needs the extra 'llama': a packaged ggml")
    a = np.arange(15).reshape(5, 3) - 7
    b = np.arange(6).reshape(2, 3) - 3
    product = b @ a.T
    alone = computed("llama")[0]["llama"]

    for results in computed(order):
        assert results["ggml"] == product.tolist()
        assert results["ours"] == [product.tolist(), np.argsort(-product)[:, :3].tolist()]
        assert results["llama"] == alone
