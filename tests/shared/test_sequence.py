"""Which positions ranks hold: every position once, and of attention an equal share."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.shared.parallel.sequence import part, with_rows, zigzag

CASES = st.tuples(st.integers(1, 9), st.integers(1, 5))


@given(CASES)
def test_context_ranks_hold_every_position_once_and_as_many_as_each_other(case: tuple[int, int]) -> None:
    degree, piece = case
    length = 2 * degree * piece
    held = [[i for run in zigzag(length, degree, index) for i in run] for index in range(degree)]
    assert sorted(itertools.chain(*held)) == [*range(length)] and {len(one) for one in held} == {2 * piece}
    assert all(one == sorted(one) for one in held)


@given(CASES)
def test_context_ranks_have_equal_work_where_one_piece_each_would_not(case: tuple[int, int]) -> None:
    """A query at position i sees i + 1 keys."""
    degree, piece = case
    length = 2 * degree * piece
    work = [sum(i + 1 for run in zigzag(length, degree, index) for i in run) for index in range(degree)]
    assert len(set(work)) == 1
    contiguous = [sum(range(length // degree * index + 1, length // degree * (index + 1) + 1)) for index in range(degree)]
    assert max(contiguous) > work[0] or degree == 1


@given(CASES, st.integers(1, 4))
def test_parts_of_a_tensors_rows_are_its_positions_in_order(case: tuple[int, int], parts: int) -> None:
    degree, piece = case
    for index in range(degree):
        whole = zigzag(2 * degree * piece * parts, degree, index)
        cut = [i for number in range(parts) for run in part(whole, parts, number) for i in run]
        assert cut == [i for run in whole for i in run]
        assert [rows.stop - rows.start for rows, _ in with_rows(whole)] == [len(run) for run in whole]


def test_a_length_that_pieces_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="2 context ranks need sequences of a multiple of 4, not 6"):
        zigzag(6, 2, 0)
