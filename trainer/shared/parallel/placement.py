"""Where a parameter lives: on each named axis of ranks it is cut along a dimension, repeated, or repeated with partial gradients.

The class of a layer declares a placement for each of its parameters; an axis that it does not name repeats the parameter. The placement and
the rank's coordinates determine the part that a rank holds, the copy that counts, and the sums over ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from trainer.shared.parallel.shards import vocabulary_rows

Box = tuple[tuple[int, int], ...]
"""Start and stop per dimension."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank of the axis has an equal part along ``dim``. The last parts may be padded, or padding alone."""

    dim: int
    tiles: bool = False  # parts are padded to whole tiles of a matrix unit, as rows of a vocabulary are

    def width(self, length: int, degree: int) -> int:
        """Returns the length of a part, with padding."""
        return int(vocabulary_rows(length, degree)) if self.tiles else -(-length // degree)


@dataclass(frozen=True, slots=True)
class Replicate:
    """Each rank of the axis has all of it, and the whole gradient."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Each rank of the axis has all of it, but only one summand of its gradient: they are added once per step."""


Placement = Mapping[str, Shard | Replicate | Partial]
"""How a tensor lies along each axis, by the axis's name."""


DENSE: Placement = {"tensor": Replicate(), "data": Replicate()}
"""Placement of a parameter whose layer declares nothing."""


FOLDED = "expert data"
"""The axis of ranks that have the same experts. With "expert" it factorises the ranks of tensor, context and data anew: a parameter that
lives there does not live on those."""


def resolved(declared: Placement, degrees: Mapping[str, int], tokens: Collection[str]) -> Placement:
    """Returns the whole placement for axes of these ``degrees``. Ranks along the axes ``tokens`` share a sequence, so the gradient of a
    parameter that is repeated there is a sum over their tokens. Over a single rank nothing is left to be summed."""
    every = declared if FOLDED in declared else {**DENSE, **dict.fromkeys(tokens, Partial()), **declared}
    return {axis: Replicate() if place == Partial() and degrees[axis] == 1 else place for axis, place in every.items()}


def local_part(
    shape: Sequence[int], placement: Placement, degrees: Mapping[str, int], at: Mapping[str, int]
) -> tuple[Box, tuple[int, ...]]:
    """Returns the box of a global tensor that the rank at these coordinates holds, and the shape of its local tensor, with padding."""
    box, local = [(0, n) for n in shape], list(shape)
    for axis, place in placement.items():
        if isinstance(place, Shard):
            low, high = box[place.dim]
            width = place.width(high - low, degrees[axis])
            start = min(low + width * at[axis], high)
            box[place.dim], local[place.dim] = (start, min(start + width, high)), width
    return tuple(box), tuple(local)


def counts(placement: Placement, at: Mapping[str, int]) -> bool:
    """Returns whether the rank is the first along every axis of ``at`` that repeats the parameter: the one that counts and saves it."""
    return all(isinstance(placement[axis], Shard) or place == 0 for axis, place in at.items() if axis in placement)
