"""Which measured runs a prediction is near to, and what rests on none."""

from __future__ import annotations

import dataclasses

import pytest

from launcher.config import compose
from launcher.config.uncertainty import OF_PARTS, known_runs, shipped_widths, widened
from launcher.cost import CostModel
from launcher.cost.inputs.case import Case
from launcher.cost.known import MeasuredPoints, distance_of, nearest_runs, unmeasured
from launcher.planning.plan import plan


def asked(*overrides: str) -> Case:
    config = compose(["recipe=gpt3_175b", *overrides])
    return plan(config, wanted={"tensor": [8], "pipeline": [8], "micro_batch": [1]}).case


def test_nearest_runs_are_those_of_least_distance() -> None:
    case = asked()
    near = nearest_runs(case, 0, 5)
    assert [run.distance for run in near] == sorted(run.distance for run in near)
    assert near[0].distance >= distance_of(case) and len(near) == 5


def test_a_known_run_is_no_distance_from_itself() -> None:
    places = MeasuredPoints.of(known_runs())
    assert places.apart(places, with_layouts=True).diagonal() == pytest.approx(0.0, abs=1e-6)


def test_another_number_format_and_larger_sizes_are_further_away() -> None:
    assert distance_of(asked("run.precision=fp32")) > distance_of(asked())
    assert distance_of(asked("model.seq=131072")) > distance_of(asked())


def test_far_from_all_known_runs_intervals_are_wider_in_proportion() -> None:
    widths = shipped_widths()
    assert widened(widths, widths.seen / 2) == widths
    assert widened(widths, 3 * widths.seen).part == pytest.approx(3 * widths.part)
    far, near = (asked(seq) for seq in ("model.seq=1048576", "model.seq=2048"))
    config = compose(["recipe=gpt3_175b"])
    cost = CostModel(config.cluster, config.trainer)
    assert cost.widths(far).common > cost.widths(near).common
    assert (
        dataclasses.replace(cost.widths(far), **{name: getattr(widths, name) for name in ("common", *OF_PARTS, "layout", "rough")})
        == widths
    )


def test_a_part_that_no_known_run_had_so_large_is_named() -> None:
    assert unmeasured({"matrix products": 1.0, "pipeline bubble": 9.0}) == {"pipeline bubble": 0.9}
    assert unmeasured({"matrix products": 7.0, "attention": 3.0}) == {}
