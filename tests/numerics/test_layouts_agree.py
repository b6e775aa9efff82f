"""Every layout trains the same model: the promise, through the program that users run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.farm import Farm
from tests.small_runs import ranks, small

pytestmark = pytest.mark.slow

CUBE = {"tensor": 2, "pipeline": 2, "data": 2, "sequence_parallel": True}


def test_a_layout_has_the_losses_and_norms_of_one_process(farm: Farm) -> None:
    steps: dict[str, Any] = {"optimizer": {"decay_steps": 20}, "run": {"global_batch": 8}}
    one = farm.train(small(steps=20, **steps), 1).checked().result
    many = farm.train(small(steps=5, **steps, **CUBE), ranks(CUBE)).checked().result
    assert many["losses"] == pytest.approx(one["losses"][:5], rel=1e-10)
    assert many["grad_norms"] == pytest.approx(one["grad_norms"][:5], rel=1e-10)
    assert one["losses"][-1] < one["losses"][0] - 0.01
