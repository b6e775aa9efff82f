"""Between Hydra and the sweep loop: the jobs that Hydra composes become the points of a sweep, records become its results."""

from __future__ import annotations

import hashlib
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

from launcher.backends.pool import Backends
from launcher.config import Config, check_launchable, locate_data, resolve, to_config
from launcher.config.compose import plain_errors
from launcher.config.hardware import typed
from launcher.config.jobs import Jobs
from launcher.config.schema import SweepConfig
from launcher.console import say
from launcher.cost import Prediction, predict
from launcher.cost.thresholds import CANNOT_FIT
from launcher.named_files import check_folder
from launcher.sweep.at_work import Command
from launcher.sweep.bill import confirm, of_points
from launcher.sweep.dry_run import print_requests
from launcher.sweep.run import Point, check_clusters, run_sweep
from launcher.tracking import process
from launcher.tracking.reachable import check_experiment, check_tracking
from launcher.trials.store import UNDER_WAY, Store, check_name
from trainer.shared.parallel.mesh import Mesh
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.records.trial_files import positive
from trainer.shared.run.derived import world_size_of
from trainer.shared.run.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from omegaconf import DictConfig

    from launcher.trials.store import Record


class Multirun:
    """One ``trireme train`` command: gathers the records of everything that it ran. ``train`` is the task that Hydra calls."""

    def __init__(self, overrides: Sequence[str], detach: bool = False):
        """``detach``: goes on in the background once its first trials are known."""
        self.overrides, self._detach = tuple(overrides), detach
        self.records: list[Record] = []
        self.backends = Backends()  # a sweeper may come back with more jobs for the same fork server; whoever runs this closes them
        self.folder = ""  # of the trials, once it is known
        self.error: ConfigError | OSError | None = None
        self._command: Command | None = None
        self._mirrors: dict[tuple[str, str], process.MlflowMirror] = {}  # a sweeper may come back with more jobs for the same sweep

    def train(self, composed: DictConfig) -> float:
        """Runs one composed job; its step time in seconds."""
        try:
            return self.run([(self.overrides, to_config(composed))])[0]
        except (ConfigError, OSError) as error:  # Hydra would print its own words first
            self.error = error
            return math.inf

    def run(self, jobs: Sequence[tuple[Sequence[str], Config]], more: bool = False) -> list[float]:
        """Runs composed jobs as one sweep; returns their step times, infinite if not measured. Raises ``ConfigError`` if none can run."""
        if not jobs:
            raise ConfigError("there is nothing to run: range() or glob() in an override stands for no value; give it some")
        points = [_point(overrides, config) for overrides, config in jobs]
        if all(point.config is None for point in points) and not more:
            raise ConfigError(points[0].error or "nothing to run")
        settings = jobs[0][1].sweep
        name = check_name(settings.name or sweep_name(self.overrides))
        self.folder = settings.dir
        check_folder(settings.dir, "sweep.dir")
        dry_run = jobs[0][1].dry_run
        if dry_run:
            print_requests(points, dry_run)
            return [math.inf] * len(points)
        check_clusters(Store(settings.dir), points, settings, self.backends)
        if len(points) == 1 and points[0].config is not None:
            _say_grid(points[0].config)
        _say_predictions(points)
        command = self._command or Command(settings.dir, name, settings.notify)
        confirm(of_points(points, settings), settings.confirm_gpu_hours, "predicted")
        if self._detach and self._command is None:
            command.detach(dir_option(settings.dir))
        self._command = command
        if (settings.dir, name) not in self._mirrors:
            if _starts_something(points, settings):
                check_tracking_of(jobs[0][1])
            self._mirrors[settings.dir, name] = process.MlflowMirror(
                settings.dir, name, settings.mlflow_wait_s, jobs[0][1].tracking.loggers
            )
        records = run_sweep(name, points, settings, self.backends, [self._mirrors[settings.dir, name], command])
        self.records += records
        _say_what_next(name, records, settings)
        return [_objective(record) for record in records]

    def finish(self, patience_s: float | None = None, error: BaseException | None = None) -> None:
        """Ends the command, by ``error`` if there is one: copies the rest to MLflow, waiting if something was measured, else in the
        background."""
        measured = all(record.status.final for record in self.records)
        for mirror in [mirror for mirror in self._mirrors.values() if mirror.begun]:  # of a sweep that was refused there is nothing to copy
            mirror.finish(patience_s if measured else 0)
        if self._command is not None:
            self._command.end(error)

    @property
    def exit_code(self) -> int:
        """Returns 0 if each trial is answered or under way and one can be trained, 1 if the same command would run one again."""
        known = all(record.status in (*UNDER_WAY, Status.PRUNED) or record.answered() for record in self.records)
        trained = any(record.status in (*UNDER_WAY, Status.DONE) for record in self.records)
        return 0 if not self.records or (known and trained) else 1


def launch(context: Any, task: MethodType, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int) -> Sequence[JobReturn]:
    """Composes every job before it starts any, then runs all as one sweep, for Hydra's launcher plugin. ``task``: ``Multirun.train``."""
    from hydra.core.utils import JobReturn, JobStatus

    multirun = task.__self__
    assert isinstance(multirun, Multirun)
    jobs, composer = [], Jobs(lambda lines: context.config_loader.load_sweep_config(config, lines))
    for overrides in job_overrides:
        with plain_errors():
            jobs.append((tuple(overrides), composer.config(overrides)))
    adaptive = not str(config.hydra.sweeper._target_).startswith("hydra_plugins.trireme.")
    if adaptive:  # such sweepers expect of a launcher that the folder of their result is there
        Path(config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
    returns = []
    for (overrides, _), value in zip(jobs, multirun.run(jobs, more=adaptive)):
        # A failed trial counts as infinitely slow: a sweeper continues, and the ranking says why it failed.
        result = JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED)
        result.return_value = value
        returns.append(result)
    return returns


def _starts_something(points: Sequence[Point], settings: SweepConfig) -> bool:
    """Returns whether some trial has neither a result nor a running job."""
    store = Store(settings.dir)
    records = (store.load(point.trial) for point in points if point.config is not None)
    return any(settings.rerun or not (record.answered() or record.status in (Status.SUBMITTED, Status.RUNNING)) for record in records)


def check_tracking_of(config: Config) -> None:
    """Raises ``ConfigError`` if tracking is impossible; only warns of pods, which may reach a server that this machine does not."""
    check_experiment(config.tracking)
    try:
        check_tracking(config.tracking, Path(config.sweep.dir))
    except ConfigError as error:
        if not config.cluster.own_network or not (config.tracking.uri or "").startswith("http"):
            raise
        say(f"from here, {error}; trials report to it themselves, and any later command completes what only the launcher knows")


def _say_predictions(points: Sequence[Point]) -> None:
    for point in points:
        if point.config is not None and point.predicted is not None:
            seconds, memory = point.predicted["step_time_s"], point.predicted["memory_bytes"]
            say(f"predicted {seconds:.3g} s a step, {memory / 1e9:.3g} GB: {' '.join(point.overrides) or point.config.model.family}")


def _say_grid(config: Config) -> None:
    """Prints which rank holds which part; ``--dry-run`` also prints large clusters."""
    if world_size_of(config.layout) <= 64:
        say(Mesh.of(config.layout).picture(config.cluster.gpus_per_node))


def _say_what_next(name: str, records: Sequence[Record], settings: SweepConfig) -> None:
    """The commands that a person is likely to want now, with this sweep's name filled in."""
    where = name + dir_option(settings.dir)
    failed = [r for r in records if r.status is Status.FAILED]
    if failed:
        say(f"{len(failed)} of {len(records)} trials failed; see: trireme logs {failed[0].id}" + where.removeprefix(name))
    say(f"ranking: trireme rank {where}    page: trireme report {where}    MLflow: trireme ui {where}")


def dir_option(folder: str) -> str:
    """Returns the options with which a verb finds the trials in ``folder``, after a space; empty for the default."""
    return "" if folder == SweepConfig().dir else f" --dir{'=' if folder.startswith('-') else ' '}{shlex.quote(folder)}"


def sweep_name(overrides: Sequence[str]) -> str:
    """Derives the sweep's name from the overrides in any order, so that the same command continues it."""
    return "sweep-" + hashlib.sha256("\n".join(sorted(overrides)).encode()).hexdigest()[:8]


def _point(overrides: Sequence[str], config: Config) -> Point:
    """A job whose values do not fit together, or into memory, is a pruned point of the sweep, not the end of it."""
    try:
        if config.run.task != "train":
            raise ConfigError(f"run.task={config.run.task} measures a machine and trains nothing; run 'trireme doctor'")
        check_launchable(config)
        config = locate_data(resolve(config))
    except ConfigError as error:
        return Point(tuple(overrides), None, str(error))
    prediction = _prediction(config)
    if prediction is not None and prediction.fits < CANNOT_FIT and not config.sweep.ignore_memory:
        return Point(tuple(overrides), None, _too_large(config, prediction), reason=Reason.OUT_OF_MEMORY)
    if prediction is None:
        return Point(tuple(overrides), config)
    predicted = {
        "step_time_s": prediction.step_time_s,
        "interval_s": list(prediction.interval_s),
        "memory_bytes": prediction.memory_bytes,
        "parts": prediction.time,
    }
    return Point(tuple(overrides), config, predicted=predicted)


def _prediction(config: Config) -> Prediction | None:
    """Returns the prediction if the hardware is known."""
    if not config.cluster.hardware.peak_tflops.get(config.run.precision) or config.cluster.network_unknown:
        return None
    return predict(config.model, config.layout, config.run, config.cluster, config.trainer, config.tune, config.optimizer)


def _too_large(config: Config, prediction: Prediction) -> str:
    parts = sorted(prediction.memory.items(), key=lambda item: -item[1])[:3]
    return (
        f"the layout needs about {prediction.memory_bytes / 1e9:.1f} GB on its fullest rank ("
        + ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts)
        + f") and {typed(config.cluster.hardware.name)} has {prediction.capacity / 1e9:.1f}; "
        "raise layout.tensor, layout.pipeline, layout.sharding or layout.recompute, or set sweep.ignore_memory=true to try all the same"
    )


def _objective(record: Record) -> float:
    result = record.read_result() or {}
    value = positive(result.get("step_time_s"))
    return value if record.status is Status.DONE and value else math.inf
