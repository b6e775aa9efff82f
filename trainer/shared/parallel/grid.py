"""The rank grid: which coordinates a rank has, and which ranks form a group.

Ranks are laid out row by row with the axes of ``layout.order``, the fastest-changing one first. With the default order
tensor ranks are neighbours (one node), data ranks come next, pipeline stages are farthest apart, because that is the order
of how much each axis talks.

The data axis is divided further: nested sharding factors cut it into *levels* (``trainer.shared.parallel.shards``), and a level's
group is the set of ranks whose data coordinate differs in that one digit.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass

from trainer.shared.run.schema import LayoutConfig

AXES = ("tensor", "data", "pipeline")


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a rank stands on each axis."""

    tensor: int
    data: int
    pipeline: int


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes of the axes and their order, fastest-changing first."""

    tensor: int
    data: int
    pipeline: int
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        if sorted(self.order) != sorted(AXES) or min(self.sizes.values()) < 1:
            raise ValueError(f"a grid needs positive sizes and each of {AXES} once in its order, not {self}")

    @classmethod
    def of(cls, layout: LayoutConfig) -> Grid:
        """The grid of a resolved layout (``layout.data`` is set)."""
        return cls(layout.tensor, layout.data or 1, layout.pipeline, tuple(layout.order.split("-")))

    @property
    def sizes(self) -> dict[str, int]:
        return {"tensor": self.tensor, "data": self.data, "pipeline": self.pipeline}

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def strides(self) -> dict[str, int]:
        """Ranks between neighbours along each axis."""
        strides, stride = {}, 1
        for axis in self.order:
            strides[axis] = stride
            stride *= self.sizes[axis]
        return strides

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of ``rank``; ``ValueError`` outside the grid."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a grid of {self.world_size} ranks")
        sizes = self.sizes
        return Coordinates(**{axis: rank // stride % sizes[axis] for axis, stride in self.strides.items()})

    def rank(self, tensor: int = 0, data: int = 0, pipeline: int = 0) -> int:
        """The rank at these coordinates: the inverse of ``coordinates``."""
        at = {"tensor": tensor, "data": data, "pipeline": pipeline}
        if any(not 0 <= at[axis] < size for axis, size in self.sizes.items()):
            raise ValueError(f"{at} is outside a grid of {self.sizes}")
        return sum(at[axis] * stride for axis, stride in self.strides.items())

    def group(self, rank: int, *axes: str) -> list[int]:
        """The ranks that share every coordinate with ``rank`` except along ``axes``, ascending."""
        own = asdict(self.coordinates(rank))
        spans = [range(self.sizes[axis]) if axis in axes else (own[axis],) for axis in AXES]
        return sorted(self.rank(*at) for at in itertools.product(*spans))

    def groups(self, *axes: str) -> list[list[int]]:
        """All groups along ``axes``: disjoint, together every rank, in order of their first rank."""
        groups = (self.group(rank, *axes) for rank in range(self.world_size))
        return [group for rank, group in enumerate(groups) if group[0] == rank]

    def level_group(self, rank: int, size: int, stride: int) -> list[int]:
        """The data-axis sub-group of ``rank`` for one sharding level, ascending.

        Members differ only in the digit ``data // stride % size``. With ``stride=1`` it is a contiguous run of ``size`` replicas.
        """
        if size * stride < 1 or self.data % (size * stride):
            raise ValueError(f"a level of {size} x stride {stride} does not divide data={self.data}")
        own = self.coordinates(rank)
        first = own.data - own.data // stride % size * stride
        return [self.rank(own.tensor, first + digit * stride, own.pipeline) for digit in range(size)]

    def level_groups(self, size: int, stride: int) -> list[list[int]]:
        """All groups of one sharding level over the whole grid."""
        groups = (self.level_group(rank, size, stride) for rank in range(self.world_size))
        return [group for rank, group in enumerate(groups) if group[0] == rank]

    def picture(self, ranks_per_node: int | None = None) -> str:
        """The grid as text: one row per data replica, one column per pipeline stage, tensor ranks side by side.

        With ``ranks_per_node`` each cell is followed by the nodes it lies on.
        """
        width = len(str(self.world_size - 1))
        sizes = ", ".join(f"{axis} {self.sizes[axis]}" for axis in self.order)
        rows = [[f"data {d}", *(self._cell(d, p, width, ranks_per_node) for p in range(self.pipeline))] for d in range(self.data)]
        table = [["", *(f"stage {p}" for p in range(self.pipeline))], *rows]
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in table]
        return "\n".join([f"{self.world_size} ranks: {sizes} (fastest first)", *lines])

    def _cell(self, data: int, pipeline: int, width: int, ranks_per_node: int | None) -> str:
        ranks = [self.rank(t, data, pipeline) for t in range(self.tensor)]
        cell = " ".join(f"{r:>{width}}" for r in ranks)
        if ranks_per_node is None:
            return f"[{cell}]"
        nodes = sorted({r // ranks_per_node for r in ranks})
        return f"[{cell}]@{nodes[0]}" + (f"-{nodes[-1]}" if len(nodes) > 1 else "")
