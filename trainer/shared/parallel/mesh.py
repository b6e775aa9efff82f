"""The ranks as a mesh of named axes: which coordinates a rank has, and which ranks form a group.

Axes are data: any number of them, in any order, and one of degree 1 is treated like every other. Ranks are laid out row by row with the
fastest-changing axis first. In the default order tensor ranks are neighbours (one node), context and data ranks come next, pipeline ranks
are farthest apart, because that is the order of how much each axis talks.

The same ranks can be factorised anew (``Mesh.refactor``): sharding factors cut the data axis into levels, and experts fold tensor, context
and data ranks into axes of their own (parallel folding, arXiv 2504.14960).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from trainer.shared.run.schema import LayoutConfig


@dataclass(frozen=True, slots=True)
class Digit:
    """``size`` ranks, ``stride`` apart."""

    size: int
    stride: int


@dataclass(frozen=True)
class Axis:
    """A named axis. Its coordinate is a number in a mixed radix, the first digit changing fastest; most axes have a single digit."""

    name: str
    digits: tuple[Digit, ...]

    @cached_property
    def degree(self) -> int:
        return math.prod(digit.size for digit in self.digits)

    def coordinate(self, rank: int) -> int:
        value, weight = 0, 1
        for digit in self.digits:
            value += rank // digit.stride % digit.size * weight
            weight *= digit.size
        return value

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Returns, for each coordinate, its contribution to the rank."""
        spans = [range(0, digit.size * digit.stride, digit.stride) for digit in reversed(self.digits)]
        return tuple(sum(steps) for steps in itertools.product(*spans))


@dataclass(frozen=True)
class Mesh:
    """Axes by which every rank has exactly one set of coordinates."""

    axes: tuple[Axis, ...]

    @classmethod
    def make(cls, degrees: Mapping[str, int]) -> Mesh:
        """Makes a mesh of these axes, the fastest-changing first. Raises ``ValueError`` for a degree below 1."""
        if min(degrees.values(), default=1) < 1:
            raise ValueError(f"a mesh needs positive degrees, not {dict(degrees)}")
        strides = itertools.accumulate(degrees.values(), int.__mul__, initial=1)
        return cls(tuple(Axis(name, (Digit(degree, stride),)) for (name, degree), stride in zip(degrees.items(), strides)))

    @classmethod
    def of(cls, layout: LayoutConfig) -> Mesh:
        """Makes the mesh of a resolved layout (``layout.data`` is set). Context ranks share a replica, so they stand between its tensor
        ranks and the next replica."""
        names = layout.order.replace("tensor", "tensor-context").split("-")
        return cls.make({name: getattr(layout, name) or 1 for name in names})

    @cached_property
    def world_size(self) -> int:
        return math.prod(axis.degree for axis in self.axes)

    def __getitem__(self, name: str) -> Axis:
        return next(axis for axis in self.axes if axis.name == name)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the coordinate of ``rank`` on each axis. Raises ``ValueError`` outside the mesh."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a mesh of {self.world_size} ranks")
        return {axis.name: axis.coordinate(rank) for axis in self.axes}

    def rank(self, **at: int) -> int:
        """Returns the rank at these coordinates, 0 where none is given: the inverse of ``coordinates``."""
        degrees = {axis.name: axis.degree for axis in self.axes}
        if any(not 0 <= value < degrees.get(name, 0) for name, value in at.items()):
            raise ValueError(f"{at} is outside a mesh of {degrees}")
        return sum(self[name].offsets[value] for name, value in at.items())

    def group(self, rank: int, *names: str) -> list[int]:
        """Returns the ranks that share every coordinate with ``rank`` except along the axes ``names``, ascending."""
        along = [self[name] for name in names]
        at = self.coordinates(rank)
        first = rank - sum(axis.offsets[at[axis.name]] for axis in along)
        return sorted(first + sum(steps) for steps in itertools.product(*(axis.offsets for axis in along)))

    def groups(self, *names: str) -> list[list[int]]:
        """Returns all groups along ``names``: disjoint, together every rank, in order of their first rank."""
        groups = (self.group(rank, *names) for rank in range(self.world_size))
        return [group for rank, group in enumerate(groups) if group[0] == rank]

    def refactor(self, names: Sequence[str], parts: Mapping[str, int]) -> Mesh:
        """Returns the same ranks with other axes: ``names``, the first changing fastest, are read as one coordinate, which ``parts`` cut
        anew, the first one changing fastest. Raises ``ValueError`` if the degrees do not multiply to the same, or a part ends inside a
        digit that it does not divide."""
        digits = _joined(digit for name in names for digit in self[name].digits if digit.size > 1)
        made = []
        for name, degree in parts.items():
            taken, digits = _take(digits, degree)
            made.append(Axis(name, tuple(taken)))
        if digits or min(parts.values()) < 1:
            raise ValueError(f"{dict(parts)} do not multiply to { ({name: self[name].degree for name in names}) }")
        return Mesh((*made, *(axis for axis in self.axes if axis.name not in names)))

    def picture(self, ranks_per_node: int | None = None) -> str:
        """Draws the mesh of a layout as text: one row per data replica, one column per pipeline rank, the ranks of a cell side by side.

        With ``ranks_per_node`` each cell is followed by the nodes it lies on.
        """
        width = len(str(self.world_size - 1))
        shown = [axis for axis in self.axes if axis.degree > 1 or axis.name != "context"]
        sizes = ", ".join(f"{axis.name} {axis.degree}" for axis in shown)
        stages = range(self["pipeline"].degree)
        rows = [[f"data {d}", *(self._cell(d, p, width, ranks_per_node) for p in stages)] for d in range(self["data"].degree)]
        table = [["", *(f"stage {p}" for p in stages)], *rows]
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in table]
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        return "\n".join([f"{ranks}: {sizes} (fastest first)", *lines])

    def _cell(self, data: int, pipeline: int, width: int, ranks_per_node: int | None) -> str:
        ranks = self.group(self.rank(data=data, pipeline=pipeline), *(a.name for a in self.axes if a.name not in ("data", "pipeline")))
        cell = " ".join(f"{r:>{width}}" for r in ranks)
        if ranks_per_node is None:
            return f"[{cell}]"
        nodes = sorted({r // ranks_per_node for r in ranks})
        return f"[{cell}]@{nodes[0]}" + (f"-{nodes[-1]}" if len(nodes) > 1 else "")


def _joined(digits: Iterable[Digit]) -> list[Digit]:
    """Joins digits that count on where the one before ends: they are one digit, which more degrees divide."""
    joined: list[Digit] = []
    for digit in digits:
        if joined and digit.stride == joined[-1].size * joined[-1].stride:
            digit = Digit(joined[-1].size * digit.size, joined.pop().stride)
        joined.append(digit)
    return joined


def _take(digits: Sequence[Digit], degree: int) -> tuple[list[Digit], list[Digit]]:
    """Returns the first ``degree`` values of a coordinate as digits, and the digits that are left."""
    taken, left = [], list(digits)
    while degree > 1:
        if not left:
            raise ValueError(f"no digits are left for a degree of {degree}")
        digit = left.pop(0)
        size = math.gcd(degree, digit.size)
        if size < min(degree, digit.size):
            raise ValueError(f"a degree of {degree} does not divide {digit.size} ranks that are {digit.stride} apart")
        taken.append(Digit(size, digit.stride))
        if size < digit.size:
            left.insert(0, Digit(digit.size // size, digit.stride * size))
        degree //= size
    return taken, left
