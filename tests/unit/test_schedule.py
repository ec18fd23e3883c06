"""Heavy-light visiting order: what it is on small trees, and its log-depth bound on any tree."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from reference.trees import parent_lists

from pyggml_spec.errors import OptionError, ShapeError
from pyggml_spec.tree.schedule import Schedule, chain_schedule, check_schedule, encode_schedule, schedule_tree


def rows_of(schedule: Schedule) -> list[tuple[int, ...]]:
    return [tuple(row) for row in schedule.words.tolist()]


def test_chain_needs_no_level() -> None:
    schedule = schedule_tree([-1, 0, 1, 2])
    assert rows_of(schedule) == [(0, -1, -1, -1), (1, 0, -1, -1), (2, 1, -1, -1), (3, 2, -1, -1)]
    assert schedule.n_levels == 0


def test_heavy_child_comes_last_and_frees_the_level() -> None:
    #  0 - 1 - 3 - 4      the subtree of 1 is heavier than the leaf 2
    #   \ 2
    schedule = schedule_tree([-1, 0, 0, 1, 3])
    assert rows_of(schedule) == [(0, -1, -1, 0), (2, 0, -1, -1), (1, 0, 0, -1), (3, 1, -1, -1), (4, 3, -1, -1)]
    assert schedule.n_levels == 1


def test_equal_subtrees_keep_topological_order() -> None:
    assert schedule_tree([-1, 0, 0, 0]).order.tolist() == [0, 1, 2, 3]


def test_nested_branches_stack_their_levels() -> None:
    schedule = schedule_tree([-1, 0, 0, 1, 1, 2, 2])  # complete binary tree of 7
    assert schedule.n_levels == 2
    assert schedule.order.tolist() == [0, 1, 3, 4, 2, 5, 6]
    assert schedule.save_levels.tolist() == [0, 1, -1, -1, 0, -1, -1]
    assert schedule.restore_levels.tolist() == [-1, -1, -1, 1, 0, -1, 0]


@given(parent_lists())
def test_every_visit_starts_from_its_parent_within_log_depth(parents: list[int]) -> None:
    schedule = schedule_tree(np.array(parents, dtype=np.int32))
    check_schedule(schedule)
    assert sorted(schedule.order.tolist()) == list(range(len(parents)))
    assert schedule.n_levels <= math.floor(math.log2(len(parents))) + 1


@given(parent_lists(max_nodes=24))
def test_lists_and_arrays_give_the_same_schedule(parents: list[int]) -> None:
    assert rows_of(schedule_tree(parents)) == rows_of(schedule_tree(np.array(parents)))


@pytest.mark.parametrize("parents", [[], [0], [-1, 1], [-1, 0, -1], [-1, 0, 3, 2], [-1, -2]])
def test_parents_that_are_no_tree_are_refused(parents: list[int]) -> None:
    with pytest.raises(OptionError, match=r"parents"):
        schedule_tree(parents)


@pytest.mark.parametrize(
    ("rows", "n_levels", "complaint"),
    [
        ([(0, -1, -1, -1), (0, 0, -1, -1)], 0, "visits node 0"),
        ([(0, -1, -1, -1), (2, 0, -1, -1)], 0, "visits node 2"),
        ([(0, -1, -1, -1), (1, 0, 0, -1)], 1, "before anything saved it"),
        ([(0, -1, -1, -1), (1, 0, -1, -1), (2, 0, -1, -1)], 0, "starts node 2 from node 1"),
        ([(0, -1, -1, 0), (1, 0, -1, -1)], 0, "level 0 of 0"),
        ([(0, -1, -1, -1)], 5, "5 levels"),
        ([(1, 0, -1, -1), (0, -1, -1, -1)], 0, "starts node 1 from node -1"),
    ],
)
def test_a_schedule_the_kernels_cannot_trust_is_refused(
    rows: list[tuple[int, int, int, int]], n_levels: int, complaint: str
) -> None:
    with pytest.raises(ShapeError, match=complaint):
        check_schedule(Schedule(np.array(rows, dtype=np.int32), n_levels))


def test_encoding_places_header_nodes_and_pending_rows() -> None:
    out = np.full(8 + 4 * 4 + 8, 77, dtype=np.int32)
    schedule = schedule_tree([-1, 0, 0])
    encode_schedule(
        out, schedule=schedule, n_columns=4, pending_rows=[0, 2], pending_bank=3, write_bank=2, state_slot=1, fold=False
    )
    assert out[:8].tolist() == [1, 3, 2, 3, 2, 1, 1, 0]
    assert out[8:20].reshape(3, 4).tolist() == schedule.words.tolist()
    assert out[24:26].tolist() == [0, 2]
    assert out[26:].tolist() == [77] * 6  # beyond the pending rows nothing is touched


def test_a_flush_has_no_nodes() -> None:
    out = np.zeros(8 + 4 + 2, dtype=np.int32)
    encode_schedule(out, schedule=None, n_columns=1, pending_rows=[1], pending_bank=0, write_bank=1, state_slot=0)
    assert out.tolist() == [1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize(("n_columns", "capacity", "complaint"), [(2, 64, "3 nodes"), (3, 21, "21 words")])
def test_encoding_refuses_what_does_not_fit(n_columns: int, capacity: int, complaint: str) -> None:
    with pytest.raises(ShapeError, match=complaint):
        encode_schedule(
            np.zeros(capacity, dtype=np.int32),
            schedule=chain_schedule(3),
            n_columns=n_columns,
            pending_rows=[0, 1],
            pending_bank=0,
            write_bank=1,
            state_slot=0,
        )
