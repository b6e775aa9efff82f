"""Found by Hydra in this namespace package; the work is done in ``launcher.sweep.multirun``."""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class TriremeLauncher(Launcher):
    """``hydra/launcher=trireme``: each job of a multirun is a trial; its step time in seconds is the value a sweeper optimises."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from launcher.sweep.multirun import launch

        return launch(self.context, self.task_function, self.config, job_overrides, initial_job_idx)


class GridSweeper(BasicSweeper):
    """Hydra's own sweeper, which would compose every job twice: once to see whether that works, and once to run it."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """The launcher composes all jobs of a batch before it starts any."""


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="grid",
    node={"_target_": "hydra_plugins.trireme.GridSweeper", "max_batch_size": None, "params": None},
    provider="trireme",
)
ConfigStore.instance().store(
    group="hydra/launcher", name="trireme", node={"_target_": "hydra_plugins.trireme.TriremeLauncher"}, provider="trireme"
)
