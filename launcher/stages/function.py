"""The function of another Hydra application as trials: ``hydra/launcher=trireme``. Each job that a sweeper asks for is a stage of one
process, on any backend that shares this machine's files; what the function returns is what the sweeper optimises.

    <root>/trials/ID/call.pkl                 the function, its configuration, and Hydra's state
    <root>/stages/ID/artifact/returned.pkl    what Hydra knows of the finished job (``JobReturn``)

A trial's id is made of the function's name and source, the configuration and the output folder: with the same ``hydra.sweep.dir``, a
repeated command runs the missing ones, and all of them once the function has been edited.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
import pickle
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.backends.pool import Backends
from launcher.config import Config, compose
from launcher.config.compose import register_schema
from launcher.config.packages import need
from launcher.stages.stage import one_process
from launcher.sweep.run import run_sweep
from launcher.trials.identity import digest
from launcher.trials.store import UNDER_WAY, Point, Record, Store
from trainer.shared.records.artifacts import ArtifactKind
from trainer.shared.records.stage_run import RETURNED_FILE, StageRun
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import DataConfig

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

WORK = "trainer.stages.call:CallWork"
CALL_FILE = "call.pkl"


class TrialFailed(RuntimeError):
    """A trial ended without a return of its function: killed, out of memory, lost with its node."""


@dataclasses.dataclass(frozen=True)
class Application:
    """A Hydra application whose function is to be called: its context, function, and configuration without the overrides of a job."""

    context: HydraContext
    function: TaskFunction
    config: DictConfig

    @property
    def name(self) -> str:
        return str(self.config.hydra.job.name)

    def job(self, overrides: Sequence[str], number: int) -> DictConfig:
        """Composes job ``number`` of a sweep."""
        from omegaconf import open_dict

        composed = self.context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(composed):
            composed.hydra.job.id, composed.hydra.job.num = str(number), number
        return composed


def settings_of(overrides: Sequence[str]) -> Config:
    """Composes where trials run, from overrides in Trireme's own keys, and leaves no trace in the application's Hydra. Raises
    ``ConfigError``."""
    need("functions", "hydra/launcher=trireme")
    with _own_hydra():
        config = compose(overrides)
    config = dataclasses.replace(config, data=DataConfig(kind="synthetic"))
    if not config.cluster.shares_files:
        raise ConfigError(
            f"hydra/launcher=trireme needs a cluster that shares this machine's files, and cluster={config.cluster.backend} does not; use "
            "cluster=local or cluster=slurm"
        )
    if not config.sweep.follow:
        raise ConfigError("sweep.follow=false with hydra/launcher=trireme, whose sweeper waits for what the function returns; leave it out")
    return one_process(config, config.model)


def call_all(app: Application, settings: Config, backends: Backends, jobs: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
    """Runs one batch of ``jobs``, given by their overrides and numbered from ``first``, and returns what Hydra has to know of each.

    ``backends`` stay open for the next batch, for which their processes are then there. Composes all before it starts any. A failed call
    does not hide the others: its error is raised when a sweeper reads its value.
    """
    Path(str(app.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
    composed = [app.job(overrides, first + index) for index, overrides in enumerate(jobs)]
    store = Store(settings.sweep.dir)
    points = [_point(app, settings, store, job) for job in composed]
    name = settings.sweep.name or f"{app.name[:40]}-{digest(os.path.abspath(str(app.config.hydra.sweep.dir)))[:8]}"
    records = run_sweep(name, points, settings.sweep, backends)
    return [_returned(point, record, job) for point, record, job in zip(points, records, composed, strict=True)]


def _point(app: Application, settings: Config, store: Store, job: DictConfig) -> Point:
    """Returns a job's point, with its call on disk."""
    from hydra.core.singleton import Singleton
    from omegaconf import OmegaConf

    where = _output_folder(job)
    task = {str(name): value for name, value in OmegaConf.to_container(job).items() if name != "hydra"}  # type: ignore[union-attr]
    function = app.function
    named = [getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__qualname__), _source(function)]
    overrides = list(job.hydra.overrides.task)
    identifier = digest({"stage": "call", "function": named, "config": repr(task), "overrides": overrides, "output": where})
    call = partial(_call, app.context, function, job, Singleton.get_state(), sys.argv)
    path = store.trials / identifier / CALL_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    (written := path.with_suffix(".new")).write_bytes(_pickled(call, app.name))
    written.replace(path)  # whole at any time: the trial may be under way
    told = {"call": str(path), "folder": os.getcwd(), "path": [os.path.abspath(entry) for entry in sys.path]}
    folder = str(store.root / "stages" / identifier / "artifact")
    stage = StageRun(f"job-{job.hydra.job.num}", "call", identifier, folder, ArtifactKind.RETURNED.value, work=WORK, settings=told)
    if store.load(identifier).status not in UNDER_WAY and (settings.sweep.rerun or stage.made is None):
        shutil.rmtree(folder, ignore_errors=True)  # what an earlier attempt returned
    return Point(tuple(overrides), settings, stage=stage)


def _source(function: TaskFunction) -> str:
    """Returns a function's own lines; "" for a callable object, or another that has none."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def _pickled(call: partial[Any], name: str) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(call)  # type: ignore[no-any-return]
    except Exception as error:
        raise ConfigError(
            f"the function of {name} cannot be sent to another process ({type(error).__name__}: {error}); make that inside of it"
        ) from None


def _call(
    context: HydraContext,
    function: TaskFunction,
    config: DictConfig,
    state: Mapping[str, Any],
    argv: Sequence[str],
) -> tuple[bytes, BaseException | None]:
    """Runs a job where it was sent; returns what Hydra knows of it, pickled, and the function's error."""
    import cloudpickle
    from hydra.core.singleton import Singleton
    from hydra.core.utils import JobStatus, run_job, setup_globals

    sys.argv = list(argv)
    Singleton.set_state(state)
    setup_globals()
    returned = run_job(
        hydra_context=context, task_function=function, config=config, job_dir_key="hydra.sweep.dir", job_subdir_key="hydra.sweep.subdir"
    )
    try:
        packed = cloudpickle.dumps(returned)
    except Exception as error:
        value, returned.status = returned._return_value, JobStatus.FAILED
        returned.return_value = (
            RuntimeError(f"{type(value).__name__}: {value}")
            if isinstance(value, BaseException)
            else TypeError(f"the function returned a {type(value).__name__}, which cannot be sent to another process: {error}")
        )
        packed = cloudpickle.dumps(returned)
    return packed, returned._return_value if returned.status is JobStatus.FAILED else None


def _returned(point: Point, record: Record, job: DictConfig) -> JobReturn:
    """Reads what a trial returned; a failure in its words, where it did not come to that."""
    from hydra.core.utils import JobReturn, JobStatus
    from omegaconf import open_dict

    assert point.stage is not None
    path = Path(point.stage.folder, RETURNED_FILE)
    if record.status.final and path.is_file():
        found = pickle.loads(path.read_bytes())
        assert isinstance(found, JobReturn)
        return found
    task = copy.deepcopy(job)
    with open_dict(task):
        del task["hydra"]
    returned = JobReturn(list(point.overrides), task, job, status=JobStatus.FAILED)
    reason = f"{record.reason.value}: " if record.reason else ""
    returned.return_value = TrialFailed(f"trial {record.id}: {reason}{record.detail or record.status.value}; see: trireme logs {record.id}")
    return returned


def _output_folder(job: DictConfig) -> str:
    """Returns the folder into which Hydra has the job write."""
    from hydra.core.hydra_config import HydraConfig

    known = HydraConfig.instance()
    before = known.cfg
    try:
        known.set_config(job)
        return os.path.abspath(os.path.join(str(job.hydra.sweep.dir), str(job.hydra.sweep.subdir)))
    finally:
        known.cfg = before


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Gives us a Hydra beside the application's, whose groups may have the names of ours, and whose job is under way."""
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins
    from hydra.core.singleton import Singleton

    kept = Singleton._instances
    of_hydra = {name: entry for name, entry in ConfigStore.instance().repo.items() if name in ("hydra", "_dummy_empty_config_.yaml")}
    Singleton._instances = {kind: one for kind, one in kept.items() if kind in (Plugins, SourcesRegistry)}
    ConfigStore.instance().repo = copy.deepcopy(of_hydra)
    register_schema.cache_clear()
    try:
        yield
    finally:
        Singleton._instances = kept
        register_schema.cache_clear()
