"""``hydra/sweeper=trireme``: a sweep over layout keys is searched instead of run whole. The work is done in ``launcher.cli.search``."""

from __future__ import annotations

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class TriremeSweeper(Sweeper):
    """Values given to ``layout`` keys are the grid; without any, every layout of ``search.space`` is."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.task_function, self.config = hydra_context, task_function, config

    def sweep(self, arguments: list[str]) -> int:
        from launcher.cli.search import sweep

        return sweep(self.context, self.config, arguments)


ConfigStore.instance().store(
    group="hydra/sweeper", name="trireme", node={"_target_": "hydra_plugins.trireme.search.TriremeSweeper"}, provider="trireme"
)
