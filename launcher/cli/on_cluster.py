"""Shared parts of ``trireme search`` on a cluster: names, trials, and the place of recipes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.labels import shown
from trainer.shared.run.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from launcher.config import Config
    from launcher.search.policy import P, Searchable
    from launcher.sweep.at_work import Command
    from launcher.sweep.search import SearchOutcome, Tell

FOLDER = Path("runs") / "recipe"
"""Folder of user-made ``recipe=NAME`` files (``search_path`` of ``launcher.config.compose``), whatever folder holds the trials."""


def name_of_search(config: Config, overrides: Sequence[str]) -> str:
    """The sweep of a search: the same command means the same one. ``ConfigError`` for a name that cannot be one's."""
    from launcher.sweep.multirun import sweep_name
    from launcher.trials.store import check_name

    if config.sweep.name:
        check_name(config.sweep.name)  # before the recipe that is called after it
    return config.sweep.name or "search-" + sweep_name(overrides).removeprefix("sweep-")


def searched(
    name: str, problem: Searchable[P], overrides: Sequence[str], tell: Tell, keep: Callable[[SearchOutcome[P]], object], command: Command
) -> SearchOutcome[P] | None:
    """Runs the search of ``problem`` on its cluster; None after a dry run. ``keep`` writes results for MLflow, too."""
    from launcher.backends.pool import Backends
    from launcher.sweep.dry_run import print_requests
    from launcher.sweep.multirun import check_tracking_of
    from launcher.sweep.search import first_points, search
    from launcher.tracking.process import MlflowMirror

    config = problem.config
    base = [word for word in overrides if not word.lstrip("+").startswith(("layout.", "search", "sweep.", "dry_run", "goal="))]
    if config.dry_run:
        print_requests(first_points(problem, base), config.dry_run)
        return None
    check_tracking_of(config)
    # Told of no single trial: copying during the trials would disturb their timings.
    mirror = MlflowMirror(config.sweep.dir, name, config.sweep.mlflow_wait_s, config.tracking.loggers)
    mirror.begin()
    with Backends() as backends:
        found = search(name, problem, backends, base, tell, [command])
    keep(found)
    mirror.close()
    mirror.finish(0 if found.interrupted else None)
    return found


def alone(config: Config) -> list[str]:
    """Returns the overrides with which a recipe is compared: the cluster's backend alone, since the keys depend on it."""
    return [f"cluster={config.cluster.backend}"]


def recipe_path(name: str) -> Path:
    """Returns the file of ``recipe=NAME``. Raises ``ConfigError`` for a path, and for a shipped name, which would be found instead."""
    from launcher.config import conf_dir
    from launcher.trials.store import check_name

    check_name(name, "search.recipe", "a recipe")
    if (conf_dir() / "recipe" / f"{name}.yaml").exists():
        raise ConfigError(f"search.recipe={name} is a shipped recipe and will not be overwritten; choose another name")
    return FOLDER / f"{name}.yaml"


def say(text: str) -> None:
    print(shown(text), file=sys.stderr)
