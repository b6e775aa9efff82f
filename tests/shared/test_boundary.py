"""The boundary between two parts of a model: one declaration gives the shapes that the trainer sends and the sizes that are predicted."""

from __future__ import annotations

import math

import numpy as np

from trainer.shared.parallel.boundary import BoundaryTensors, boundary_elements, boundary_shapes


def test_sizes_are_those_of_the_shapes_for_numbers_and_for_arrays() -> None:
    shapes = boundary_shapes(16, 2, 32)
    assert shapes == BoundaryTensors(hidden=(16, 2, 32))
    assert boundary_elements(16, 2, 32) == sum(math.prod(shape) for shape in shapes) == 1024
    assert boundary_elements(np.array([16, 8]), 2, np.array([32.0, 4.0])).tolist() == [1024.0, 64.0]
