"""Found by Hydra in this namespace package; the work is done in ``launcher.sweep.multirun`` and ``launcher.stages.function``."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, configure_log
from hydra.errors import CompactHydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class TriremeLauncher(Launcher):
    """``hydra/launcher=trireme``: each job of a multirun is a trial. Of ``trireme train``, its step time in seconds is the value that a
    sweeper optimises; of another application, what its function returns. ``overrides`` say where those run, in Trireme's own keys."""

    def __init__(self, overrides: Sequence[str] = ()):
        self.overrides = list(overrides)
        self.settings: Any = None  # made once, though an adaptive sweeper comes with many batches
        self.backends: Any = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from launcher.sweep.multirun import Multirun, launch

        if isinstance(getattr(self.task_function, "__self__", None), Multirun):
            return launch(self.context, self.task_function, self.config, job_overrides, initial_job_idx)
        return self._call(job_overrides, initial_job_idx)

    def _call(self, job_overrides: Sequence[Sequence[str]], first: int) -> Sequence[JobReturn]:
        """Raises errors of wrong input as Hydra's, which it prints without a traceback."""
        from launcher.backends.pool import Backends
        from launcher.interrupt import Interrupted
        from launcher.stages.function import Application, call_all, settings_of
        from trainer.shared.run.errors import ConfigError

        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        try:
            self.settings = self.settings or settings_of(self.overrides)
            if self.backends is None:
                atexit.register((stack := ExitStack()).close)
                self.backends = stack.enter_context(Backends())
            app = Application(self.context, self.task_function, self.config)
            return call_all(app, self.settings, self.backends, job_overrides, first)
        except ConfigError as error:
            raise CompactHydraException(str(error)) from None
        except Interrupted as request:
            raise SystemExit(request.exit_code) from None


class GridSweeper(BasicSweeper):
    """The grid of Hydra's own sweeper, which would compose every job twice, and write the command to a file before it has been checked."""

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        assert self.launcher is not None and self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        self.overrides = self.split_arguments(parser.parse_overrides([*self._parse_config(), *arguments]), self.max_batch_size)
        returns: list[Sequence[JobReturn]] = []
        first = 0
        while not self.is_done():
            batch = self.get_job_batch()
            returns.append(self.launcher.launch(batch, initial_job_idx=first))
            first += len(batch)
        return returns


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="grid",
    node={"_target_": "hydra_plugins.trireme.GridSweeper", "max_batch_size": None, "params": None},
    provider="trireme",
)
ConfigStore.instance().store(
    group="hydra/launcher",
    name="trireme",
    node={"_target_": "hydra_plugins.trireme.TriremeLauncher", "overrides": []},
    provider="trireme",
)
