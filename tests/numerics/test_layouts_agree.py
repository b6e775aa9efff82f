"""Every layout trains the same model: the promise, through the program that users run."""

from __future__ import annotations

from typing import Any

import pytest
from farm import Farm

LAYOUTS = [
    dict(tensor=2), dict(pipeline=2), dict(data=2), dict(tensor=2, sequence_parallel=True),
    dict(tensor=2, pipeline=2, data=2), dict(tensor=2, pipeline=2, data=2, sequence_parallel=True),
]


def config(precision: str = "fp64", steps: int = 20, **layout: Any) -> dict[str, Any]:
    return {
        "model": {"layers": 4, "hidden": 32, "heads": 4, "vocab": 101, "seq": 16},
        "layout": {"micro_batch": 1} | layout,
        "data": {"kind": "synthetic"},
        "optimizer": {"lr": 0.01, "warmup_steps": 3},
        "run": {"steps": steps, "precision": precision, "global_batch": 8, "bucket_mb": 0.05},
    }


def ranks(layout: dict[str, Any]) -> int:
    return layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("data", 1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_has_the_losses_and_norms_of_one_process(farm: Farm, layout: dict[str, Any]) -> None:
    one = farm.train(config(), 1).checked().result
    many = farm.train(config(**layout), ranks(layout)).checked().result
    assert many["losses"] == pytest.approx(one["losses"], rel=1e-10)
    assert many["grad_norms"] == pytest.approx(one["grad_norms"], rel=1e-10)
    assert one["losses"][-1] < one["losses"][0] - 0.01
