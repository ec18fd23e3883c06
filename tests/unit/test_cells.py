"""Cells and their holders: none is taken twice, none is lost, whatever the order."""

from __future__ import annotations

import gc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml_spec.errors import ContextLimitError
from pyggml_spec.state.cells import CellHold, CellPool


def test_the_lowest_free_cells_are_taken():
    """In order, so that a cache stays dense."""
    pool = CellPool(3000)
    first, second = pool.take(2500), pool.take(3)

    assert (first, second) == (list(range(2500)), [2500, 2501, 2502])
    pool.give_back([7, 2400, 3])
    assert pool.take(4) == [3, 7, 2400, 2503]
    assert pool.take(0) == []


def test_a_full_pool_names_the_numbers():
    """And takes nothing."""
    pool = CellPool(10)
    pool.take(8)
    with pytest.raises(ContextLimitError, match="3 cells are needed and 2 are free"):
        pool.take(3)
    assert pool.n_free == 2


def test_a_shared_cell_is_free_when_the_last_holder_lets_go():
    """Whichever comes last."""
    pool = CellPool(4)
    cells = pool.take(2)
    pool.share(cells)
    hold = CellHold(pool, cells)
    pool.give_back(cells)
    assert pool.n_free == 2
    hold.release()
    hold.release()
    assert pool.n_free == 4


def test_reclaim_is_asked_until_it_suffices_or_has_nothing_left():
    """Holds are given up one by one, no more of them than needed."""
    pool = CellPool(10)
    holds = [CellHold(pool, pool.take(3)) for _ in range(3)]

    def give_up() -> bool:
        if not holds:
            return False
        holds.pop(0).release()
        return True

    pool.reclaim = give_up
    assert pool.take(4) == [0, 1, 2, 9] and len(holds) == 2
    with pytest.raises(ContextLimitError, match="7 cells are needed and 6 are free"):
        pool.take(7)
    assert not holds


def test_recounting_finds_what_nobody_holds():
    """Cells of an object that is gone, or that were taken and never noted, come back."""
    pool = CellPool(20)
    kept, dropped = CellHold(pool, pool.take(4)), CellHold(pool, pool.take(4))
    pool.take(4)
    del dropped
    gc.collect()
    pool.recount()

    assert pool.n_free == 16
    assert pool.take(3) == [4, 5, 6] and kept.held().tolist() == [0, 1, 2, 3]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 9)), max_size=60))
def test_counts_are_those_of_the_holders(steps: list[tuple[str, int]]):
    """Random scripts against a plain model; a recount changes nothing when nothing was lost."""
    pool, holds = CellPool(40), []
    for step, n in steps:
        if step == "take" and n <= pool.n_free:
            holds.append(CellHold(pool, pool.take(n)))
        elif step == "share" and holds:
            cells = holds[n % len(holds)].cells
            pool.share(cells)
            holds.append(CellHold(pool, cells))
        elif step == "release" and holds:
            holds.pop(n % len(holds)).release()
    counts = Counter(cell for hold in holds for cell in hold.held().tolist())

    assert pool._n_holders.tolist() == [counts[cell] for cell in range(40)]
    before = pool._n_holders.copy()
    pool.recount()
    assert np.array_equal(pool._n_holders, before)
