"""A run that makes an artifact of a pipeline: its inputs are whole before it begins, and its manifest is written when all else is there.
The class of its kind (``StageWork``) says how.

Nothing of the launcher is needed where it runs. An artifact that is whole already is left as it is: an attempt that was killed between
its last two writes is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from trainer.launch.rank_env import RankEnv
from trainer.shared.records.artifacts import MANIFEST, ArtifactKind, find_artifact, write_artifact
from trainer.shared.records.outcome import Status
from trainer.shared.records.stage_run import Finish, StageRun
from trainer.shared.records.trial_files import RESULT, attempt_of, failures_in, write_outcome
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import look_again, read_json, write_json
from trainer.shared.run.resolved import ResolvedTrainConfig

REPORT = ".result.json"
"""Hidden file of the run's prepared result: if a rank dies before it reports, the next one does. Not part of an artifact's digest."""
VISIBLE_SECONDS = 30.0
"""Seconds for which another node's files may stay invisible here (caches of NFS)."""
LOOK_SECONDS = 0.2


class StageWork:
    """The rank's half of a kind of stage, by default a run in a new folder. ``all_inputs`` are waited for and required; ``continues`` from
    an earlier attempt's files; ``makes_folder`` itself."""

    all_inputs: ClassVar[bool] = True
    continues: ClassVar[bool] = False
    makes_folder: ClassVar[bool] = False

    def __init__(self, stage: StageRun, config: ResolvedTrainConfig):
        self.stage, self.config, self.folder = stage, config, Path(stage.folder)

    def run(self, run: Callable[[Finish], Status], finish: Finish) -> Status:
        """Does the stage's job, by the configuration's ``run`` or otherwise. Raises ``ConfigError``."""
        return run(finish)

    def complete(self, result: Mapping[str, Any], out: Path) -> None:
        """Adds the artifact's parts from the run's files in ``out`` and its ``result``."""


class ProcessWork(StageWork):
    """Work of one process, without any run on ranks."""

    makes_folder = True

    def run(self, run: Callable[[Finish], Status], finish: Finish) -> Status:
        self.act()
        finish({})
        return Status.DONE

    def act(self) -> None:
        raise NotImplementedError


def work_of(stage: StageRun, config: ResolvedTrainConfig) -> StageWork:
    """Returns the rank's half of the kind of a stage."""
    module, _, name = stage.work.partition(":")
    made: StageWork = getattr(import_module(module), name)(stage, config)
    return made


def make(work: StageWork, run: Callable[[Finish], Status], env: RankEnv, out: Path, attempt: int) -> Status:
    """Makes the artifact of a stage on every rank of ``env``. ``ConfigError`` if an input is not whole, or the work is wrong."""
    stage = work.stage
    if env.rank != 0:
        if stage.made is not None:
            return Status.DONE
        status = work.run(run, lambda result: None)
        _await_rank_0(stage, status, out, attempt)
        return status
    with _alone(work.folder.parent):
        if stage.made is None:
            for name in stage.sources if work.all_inputs else ():
                _check_input(stage, name)
            _clear(work)
            if (status := work.run(run, lambda result: _finish(work, result, out))) is not Status.DONE:
                return status
        if attempt_of(written := read_json(out / RESULT) or {}) < attempt:
            done = written.get("status") == Status.DONE.value
            kept = written if done else read_json(work.folder / REPORT) or {"world_size": env.world_size}
            write_outcome(out / RESULT, kept | {"status": Status.DONE.value, "attempt": attempt})
    return Status.DONE


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits until no process of an earlier attempt works there any more, where the file system knows locks."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_input(stage: StageRun, name: str) -> None:
    """Raises ``ConfigError`` if an input is missing, incomplete, or differs from the planned one."""
    folder, deadline = Path(stage.sources[name]), time.monotonic() + VISIBLE_SECONDS
    while (problem := input_problem(stage, name)) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        look_again(folder)
    if problem:
        raise ConfigError(f"input {name} of stage {stage.name}, {folder}, {problem}")


def input_problem(stage: StageRun, name: str) -> str:
    """Describes an input's defect; empty if it is complete and the planned one."""
    found = find_artifact(Path(stage.sources[name]))
    if found is None:
        return "is not there or not whole; make it again, and share sweep.dir between the nodes"
    identity = found.made_by if name in stage.made_by else found.digest
    return "" if identity == stage.inputs[name] else "is another one than the stage was planned for; repeat the command"


def _clear(work: StageWork) -> None:
    (work.folder / MANIFEST).unlink(missing_ok=True)
    if not work.continues:
        shutil.rmtree(work.folder, ignore_errors=True)
    if not work.makes_folder:
        work.folder.mkdir(parents=True, exist_ok=True)


def _finish(work: StageWork, result: Mapping[str, Any], out: Path) -> None:
    write_json(work.folder / REPORT, result)
    work.complete(result, out)
    write_artifact(work.folder, ArtifactKind(work.stage.gives), work.stage.id, work.stage.inputs)


def _await_rank_0(stage: StageRun, status: Status, out: Path, attempt: int) -> None:
    """Keeps ranks until rank 0 has read the files that it declares complete."""
    while status is Status.DONE and stage.made is None:
        if any(attempt_of(failure) >= attempt for failure in failures_in(out)):
            return
        time.sleep(LOOK_SECONDS)
        look_again(Path(stage.folder))
