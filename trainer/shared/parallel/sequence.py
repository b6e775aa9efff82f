"""Which positions of a sequence a rank holds, or computes at a time: a few ranges. Pure numbers.

Context ranks hold two pieces each, one as far from the start as the other is from the end (zig-zag). A query sees the keys before it, so
two such pieces are equal work on every rank; one piece each would give the last rank almost twice the mean. Within a context rank's part,
sequence parallelism cuts equal contiguous parts.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

Runs = tuple[range, ...]
"""Ranges of positions, ascending: the rows of a tensor, one after the other."""


def zigzag(length: int, degree: int, index: int) -> Runs:
    """Returns the positions of context rank ``index`` of ``degree``, for sequences of ``length``. ``ValueError`` if 2 x degree does not
    divide that."""
    if degree == 1:
        return (range(length),)
    width, rest = divmod(length, 2 * degree)
    if rest:
        raise ValueError(f"{degree} context ranks need sequences of a multiple of {2 * degree}, not {length}")
    first, last = width * index, length - width * (index + 1)
    return range(first, first + width), range(last, last + width)  # never joined: equal work even where a kernel skips no hidden keys


def part(runs: Runs, parts: int, index: int) -> Runs:
    """Returns the positions of one of so many equal parts of a tensor's rows; rows behind the last part belong to none."""
    width = sum(map(len, runs)) // parts
    start, stop = width * index, width * (index + 1)
    cut = (run[max(start - rows.start, 0) : max(stop - rows.start, 0)] for rows, run in with_rows(runs))
    return tuple(run for run in cut if run)


def equal_work(length: int, count: int, unit: int, work: Callable[[int], float]) -> Runs:
    """Returns ``count`` slices of sequences of ``length``, as equal in work as slices of multiples of ``unit`` can be.

    ``work`` of so many first positions grows with them. Queries see all keys before them, so that later slices are shorter. ``ValueError``
    if there are fewer units than slices, or the unit does not divide ``length``.
    """
    units, rest = divmod(length, unit)
    if rest or units < count:
        raise ValueError(f"{length} positions are not {count} slices of multiples of {unit}")
    whole, ends = work(length), [0]
    for number in range(1, count):
        wanted = whole * number / count
        above = bisect_left(range(units), wanted, lo=1, key=lambda n: work(unit * n))
        nearest = above - (2 * wanted < work(unit * above) + work(unit * (above - 1)))
        ends.append(min(max(nearest, ends[-1] + 1), units - (count - number)))
    return consecutive([unit * (end - start) for start, end in itertools.pairwise([*ends, units])])


def consecutive(lengths: Sequence[int]) -> Runs:
    """Returns ranges of these lengths, one behind the other, from 0."""
    ends = [0, *itertools.accumulate(lengths)]
    return tuple(itertools.starmap(range, itertools.pairwise(ends)))


def with_rows(runs: Runs) -> Iterator[tuple[slice, range]]:
    """Yields each run behind the rows of the tensor that it describes."""
    before = 0
    for run in runs:
        yield slice(before, before + len(run)), run
        before += len(run)
