"""Clipping shortens gradients that are too long, and leaves all others as they are."""

from __future__ import annotations

import torch

from tests.small_runs import small
from trainer.comm.collectives import World
from trainer.data import open_dataset
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import TrainConfig
from trainer.step import Engine, StepResult


def trained(clip: float) -> list[StepResult]:
    config = resolve(from_dict(TrainConfig, small(steps=4, optimizer={"clip": clip, "eps": 1e-2})), 1)
    engine = Engine(config, World(0, 1, torch.device("cpu"), "", 0, 10.0), open_dataset(config.data, config.model, config.run.seed))
    return [engine.step(step) for step in range(4)]


def test_gradients_shorter_than_the_limit_are_left_as_they_are() -> None:
    free = trained(0.0)
    longest = max(step.grad_norm for step in free)
    for clip, same in ((2 * longest, True), (0.1 * longest, False)):
        held = trained(clip)
        assert held[0].grad_norm == free[0].grad_norm, "the norm is that before clipping"
        assert ([step.loss for step in held] == [step.loss for step in free]) is same
