"""run.deterministic: the same bits again, by operations that have one order, or an error that names the one that has none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.farm import Farm
from tests.small_runs import small
from trainer import loop
from trainer.launch.rank_env import REPEATABLE_ENVIRONMENT, RankEnv, prepare_repeatable
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.foreign import CommandConfig
from trainer.shared.run.read import from_dict
from trainer.shared.run.rules import resolve
from trainer.shared.run.schema import RunConfig, TrainConfig
from trainer.step import Engine

CONFIG = small(model={"dropout": 0.1, "layers": 2}, precision="bf16", run={"deterministic": True, "checkpoint": {"every": 3}}, tensor=2)


def test_two_runs_are_equal_in_every_bit(farm: Farm) -> None:
    """Losses, norms, and what a checkpoint holds."""
    runs = [farm.train(CONFIG, 2).checked() for _ in range(2)]
    assert runs[0].result["losses"] == runs[1].result["losses"] and runs[0].result["grad_norms"] == runs[1].result["grad_norms"]
    stored = [{path.name: path.read_bytes() for path in run.directory.glob("checkpoints/**/*.bin")} for run in runs]
    assert len(stored[0]) >= 1 and stored[0] == stored[1]


def unrepeatable(env: RankEnv, folder: Path, config: dict[str, Any]) -> None:
    """A training with an operation of which torch says that it has no deterministic form."""
    queue = Engine.queue

    def queued(self: Engine, *a: Any, **b: Any) -> Any:
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        assert all(os.environ[name] == value for name, value in REPEATABLE_ENVIRONMENT.items())
        return queue(self, *a, **b)

    Engine.queue = queued  # type: ignore[method-assign]
    loop.train(resolve(from_dict(TrainConfig, config), env.world_size), env, folder, 0)


def test_an_operation_without_an_order_ends_the_run_by_its_name(farm: Farm) -> None:
    out = farm.folder()
    ended = farm.wait(farm.start(farm.write_call(out, unrepeatable, config=small(run={"deterministic": True})), 1, out))
    assert set(ended.codes.values()) != {0} and "put_ does not have a deterministic implementation" in ended.logs
    farm.call(unrepeatable_is_nothing, 1, config=small())


def unrepeatable_is_nothing(env: RankEnv, folder: Path, config: dict[str, Any]) -> None:
    """The same where nobody asked for repeatable bits."""
    loop.train(resolve(from_dict(TrainConfig, config), env.world_size), env, folder, 0)
    torch.zeros(2).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


def test_settings_of_the_environment_that_forbid_it_are_refused() -> None:
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    prepare_repeatable(environment)
    assert environment == REPEATABLE_ENVIRONMENT | {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    with pytest.raises(ConfigError, match="needs NCCL_ALGO=Ring, and the environment has Tree"):
        prepare_repeatable({"NCCL_ALGO": "Tree"})


def test_another_trainer_cannot_be_asked_for_it() -> None:
    with pytest.raises(ConfigError, match=r"run.deterministic=true is for our own trainer; leave it out for trainer=theirs"):
        resolve(TrainConfig(run=RunConfig(deterministic=True), command=CommandConfig(trainer="theirs")), 1)
