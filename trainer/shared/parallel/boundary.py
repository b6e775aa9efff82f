"""The named tensors that one part of a model hands to the next, with shapes and sizes from one declaration. Pure numbers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class BoundaryTensors(NamedTuple):
    """One field for each tensor, or for its shape. Their gradients go the other way."""

    hidden: Any  # the residual stream


def boundary_shapes(seq: Any, rows: Any, hidden: Any) -> BoundaryTensors:
    """Returns the shapes for ``rows`` sequences of a model of this width, numbers or arrays: [s, b, h]."""
    return BoundaryTensors(hidden=(seq, rows, hidden))


def boundary_elements(seq: Any, rows: Any, hidden: Any) -> Any:
    """Returns the number of elements of all of them."""
    return sum(math.prod(shape) for shape in boundary_shapes(seq, rows, hidden))
