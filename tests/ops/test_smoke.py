"""The built extension is the pinned one, fits its declarations, and computes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from native_helpers import Harness, view

from pyggml_spec import _native
from pyggml_spec._native import ffi, flavours, lib, pin

pytestmark = pytest.mark.native
CDEF = Path(__file__).resolve().parents[2] / "pyggml_spec/_native/cdef.h"


def test_version_and_commit_are_the_pinned_ones() -> None:
    """The extension proves what it was built from."""
    assert ffi.string(lib.ggml_version()).decode() == pin.GGML_VERSION
    assert ffi.string(lib.ggml_commit()).decode() == pin.GGML_COMMIT


def test_every_struct_and_enum_fits_the_headers() -> None:
    """cffi compares a type with the compiler's layout when it is first used; here all are used."""
    tags = re.findall(r"^(struct|enum) (\w+)\n\{", CDEF.read_text(), flags=re.MULTILINE)

    for kind, name in tags:
        assert ffi.sizeof(f"{kind} {name}") > 0
    assert {"ggml_tensor", "ggml_init_params", "ggml_threadpool_params"} <= {name for _, name in tags}


def test_every_name_resolves() -> None:
    """Constants are compared with the headers at first use, functions have an address."""
    names = dir(lib)

    assert all(getattr(lib, name) is not None for name in names)
    assert {"ggml_mul_mat", "ggml_spec_top_k", "GGML_SPEC_SCHED_HEADER"} <= set(names)


def test_the_loaded_flavour_is_the_best_usable_one() -> None:
    """The choice that `doctor` shows is the one that was made."""
    usable = [status.name for status in flavours.list_flavours(list(_native.__path__)) if status.why_not is None]

    assert usable and f"_ggml_{usable[0]}" in repr(lib)


def test_a_graph_computes() -> None:
    """A matrix product equals NumPy's exactly on small whole numbers."""
    rng = np.random.default_rng(7)
    weights, columns = (rng.integers(-4, 5, shape).astype(np.float32) for shape in [(5, 32), (3, 32)])
    with Harness() as harness:
        a, b = harness.tensor(32, 5), harness.tensor(32, 3)
        product = lib.ggml_mul_mat(harness.context, a, b)
        harness.finish(product)
        view(a)[:], view(b)[:] = weights, columns
        harness.compute()
        result = view(product).copy()

    assert np.array_equal(result, columns @ weights.T)


def test_the_log_is_kept_and_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """ggml's complaints go to error messages, not to the user's terminal."""
    buffer = lib.ggml_backend_buft_alloc_buffer(lib.ggml_backend_cpu_buffer_type(), 1 << 60)
    text = ffi.new("char[]", 8192)
    n_bytes = lib.pyggml_spec_log_tail(text, 8192)

    assert buffer == ffi.NULL
    assert b"alloc" in ffi.buffer(text, n_bytes)[:]
    assert capfd.readouterr() == ("", "")
