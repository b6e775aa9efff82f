"""The average of weights over the tail of a run: a mean, beside a training that does not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from launcher.config.schema import ClusterConfig
from launcher.cost import predict
from tests.cost.machines import HARDWARE
from tests.small_runs import small
from tests.whole_parameters import parameters
from trainer.comm.collectives import World
from trainer.data import open_dataset
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.optimizer import OptimizerConfig
from trainer.shared.run.read import from_dict
from trainer.shared.run.resolved import ResolvedTrainConfig
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import TrainConfig
from trainer.step import Engine

STEPS, START = 5, 2


def run_of(start: int | None, share: float = 0.0, precision: str = "fp64", run: dict[str, Any] | None = None) -> ResolvedTrainConfig:
    data = small(STEPS, precision, {"vocab": 61}, run, {"average_from": start}, sharding={"offload": share}, micro_batch=4)
    return resolve(from_dict(TrainConfig, data), 1)


def engine_of(config: ResolvedTrainConfig) -> Engine:
    world = World(0, 1, torch.device("cpu"), "", 0, 10.0)
    return Engine(config, world, open_dataset(config.data, config.model, config.run.seed))


@pytest.mark.parametrize(("precision", "share"), [("fp64", 0.0), ("bf16", 0.4)], ids=str)
def test_it_is_the_mean_of_the_weights_of_its_steps_and_no_bit_of_the_training_changes(precision: str, share: float) -> None:
    """The master weights, wherever they are. Inside, the model computes with it; after that, everything is as before."""
    plain, engine = (engine_of(run_of(start, share, precision)) for start in (None, START))
    seen = []
    for step in range(STEPS):
        assert plain.step(step).loss == engine.step(step).loss
        seen.append(torch.cat([value.flatten() for value in parameters(engine.rank).values()]))
    mean = torch.stack(seen[START:]).double().mean(0)
    average = {piece.record.name: torch.empty(0) for piece in engine.trained}
    for piece in engine.trained:
        average[piece.record.name] = torch.cat([average[piece.record.name].to(piece.weight), piece.average])
    flat = torch.cat([average[name] for name in parameters(engine.rank)])
    torch.testing.assert_close(flat.double(), mean, rtol=0, atol=1e-14 if precision == "fp64" else 1e-7)
    assert engine.average.count == engine.extra()["averaged"] == STEPS - START
    state = engine.rank.state
    assert state.planned_bytes == sum(state.nbytes.values()) - state.pool.nbytes.get("gradients", 0)

    def publish() -> None:
        state.publish_updates()
        state.settle()

    with engine.average.in_place(publish):
        inside = torch.cat([value.flatten() for value in parameters(engine.rank).values()])
        assert torch.equal(inside, flat) and not torch.equal(inside, seen[-1])
    assert torch.equal(torch.cat([value.flatten() for value in parameters(engine.rank).values()]), seen[-1])
    assert plain.step(STEPS).loss == engine.step(STEPS).loss


def test_its_bytes_and_its_time_are_predicted() -> None:
    config = resolve(from_dict(TrainConfig, {"run": {"precision": "bf16", "global_batch": 8}, "model": {"hidden": 1024, "heads": 8}}), 8)
    asked = config.model, config.layout, config.run, ClusterConfig(gpus_per_node=8, hardware=HARDWARE["h100"])
    without, with_average = (predict(*asked, optimizer=OptimizerConfig(average_from=start)) for start in (None, 3))
    assert with_average.counted["optimizer"] / without.counted["optimizer"] == pytest.approx(16 / 12)
    assert with_average.time["optimizer"] / without.time["optimizer"] == pytest.approx((34 + 12) / 34, rel=0.05)


def test_one_that_would_never_begin_is_refused_unless_another_run_goes_on() -> None:
    message = r"optimizer\.average_from=5 begins to average after run\.steps=5, and nothing is saved .*; lower it, or set run\.checkpoint"
    with pytest.raises(ConfigError, match=message):
        run_of(STEPS)
    assert run_of(STEPS, run={"checkpoint": {"every": STEPS}}).optimizer.average_from == STEPS
