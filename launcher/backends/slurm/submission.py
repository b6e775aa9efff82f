"""Submits jobs as arrays, and finds submitted ones again.

Before an array is submitted, each of its trials notes the array's name and its own place in it (the *intent*). The name
is unique, so whatever happens to the launcher, the queue can be asked whether the array came to be: no trial is lost or
submitted twice.

    <root>/arrays/<name>/array.sh     the script of the array
                         lock         held while sbatch runs, by sbatch itself: it may outlive the launcher
                         job_id       Slurm's id, once it is known
    <trial>/logs/attempt0.array.json  the intent
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from launcher.backends.contract import BackendError, NoRoom, Request
from launcher.backends.slurm.client import ANSWER_SECONDS, Client, job_ids, submission_environment
from launcher.backends.slurm.errors import NoArray, QueueFull, SchedulerUnavailable, SubmissionRejected, explain, plain
from launcher.backends.slurm.login import Login
from launcher.backends.slurm.options import options
from launcher.backends.slurm.plan import SlurmJobPlan
from launcher.backends.slurm.script import array_script
from launcher.trials.job import Handle, Job
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import read_json, write_text

T = TypeVar("T")
_NO_LOCK = 66
"""flock's exit code for a file that it cannot open (EX_NOINPUT)."""

_LOOK_SECONDS = 0.1
"""Seconds between checks whether an sbatch has ended or nobody waits for it any more."""
_SUBMISSION_SECONDS = 5 * ANSWER_SECONDS
"""Seconds for an sbatch: a controller that is busy with many submissions answers late."""
_GRACE_SECONDS = 5.0
"""Seconds for an sbatch once nobody waits any more."""
_EARLIER_SECONDS = 60.0
"""Seconds for an sbatch of an earlier start before the user is told."""


def submit_script(
    folder: Path, environment: dict[str, str], given_up: Callable[[], bool], login: Login
) -> subprocess.CompletedProcess[str]:
    """Returns sbatch's answer to ``array.sh`` in ``folder``. Raises ``SchedulerUnavailable`` if it outlives ``given_up``, or hangs and is
    killed. It has a session of its own: a Ctrl-C must not leave a job that nobody knows of."""
    if login.host is not None:
        (folder / "lock").touch()  # seen here at once, whenever a network file system shows that of the login node
    command = login.command(["flock", str(folder / "lock"), "sbatch", "--parsable", str(folder / "array.sh")])
    process = subprocess.Popen(
        command, env=login.environment(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    left, begin = _GRACE_SECONDS, time.monotonic()
    while True:
        try:
            said, complained = process.communicate(timeout=_LOOK_SECONDS)
            return subprocess.CompletedProcess(command, process.returncode, said, complained)
        except subprocess.TimeoutExpired:
            left -= _LOOK_SECONDS if given_up() else 0.0
        if left <= 0:
            raise SchedulerUnavailable("sbatch has not ended yet; the next start asks the queue for what it submits")
        if time.monotonic() - begin > _SUBMISSION_SECONDS:
            _kill_session(process)
            raise SchedulerUnavailable(f"Slurm cannot be reached: sbatch did not answer within {_SUBMISSION_SECONDS:g} s")


def _kill_session(process: subprocess.Popen[str]) -> None:
    """Ends ``process`` and its children, such as the real sbatch under a site's wrapper."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Submission:
    """Submits for one cluster configuration, which ``client`` knows."""

    def __init__(self, client: Client):
        self.client = client
        self._submitted: list[str] = []  # ids, in order

    def submit(self, requests: Sequence[Request], code: str) -> list[Handle]:
        """Returns one handle for each request, in order; adopts earlier submissions. Waits while Slurm is silent. Raises ``ConfigError`` if
        it refuses, ``NoRoom`` if its queue is full; ``find`` returns arrays that were accepted before."""
        handles = self.find([request.job for request in requests])
        fresh = [request for request in requests if request.job.name not in handles]
        for group in equal(fresh, lambda request: request.job):
            size = self.client.patiently(lambda: self.client.max_array_size)
            while group:
                try:
                    handles |= self._submit_together(group[:size], code, size > 1)
                    group = group[size:]
                except QueueFull as error:  # a limit counts each trial of an array: there may be room for fewer
                    if len(group[:size]) == 1:
                        raise NoRoom(str(error)) from None
                    size = len(group[:size]) // 2
                except NoArray as error:  # by a site's own rules, or its limit has changed
                    if size == 1:
                        raise ConfigError(str(error)) from None
                    size = max(1, len(group[:size]) // 2)
        return [handles[request.job.name] for request in requests]

    def find(self, jobs: Sequence[Job]) -> dict[str, Handle]:
        """Handles by job name; ``BackendError`` when Slurm stays silent for longer than is worth waiting."""
        intents = [(job, intent) for job in jobs if (intent := read_json(_intent_path(job))) is not None]
        folders = {_arrays(job) / intent["array"] for job, intent in intents}
        ids = {folder.name: self.client.patiently(partial(self.known, folder)) for folder in folders}
        return {job.name: _handle(job, intent, known) for job, intent in intents if (known := ids[intent["array"]]) is not None}

    def _submit_together(self, requests: Sequence[Request], code: str, as_array: bool) -> dict[str, Handle]:
        """Records the intent, submits, and records the id. ``QueueFull`` and ``NoArray`` leave nothing. One request needs no array."""
        jobs = [request.job for request in requests]
        of_stage = f"-{jobs[0].trial}" if jobs[0].stage else ""
        name = f"{jobs[0].cluster.name_prefix}-{jobs[0].sweep}{of_stage}-{uuid.uuid4().hex[:8]}"
        folder = _arrays(jobs[0]) / name
        intents = [{"array": name, "index": index if as_array else None, "code": code} for index in range(len(jobs))]
        for request, intent in zip(requests, intents):
            _write_first(_intent_path(request.job), json.dumps(intent))
            if not request.job.request_path.exists():  # else whoever had it rendered has kept it
                _write_first(request.job.request_path, request.text)
        # sweep.max_parallel holds over all arrays of a sweep: one after the other; and of jobs without arrays, so many in a row
        in_a_row = jobs[0].max_parallel and (jobs[0].max_parallel if self.client.max_array_size == 1 else 1)
        after = f"afterany:{self._submitted[-in_a_row]}" if 0 < in_a_row <= len(self._submitted) else None
        write_text(folder / "array.sh", array_script(name, jobs, after, as_array))
        try:
            identifier = self.client.patiently(lambda: self.known(folder) or self.sbatch(folder, options(SlurmJobPlan(jobs[0]))))
        except (SubmissionRejected, QueueFull) as error:
            for job in jobs:
                _intent_path(job).unlink(missing_ok=True)
            if isinstance(error, SubmissionRejected) and not isinstance(error, NoArray):
                raise ConfigError(str(error)) from None
            shutil.rmtree(folder)  # there may be many of these
            raise
        write_text(folder / "job_id", identifier)
        self._submitted.append(identifier)
        return {job.name: _handle(job, intent, identifier) for job, intent in zip(jobs, intents)}

    def sbatch(self, folder: Path, chosen: Mapping[str, str | None]) -> str:
        """Submits ``array.sh`` of ``folder``, which has ``chosen`` options, and returns Slurm's id. Raises ``SubmissionRejected`` for a
        plain no alone: other answers may hide a job, for which ``known`` asks."""
        environment = submission_environment(os.environ, chosen)
        login = self.client.login
        done = submit_script(folder, environment, lambda: self.client.hurried, login)
        if failure := login.failure(done.returncode, done.stderr):
            raise SchedulerUnavailable(failure)  # it may have been submitted all the same
        if login.host is not None and ("Unable to open file" in done.stderr or done.returncode == _NO_LOCK):
            raise SubmissionRejected(
                f"cluster.submit.ssh={login.host} has no {folder}: the folder of the sweep (sweep.dir) must be one that this machine and "
                "the cluster share, under the same path"
            )
        if done.returncode < 0 or done.returncode > 128:  # flock returns 128 and the number of the signal
            raise SchedulerUnavailable("sbatch was killed before it said whether it submitted the job")
        if done.returncode:
            raise explain(done.stderr, self.client.cluster)
        ids = job_ids(done.stdout)
        identifier = ids[0] if len(ids) == 1 else self.known(folder)
        if identifier is None:
            raise BackendError(
                f"sbatch did not say which job it submitted (it said {plain(done.stdout) or 'nothing'!r}), and the queue has none of the "
                f"name {folder.name}; see what stands before Slurm's own sbatch here (`type -a sbatch`), then start the same command again"
            )
        return identifier

    def known(self, folder: Path) -> str | None:
        """Slurm's id of the array that was to be submitted from ``folder``; None if it never came to be."""
        with contextlib.suppress(FileNotFoundError):
            return (folder / "job_id").read_text()
        if not (folder / "lock").exists():
            return None  # sbatch was never run
        if self.client.login.host is None:
            with (folder / "lock").open() as lock:
                self._await(lock)
        else:
            self._await_there(folder / "lock")
        queue = self.client.answer("squeue", "--noheader", "--states=all", f"--name={folder.name}", "--format=%F")
        identifier = _first_id("squeue", queue) or self._in_accounts(folder.name)
        if identifier is not None:
            write_text(folder / "job_id", identifier)
        return identifier

    def _await(self, lock: IO[str]) -> None:
        """Returns when no sbatch holds ``lock``: one that outlived its launcher may still be at it. ``SchedulerUnavailable`` when that
        takes long."""
        begin = time.monotonic()
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            if time.monotonic() - begin > (_GRACE_SECONDS if self.client.hurried else _EARLIER_SECONDS):
                raise SchedulerUnavailable("an sbatch that an earlier start ran has not ended yet")
            time.sleep(_LOOK_SECONDS)

    def _await_there(self, lock: Path) -> None:
        """Asks the login node likewise. A folder that it does not have holds no lock."""
        seconds = _GRACE_SECONDS if self.client.hurried else min(_EARLIER_SECONDS, ANSWER_SECONDS / 2)
        script = '[ -e "$1" ] || { echo free; exit 0; }; flock --timeout "$2" "$1" echo free || echo held'
        if self.client.answer("sh", "-c", script, "sh", str(lock), str(int(seconds))).split()[-1:] != ["free"]:
            raise SchedulerUnavailable("an sbatch that an earlier start ran has not ended yet")

    def _in_accounts(self, name: str) -> str | None:
        if not self.client.accounts:
            return None
        text = self.client.answer(
            "sacct", "--allocations", "--noheader", "--parsable2", "--starttime=now-90days", f"--name={name}", "--format=JobID"
        )
        return _first_id("sacct", text)


def _first_id(command: str, answer: str) -> str | None:
    """Returns the array's id in the answer of ``command`` to its name. Raises ``SchedulerUnavailable`` for other output, which may hide
    it."""
    ids = job_ids(answer)
    if not ids and answer.strip():
        raise SchedulerUnavailable(f"the answer of {command} cannot be read: {plain(answer)!r}")
    return ids[0] if ids else None


def _write_first(path: Path, text: str) -> None:
    """Writes a file that is not read before sbatch runs. A launcher that was killed here writes it again."""
    try:
        path.write_text(text, encoding="utf-8")
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def equal(items: Iterable[T], job_of: Callable[[T], Job]) -> Iterator[list[T]]:
    """``items`` whose jobs have equal options, and can go out as one array, in order of first appearance."""
    groups: dict[tuple[tuple[str, str | None], ...], list[T]] = {}
    for item in items:
        job = job_of(item)
        alone = [("stage", job.trial)] if job.stage else []  # its name is that of its job
        groups.setdefault((*options(SlurmJobPlan(job)).items(), *alone), []).append(item)
    yield from groups.values()


def _arrays(job: Job) -> Path:
    return job.directory.parent.parent / "arrays"


def _intent_path(job: Job) -> Path:
    return job.directory / "logs" / f"attempt{job.attempt}.array.json"


def _handle(job: Job, intent: dict[str, Any], identifier: str) -> Handle:
    of_array = "" if intent["index"] is None else f"_{intent['index']}"
    place = {"job_id": identifier + of_array, "array": intent["array"], "code": intent["code"]}
    return place | {"attempt": job.attempt, "directory": str(job.directory)}
