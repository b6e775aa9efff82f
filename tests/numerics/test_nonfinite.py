"""A value that is not finite is traced to the rank that it came from, wherever sums have carried it since."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.farm import Farm, Finished
from tests.numerics.planted import planted as planted_ranks
from tests.small_runs import ranks, small

pytestmark = pytest.mark.slow

CUBE = {"tensor": 2, "pipeline": 2, "data": 2}
DEEP = {"pipeline": 2, "virtual_pipeline": 2, "schedule": "interleaved", "data": 2, "sharding": {"params": 2, "grads": 2, "optimizer": 2}}


def planted(farm: Farm, layout: dict[str, Any], rank: int, where: str, **run: Any) -> Finished:
    out = farm.folder()
    call = farm.write_call(out, planted_ranks, config=small(model={"layers": 4}, run=run, **layout), rank=rank, where=where)
    return farm.wait(farm.start(call, ranks(layout), out))


SAID = {"weight": "weight ", "output": "output of blocks.", "gradient": "gradient of "}
PLACES: list[tuple[dict[str, Any], int]] = [(CUBE, 3), (CUBE, 5), (CUBE | {"recompute": "full"}, 7), (DEEP, 2)]
FIRST = [(0, "weight"), (1, "gradient"), (2, "output"), (3, "weight"), (3, "gradient")]
"""Of each place and each kind of value one; the others in the campaign."""


@pytest.mark.parametrize(
    ("place", "where"),
    [
        pytest.param(*pair, marks=() if pair in FIRST else pytest.mark.campaign("layouts"))
        for pair in itertools.product(range(len(PLACES)), SAID)
    ],
)
def test_the_rank_that_a_value_came_from_is_named(farm: Farm, place: int, where: str) -> None:
    layout, rank = PLACES[place]
    run = planted(farm, layout, rank, where)
    assert set(run.codes.values()) == {1} and run.result["reason"] == "numerics"
    assert f"the {SAID[where]}" in run.result["message"] and f" on rank {rank} is not finite" in run.result["message"]


def test_a_value_that_does_not_come_again_is_laid_at_a_devices_door(farm: Farm) -> None:
    run = planted(farm, {"data": 2}, 1, "once", on_nonfinite="skip").checked()
    assert "warning: step 1: the loss or the gradient was not finite, but is when computed again" in run.logs
    assert run.result["losses"][0] is None and all(run.result["losses"][1:])
