"""Maps slices of training state to the global tensors: the geometry that makes a checkpoint independent of its layout.

A rank holds a box of a parameter (its region) and, of that box flattened, a range of elements. This range is split into boxes of the
*global* tensor; a reader copies the overlaps of its own boxes with the stored ones. Pure numbers, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""Start and stop per dimension."""


@dataclass(frozen=True, slots=True)
class ParameterPiece:
    """Elements ``offset`` to ``offset + numel`` of the flattened ``region`` of a parameter of global ``shape``."""

    name: str
    shape: tuple[int, ...]
    region: Box
    offset: int
    numel: int

    def runs(self) -> list[tuple[int, Box]]:
        """The piece as boxes of the global tensor, each with its position in the piece; each is contiguous in the piece."""
        runs, position = [], 0
        sides = [stop - start for start, stop in self.region]
        for box in split(sides, self.offset, self.offset + self.numel):
            runs.append((position, tuple((low + start, high + start) for (low, high), (start, _) in zip(box, self.region))))
            position += numel_of(box)
        return runs


def whole(name: str, shape: Sequence[int]) -> ParameterPiece:
    return ParameterPiece(name, tuple(shape), tuple((0, n) for n in shape), 0, math.prod(shape))


def numel_of(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def split(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cuts elements ``start`` to ``stop`` of a row-major tensor of ``shape`` into boxes, in order: a part of the first row, whole rows, a
    part of the last, recursively; at most 2 x dimensions - 1."""
    if start >= stop:
        return
    if not shape:
        yield ()
    elif len(shape) == 1:
        yield ((start, stop),)
    else:
        row = math.prod(shape[1:])
        first, last = math.ceil(start / row), stop // row
        if first > last:
            yield from _in_row(shape, last, start - last * row, stop - last * row)
            return
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row if start % row else 0)
        if first < last:
            yield ((first, last), *((0, n) for n in shape[1:]))
        yield from _in_row(shape, last, 0, stop - last * row)


def overlap(a: Box, b: Box) -> Box | None:
    common = tuple((max(low, start), min(high, stop)) for (low, high), (start, stop) in zip(a, b))
    return None if any(start >= stop for start, stop in common) else common


def inside(common: Box, box: Box) -> tuple[slice, ...]:
    """Returns the slices of ``common`` in a tensor that holds ``box``."""
    return tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(common, box))


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in split(shape[1:], start, stop):
        yield ((row, row + 1), *box)
