"""Submitting jobs as arrays, and finding again what was submitted.

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
import io
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from submitit.core.utils import FailedJobError
from submitit.helpers import CommandFunction

from launcher.backends.contract import Request
from launcher.backends.slurm.client import Client, submission_environment
from launcher.backends.slurm.errors import Refused, explain
from launcher.backends.slurm.options import options
from launcher.backends.slurm.script import array_script
from launcher.config.slurm import SlurmCluster
from launcher.trials.job import Handle, Job
from trainer.spec import ConfigError
from trainer.spec.files import read_json, write_text

T = TypeVar("T")


def submit_script(folder: Path, environment: dict[str, str]) -> str:
    """The id of the job that sbatch makes of ``array.sh`` in ``folder``; ``FailedJobError`` with sbatch's words.

    submitit runs the command. Its ``SlurmExecutor`` submits pickled functions; these jobs are a script that a person can read and repeat.
    """
    command = ["flock", str(folder / "lock"), "sbatch", "--parsable", str(folder / "array.sh")]
    with contextlib.redirect_stderr(io.StringIO()):  # where CommandFunction repeats the words of the error
        output = CommandFunction(command, verbose=False, env=environment)()
    return output.partition(";")[0].strip()  # JOB;CLUSTER, in a federation


class Submission:
    """Submits for one cluster configuration, which ``client`` knows."""

    def __init__(self, client: Client):
        self.client = client
        self._last_array: str | None = None

    def submit(self, requests: Sequence[Request], code: str) -> list[Handle]:
        """One handle for each request, in order; those that were submitted before are adopted. ``code`` names what they run.

        Waits while Slurm is silent. ``ConfigError`` when it refuses; arrays that were accepted before that are found by ``find``.
        """
        handles = self.find([request.job for request in requests])
        fresh = [request for request in requests if request.job.name not in handles]
        for group in equal(fresh, lambda request: request.job):
            size = self.client.patiently(lambda: self.client.max_array_size)
            for start in range(0, len(group), size):
                handles |= self._submit_array(group[start : start + size], code)
        return [handles[request.job.name] for request in requests]

    def find(self, jobs: Sequence[Job]) -> dict[str, Handle]:
        """Handles by job name; ``BackendError`` when Slurm stays silent for longer than is worth waiting."""
        intents = [(job, intent) for job in jobs if (intent := read_json(_intent_path(job))) is not None]
        folders = {_arrays(job) / intent["array"] for job, intent in intents}
        ids = {folder.name: self.client.patiently(partial(self._known, folder)) for folder in folders}
        return {job.name: _handle(job, intent, known) for job, intent in intents if (known := ids[intent["array"]]) is not None}

    def _submit_array(self, requests: Sequence[Request], code: str) -> dict[str, Handle]:
        """Write down the intent, submit, write down the id."""
        jobs = [request.job for request in requests]
        of_stage = f"-{jobs[0].trial}" if jobs[0].stage else ""
        name = f"trireme-{jobs[0].sweep}{of_stage}-{uuid.uuid4().hex[:8]}"
        folder = _arrays(jobs[0]) / name
        intents = [{"array": name, "index": index, "code": code} for index in range(len(jobs))]
        for request, intent in zip(requests, intents):
            _write_first(_intent_path(request.job), json.dumps(intent))
            if not request.job.request_path.exists():  # else whoever had it rendered has kept it
                _write_first(request.job.request_path, request.text)
        # sweep.max_parallel holds over all arrays of a sweep: one after the other
        after = f"afterany:{self._last_array}" if self._last_array and jobs[0].max_parallel else None
        write_text(folder / "array.sh", array_script(name, jobs, self.client.cluster, after))
        try:
            identifier = self.client.patiently(lambda: self._known(folder) or self._sbatch(folder, jobs[0]))
        except Refused as error:
            for job in jobs:
                _intent_path(job).unlink(missing_ok=True)
            raise ConfigError(str(error)) from None
        write_text(folder / "job_id", identifier)
        self._last_array = identifier
        return {job.name: _handle(job, intent, identifier) for job, intent in zip(jobs, intents)}

    def _sbatch(self, folder: Path, job: Job) -> str:
        try:
            return submit_script(folder, submission_environment(os.environ, options(job, self.client.cluster)))
        except FailedJobError as error:
            raise explain(str(error), self.client.cluster) from None

    def _known(self, folder: Path) -> str | None:
        """Slurm's id of the array that was to be submitted from ``folder``; None if it never came to be."""
        with contextlib.suppress(FileNotFoundError):
            return (folder / "job_id").read_text()
        if not (folder / "lock").exists():
            return None  # sbatch was never run
        with (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # an sbatch that outlived its launcher may still be at it
        identifier = self._in_queue(folder.name) or self._in_accounts(folder.name)
        if identifier is not None:
            write_text(folder / "job_id", identifier)
        return identifier

    def _in_queue(self, name: str) -> str | None:
        lines = self.client.answer("squeue", "--noheader", "--states=all", f"--name={name}", "--format=%F").split()
        return lines[0] if lines else None

    def _in_accounts(self, name: str) -> str | None:
        if self.client.configuration.get("AccountingStorageType", "").endswith("none"):
            return None
        text = self.client.answer(
            "sacct", "--allocations", "--noheader", "--parsable2", "--starttime=now-90days", f"--name={name}", "--format=JobID"
        )
        return text.split("_")[0].strip() or None


def _write_first(path: Path, text: str) -> None:
    """Write a file that is not read before sbatch runs. A launcher that was killed here writes it again."""
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
        assert isinstance(job.cluster, SlurmCluster)
        alone = [("stage", job.trial)] if job.stage else []  # its name is that of its job
        groups.setdefault((*options(job, job.cluster).items(), *alone), []).append(item)
    yield from groups.values()


def _arrays(job: Job) -> Path:
    return job.directory.parent.parent / "arrays"


def _intent_path(job: Job) -> Path:
    return job.directory / "logs" / f"attempt{job.attempt}.array.json"


def _handle(job: Job, intent: dict[str, Any], identifier: str) -> Handle:
    place = {"job_id": f"{identifier}_{intent['index']}", "array": intent["array"], "code": intent["code"]}
    return place | {"attempt": job.attempt, "directory": str(job.directory)}
