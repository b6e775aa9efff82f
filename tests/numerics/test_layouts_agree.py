"""Every layout trains the same model: the promise, through the program that users run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.small_runs import ranks, small
from trainer.testing import Farm

CUBE = {"tensor": 2, "pipeline": 2, "data": 2}


@pytest.mark.parametrize("layout", [CUBE, CUBE | {"sequence_parallel": True}], ids=str)
def test_a_layout_has_the_losses_and_norms_of_one_process(farm: Farm, layout: dict[str, Any]) -> None:
    one = farm.train(small(steps=20), 1).checked().result
    many = farm.train(small(steps=20, **layout), ranks(layout)).checked().result
    assert many["losses"] == pytest.approx(one["losses"], rel=1e-10)
    assert many["grad_norms"] == pytest.approx(one["grad_norms"], rel=1e-10)
    assert one["losses"][-1] < one["losses"][0] - 0.01
