"""The geometry of checkpoints: flat ranges of boxes cut into boxes of the global tensor."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.pieces import ParameterPiece, inside, numel_of, overlap, split, whole

shapes = st.lists(st.integers(1, 4), min_size=0, max_size=4)


@given(shapes, st.data())
def test_a_flat_range_is_cut_into_boxes_that_hold_it_in_order(shape: list[int], data: st.DataObject) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    numbers = np.arange(total).reshape(shape)
    boxes = list(split(shape, start, stop))
    found = [numbers[tuple(slice(*side) for side in box)].ravel() for box in boxes]
    assert np.concatenate([*found, np.empty(0, int)]).tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(st.data())
def test_a_piece_of_a_region_names_the_global_elements_it_holds(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    region = tuple(data.draw(st.integers(0, n - 1).flatmap(lambda a, n=n: st.tuples(st.just(a), st.integers(a + 1, n)))) for n in shape)
    held = np.arange(math.prod(shape)).reshape(shape)[tuple(slice(*side) for side in region)].ravel()
    offset = data.draw(st.integers(0, len(held)))
    numel = data.draw(st.integers(0, len(held) - offset))
    piece = ParameterPiece("p", tuple(shape), region, offset, numel)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    found, end = [], 0
    for position, box in piece.runs():
        assert position == end
        found += numbers[tuple(slice(*side) for side in box)].ravel().tolist()
        end += numel_of(box)
    assert found == held[offset : offset + numel].tolist()


boxes = st.tuples(*(st.tuples(st.integers(0, 3), st.integers(4, 6)) for _ in range(2)))


@given(boxes, st.tuples(*(st.tuples(st.integers(0, 5), st.integers(1, 6)) for _ in range(2))))
def test_the_overlap_of_two_boxes_is_what_both_hold(a: tuple[tuple[int, int], ...], b: tuple[tuple[int, int], ...]) -> None:
    grid = np.zeros((6, 6), int)
    for box in (a, b):
        grid[tuple(slice(*side) for side in box)] += 1
    common = overlap(a, b)
    assert (grid == 2).sum() == (0 if common is None else numel_of(common))
    if common is not None:
        part = np.zeros([stop - start for start, stop in a], int)
        part[inside(common, a)] = 1
        assert part.sum() == numel_of(common)


def test_a_whole_parameter_is_one_box() -> None:
    assert whole("w", (3, 4)).runs() == [(0, ((0, 3), (0, 4)))]
