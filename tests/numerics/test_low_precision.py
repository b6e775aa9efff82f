"""Half precision: layouts agree as far as the type can tell, and all ranks have one loss scale."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.farm import Farm, Finished
from tests.small_runs import ranks, small

pytestmark = pytest.mark.slow

STEPS = 5
DEEP: dict[str, Any] = {"model": {"layers": 4}, "run": {"global_batch": 8}}
LAYOUTS: list[dict[str, Any]] = [
    {"tensor": 2, "sequence_parallel": True, "pipeline": 2},
    {"data": 2, "sharding": {"params": 2, "grads": 2, "optimizer": 2}, "pipeline": 2, "virtual_pipeline": 2, "schedule": "interleaved"},
]


@pytest.fixture(scope="module")
def one(farm: Farm) -> dict[str, dict[str, Any]]:
    """The training by one process, by precision."""
    return {each: farm.train(small(steps=STEPS, precision=each, **DEEP), 1).checked().result for each in ("bf16", "fp16", "fp8")}


@pytest.mark.parametrize(
    ("precision", "loss", "norm", "layout"),
    [
        pytest.param(*kind, layout, marks=[pytest.mark.campaign("layouts")] * (a % 2 != b))
        for a, kind in enumerate((("bf16", 4e-3, 0.05), ("fp16", 1e-3, 0.01), ("fp8", 4e-3, 0.05)))
        for b, layout in enumerate(LAYOUTS)
    ],
)
def test_a_layout_follows_one_process_within_the_precision(
    farm: Farm, one: dict[str, dict[str, Any]], precision: str, loss: float, norm: float, layout: dict[str, Any]
) -> None:
    many = farm.train(small(steps=STEPS, precision=precision, **DEEP, **layout), ranks(layout)).checked().result
    assert many["losses"] == pytest.approx(one[precision]["losses"], rel=loss)
    assert many["grad_norms"] == pytest.approx(one[precision]["grad_norms"], rel=norm)


def test_eight_bit_products_train_the_model_of_16_bits_nearly(one: dict[str, dict[str, Any]]) -> None:
    """And not exactly: then they were not used."""
    sixteen, eight = (one[each]["losses"] for each in ("bf16", "fp8"))
    assert eight == pytest.approx(sixteen, rel=4e-3) and eight[-1] < eight[0]
    assert not any(a == b for a, b in zip(sixteen, eight))


def test_one_ranks_overflow_lowers_every_ranks_loss_scale_and_no_step_of_the_schedule_is_lost(farm: Farm) -> None:
    """Few tokens in a step make each count so much that gradients overflow at the first scale. Skipped steps are no updates."""
    settings: dict[str, Any] = {
        "precision": "fp16",
        "model": {"init_std": 0.6, "seq": 2},
        "run": {"global_batch": 1},
        "optimizer": {"warmup_steps": 20},
    }
    alone, many = (farm.train(small(steps=12, **settings, **layout), ranks(layout)).checked() for layout in ({}, LAYOUTS[0]))
    rates = [learning_rates(run) for run in (alone, many)]
    skipped = rates[0].count(rates[0][0]) - 1
    assert 0 < skipped < 8
    assert rates[0] == rates[1]
    assert len(set(rates[0][skipped:])) == len(rates[0]) - skipped  # from the first update on, every step has its own rate
    assert many.result["losses"] == pytest.approx(alone.result["losses"], rel=0.02)


def learning_rates(run: Finished) -> list[float]:
    return [json.loads(line)["lr"] for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
