"""``trireme train --dry-run``: prints each request without starting or writing anything."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.backends.contract import Backend, BackendError
from launcher.backends.pool import Backends
from launcher.config.rules import run_of
from launcher.config.schema import Config
from launcher.trials.identity import trial_id
from launcher.trials.job import Job
from launcher.trials.store import Point, Store, check_name
from trainer.shared.parallel.mesh import Mesh
from trainer.shared.run.derived import world_size_of
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import to_dict


def print_requests(points: Sequence[Point], mode: str) -> None:
    """Prints every point's exact request, or why it is pruned. ``mode``: ``client``, or ``server`` to ask the scheduler, too. Raises
    ``ConfigError`` at the end for refused jobs."""
    refused: list[str] = []
    shared: set[str] = set()
    with Backends() as backends:
        for point in points:
            if point.config is None:
                _comment(f"{' '.join(point.overrides)}: pruned: {point.error}")
                print()
            elif error := _print_request(point.config, point.overrides, backends.of(point.config.cluster), mode, shared):
                refused.append(error)
    if refused:
        raise ConfigError(refused[0])


def _print_request(config: Config, overrides: Sequence[str], backend: Backend, mode: str, shared: set[str]) -> str | None:
    """Prints one trial's request, and the place's answer to it; returned where it is a refusal. What trials have in common is printed
    before the first, and kept in ``shared``."""
    job = _job(config)
    request = backend.render(job)
    refusal = answer = None
    if mode == "server":  # before anything is printed: a place that cannot be asked ends the command
        try:
            answer = backend.validate(request) or f"cluster.backend={config.cluster.backend} has no server to ask"
        except ConfigError as error:
            refusal = str(error)
            answer = f"refused: {error}"
        except BackendError as error:
            raise ConfigError(str(error)) from None
    common = backend.shared_request(job)
    if common is not None and common not in shared:
        shared.add(common)
        print(common + "\n")
    _comment(f"trial {job.trial}: {' '.join(overrides)}")
    _comment(Mesh.of(config.layout).picture(config.cluster.gpus_per_node))
    print(request.text + "\n")
    if answer is not None:
        _comment(answer)
    return refusal


def _job(config: Config) -> Job:
    identifier = trial_id(config)
    directory = Store(config.sweep.dir).trials / identifier
    size = world_size_of(config.layout), config.sweep.max_parallel or 0
    name = check_name(config.sweep.name or "dry-run")
    return Job(identifier, name, 0, directory, config.cluster, *size, to_dict(run_of(config)))


def _comment(text: str) -> None:
    """Comments out every line: the output may be run as a script, and an override's value can have several lines."""
    print("\n".join(f"# {line}" for line in text.splitlines()))
