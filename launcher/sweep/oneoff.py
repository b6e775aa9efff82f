"""One job outside any sweep, through the same backends: start it, follow it, read its result, leave nothing behind."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from launcher.backends import backend_for
from launcher.backends.contract import Backend, BackendError, NoRoom, Request
from launcher.config.rules import check_installed, run_of
from launcher.config.schema import ClusterConfig, Config
from launcher.interrupt import asked, leave
from launcher.named_files import check_folder
from launcher.trials.identity import digest
from launcher.trials.job import Handle, Job, JobState
from launcher.trials.outcome import Verdict, all_said, decide
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.records.stage_run import StageRun
from trainer.shared.records.trial_files import METRICS, RESULT, failures_in
from trainer.shared.run.derived import world_size_of
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import last_object, look_again, read_json
from trainer.shared.run.read import SECTION, save, to_dict

Tell = Callable[[JobState, dict[str, Any] | None], None]

_END_SECONDS = 60.0
"""Seconds to wait for an interrupted job: a rank may have to be killed."""
_ROOM_SECONDS = 10.0
"""Seconds between submissions to a full queue."""


class JobError(BackendError):
    """The job failed. ``exit_code`` is that of the command: 2 if the job found its input wrong."""

    def __init__(self, words: str):
        super().__init__(words)
        self.exit_code = ConfigError.exit_code if words.startswith(f"{Reason.CONFIGURATION.value}: ") else 1


def run_job(
    config: Config,
    name: str,
    tell: Tell,
    backends: Callable[[ClusterConfig], Backend] = backend_for,
    stage: StageRun | None = None,
    watch: Callable[[Path], object] = lambda folder: None,
    on_signal: Callable[[int, FrameType | None], None] = leave,
) -> dict[str, Any]:
    """Runs a resolved ``config`` once and returns its ``result.json``. Calls ``tell`` with its state and newest metrics.

    Its folder is where trials are, so that all nodes see it, and is always removed. ``stage`` holds the job's further settings and folders;
    ``watch`` is called with its folder while the job runs, and once more when it has ended. Raises ``JobError`` if the job fails,
    ``ConfigError`` if the cluster cannot be used or does not see these folders.
    """
    check_installed(config, name)
    check_folder(config.sweep.dir, "sweep.dir")
    identifier = digest([name, time.time()])  # never that of an earlier job
    root = Path(os.path.abspath(config.sweep.dir)) / name / identifier
    section = {} if stage is None else {SECTION: to_dict(stage)}
    config = config.cluster.located(config, section[SECTION]) if section else config
    content = section | to_dict(run_of(config))
    job = Job(identifier, name, 0, root / "trials" / identifier, config.cluster, world_size_of(config.layout), 1, content)
    backend = backends(config.cluster)
    with asked(on_signal):
        try:
            backend.check()
            job.directory.mkdir(parents=True)
            save(content, job.config_path)
            return _follow(backend, job, tell, watch)
        except BackendError as error:
            raise JobError(str(error)) from error
        finally:
            backend.close()
            shutil.rmtree(root, ignore_errors=True)
            _remove_if_empty(root.parent)


def _follow(backend: Backend, job: Job, tell: Tell, watch: Callable[[Path], object]) -> dict[str, Any]:
    """Submits the job and waits for its end; if interrupted, ends it first."""
    request = backend.render(job)
    job.request_path.parent.mkdir(parents=True, exist_ok=True)
    job.request_path.write_text(request.text)
    for name, text in request.files.items():
        (job.directory / name).write_text(text)
    handle: Handle | None = None
    try:
        handle = _submit(backend, request)
        while not (state := backend.poll([handle])[0]).status.final:
            tell(state, last_object(job.directory / METRICS))
            watch(job.directory)
            time.sleep(backend.poll_seconds)
        backend.collect(job, handle)
        _await_files(job, state, backend.visibility_s)
        watch(job.directory)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            backend.hurry()
        _end(backend, job, handle or backend.find([job]).get(job.name))
        raise
    result = read_json(job.directory / RESULT)
    verdict = decide(job.attempt, state, result, failures_in(job.directory))
    if verdict.status is not Status.DONE or result is None:
        raise JobError(_failure(job, verdict))
    return result


def _submit(backend: Backend, request: Request) -> Handle:
    said = False
    while True:
        try:
            return backend.submit([request])[0]
        except NoRoom as error:
            if not said:
                print(f"{error}; waiting until there is room", file=sys.stderr)
            said = True
        time.sleep(_ROOM_SECONDS)


def _await_files(job: Job, state: JobState, patience_s: float) -> None:
    """Waits for the files of the ranks: a network file system may show them late."""
    deadline = time.monotonic() + patience_s
    while patience_s:
        look_again(job.directory)
        if all_said(job.attempt, state, read_json(job.directory / RESULT), failures_in(job.directory)):
            return
        if time.monotonic() >= deadline:
            return
        time.sleep(0.2)


def _end(backend: Backend, job: Job, handle: Handle | None) -> None:
    """Cancels the job and waits for its end, so that its folder can be removed."""
    if handle is None:
        return
    backend.cancel([handle])
    deadline = time.monotonic() + _END_SECONDS
    while not backend.poll([handle])[0].status.final and time.monotonic() < deadline:
        time.sleep(min(backend.poll_seconds, 0.5))
    backend.collect(job, handle)


def _failure(job: Job, verdict: Verdict) -> str:
    """Returns why the job failed; without a reason, the last line of rank 0."""
    reason = f"{verdict.reason.value}: " if verdict.reason else ""
    log = job.log_path(0)
    last = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
    return reason + (verdict.detail or " ".join(last) or "the job ended without a result")


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:  # another job is under way, or the folder was never made
        return
