"""A run with phases is priced phase by phase: its layouts are ordered by the time of all its steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from launcher.config import compose
from launcher.config.schema import Config
from launcher.cost.phases import sized
from launcher.cost.prediction import CostModel
from launcher.goals.training.plan import plan_training
from launcher.planning.plan import plan
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.phases import PhaseTable
from trainer.shared.run.schema import LayoutConfig

KEYS = [
    *("model=gpt_mini", "hardware=h100", "cluster.gpus_per_node=8", "run.precision=bf16", "run.steps=100"),
    *("run.global_batch=64", "model.seq=1024", "search.space.max_micro_batch=4"),
]
PHASES = "run.phases=[{until: 100000, global_batch: 12, seq: 256}, {until: 800000, global_batch: 16}]"
"""33 steps of 12 x 256 tokens, 43 of 16 x 1024, and 24 of 64 x 1024."""


@pytest.fixture(scope="module")
def config() -> Config:
    return compose([*KEYS, PHASES])


def parts(config: Config) -> list[tuple[float, Any, Any]]:
    table = PhaseTable.of(config.run, config.model.seq)
    return [(steps, *sized(phase, config.model, config.run)) for phase, steps in table.reached(config.run.steps)]


def test_a_prediction_of_phases_is_the_mean_of_theirs_and_the_memory_of_the_largest(config: Config) -> None:
    cost, layout = CostModel(config.cluster), LayoutConfig(tensor=2, pipeline=2, data=2, micro_batch=2)
    whole = cost.predict(config.model, layout, config.run)
    each = [(steps, cost.predict(model, layout, run)) for steps, model, run in parts(config)]
    assert [steps for steps, _ in each] == [33, 43, 24]
    assert whole.step_time_s == pytest.approx(sum(steps * one.step_time_s for steps, one in each) / 100, rel=1e-12)
    assert whole.flops == pytest.approx(sum(steps * one.flops for steps, one in each) / 100, rel=1e-12)
    most = max((one for _, one in each), key=lambda one: one.memory_bytes)
    assert whole.memory == pytest.approx(most.memory) and whole.fits == min(one.fits for _, one in each)


def test_a_plan_has_layouts_that_every_phase_can_have_ordered_by_the_whole_run(config: Config) -> None:
    planned, cost = plan(config), CostModel(config.cluster)
    table = planned.space.table
    unit = table["micro_batch"] * table["data"]
    assert all((batch % unit == 0).all() for batch in (12, 16, 64)) and (unit == 4).any()
    seconds = sum(steps * cost.predict_table(model, table, run).step_time for steps, model, run in parts(config)) / 100
    assert np.allclose(planned.seconds, seconds, rtol=1e-12)
    assert (np.diff(planned.seconds[planned.order]) >= 0).all()


def test_a_plan_says_what_each_phase_takes_and_what_is_the_fastest_for_it(config: Config) -> None:
    planned = plan_training(config, {})
    document = planned.answer(3, 0.0, KEYS).document
    phases, first = document["phases"], document["layouts"][0]
    assert [(one["first_step"], one["steps"], one["global_batch"], one["seq"]) for one in phases] == [
        (1, 33, 12, 256),
        (34, 43, 16, 1024),
        (77, 24, 64, 1024),
    ]
    assert sum(one["seconds"] for one in phases) == pytest.approx(document["run"]["seconds"]) == pytest.approx(100 * first["step_time_s"])
    assert sum(one["tokens"] for one in phases) == document["run"]["tokens"]
    for one, (_, model, run) in zip(phases, parts(config), strict=True):
        alone = plan(dataclasses.replace(config, model=model, run=run))
        best = alone.seconds[alone.order[0]]
        assert one["fastest"]["step_s"] == pytest.approx(min(best, one["step_s"])) and one["fastest"]["step_s"] <= one["step_s"]
    assert phases[2]["fastest"]["name"] != first["name"], "64 sequences may be dealt out to all ranks, 12 and 16 may not"


def test_phases_without_a_layout_in_common_are_refused() -> None:
    one = ["model.layers=1", "model.heads=1"]
    with pytest.raises(ConfigError, match=r"run\.phases: one layout has to divide the batches 3, 5, 64 of all phases: no layout"):
        plan(compose([*KEYS, *one, "run.phases=[{until: 100000, global_batch: 3}, {until: 200000, global_batch: 5}]"]))
