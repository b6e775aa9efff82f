"""Finds the states of all jobs in one query: squeue, then sacct for those that the controller has forgotten, then our own files.

A silent controller does not fail jobs; it is asked less and less often.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from launcher.backends.contract import BackendError
from launcher.backends.slurm.client import Client
from launcher.backends.slurm.errors import SchedulerUnavailable, SubmissionRejected
from launcher.backends.slurm.states import ACCOUNT_FIELDS, QUEUE_FIELDS, QueueEntry, earlier, judge, read_accounts, read_queue
from launcher.trials.job import Handle, JobState
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.records.trial_files import RESULT
from trainer.shared.run.files import read_json

_LONGEST_PAUSE_SECONDS = 60.0
_LOST_SECONDS = 120.0
"""Seconds for which a job may be unknown, or unfinished to a lagging accounting, before it is lost."""


class Watcher:
    """Remembers how jobs stood, and since when one is missing."""

    def __init__(self, client: Client):
        self.client = client
        self._known: dict[str, JobState] = {}  # by array and id: ids start again when a controller loses its state
        self._runs: dict[str, tuple[int, tuple[QueueEntry, ...]]] = {}  # restarts when the accounting was asked, and the runs that it knew
        self._missing: dict[str, float] = {}
        self._accounting_answers = False
        self._pause = 0.0
        self._silence, self._silent_until = "", 0.0

    def states(self, handles: Sequence[Handle]) -> list[JobState]:
        """One state for each handle, in order; ``BackendError`` while Slurm is silent."""
        open_ones = [handle for handle in handles if not self._state(handle).status.final]
        if open_ones:
            self._ask(open_ones)
        return [self._state(handle) for handle in handles]

    def _state(self, handle: Handle) -> JobState:
        return self._known.get(_key(handle), JobState(Status.SUBMITTED))

    def _ask(self, handles: Sequence[Handle]) -> None:
        """Brings ``handles`` up to date, unless Slurm was silent a moment ago."""
        if time.monotonic() < self._silent_until:
            raise BackendError(self._silence)
        try:
            queue = self._queue(handles)
        except SchedulerUnavailable as error:
            self._pause = min(2 * self._pause or 2.0, _LONGEST_PAUSE_SECONDS)
            self._silent_until, self._silence = time.monotonic() + self._pause, str(error)
            raise BackendError(self._silence) from None
        self._pause = 0.0
        rows = {_key(handle): _ours(queue.get(handle["job_id"]), handle) for handle in handles}
        doubtful = [handle for handle in handles if self._doubtful(handle, rows[_key(handle)])]
        accounts = self._accounts(doubtful) if doubtful else {}
        for handle in handles:
            self._take(handle, rows[_key(handle)], _ours(accounts.get(handle["job_id"]), handle))
        # a job that counts as ended must not start unobserved
        still_there = [handle for handle in handles if (row := rows[_key(handle)]) is not None and not row.ended]
        self.client.cancel([handle["job_id"] for handle in still_there if self._state(handle).status.final])

    def _doubtful(self, handle: Handle, queued: QueueEntry | None) -> bool:
        """Returns whether accounting may know more: why a job gone from the queue failed, or how earlier runs ended."""
        if queued is None or queued.state == "FAILED":
            return True
        unknown = queued.restarts != self._runs.get(_key(handle), (0, ()))[0]
        return (unknown or (queued.restarts > 0 and queued.ended)) and self.client.accounts

    def _take(self, handle: Handle, queued: QueueEntry | None, accounted: QueueEntry | None) -> None:
        """Trusts the controller for jobs that run, the accounting for those that ended, and the trial's result above both."""
        row = accounted if accounted is not None and accounted.ended else queued
        if row is not None:
            self._missing.pop(_key(handle), None)
            if accounted is not None:
                self._runs[_key(handle)] = (queued.restarts if queued is not None else row.restarts, accounted.runs)
            newest = _newest_start(handle) if row.restarts else handle["attempt"]
            runs = self._runs.get(_key(handle), (0, ()))[1]
            state = replace(judge(row, newest), earlier=earlier(runs, handle["attempt"], newest))
            suspect = (row.restarts and state.status is Status.SUBMITTED) or state.status in (Status.FAILED, Status.STOPPED)
            self._known[_key(handle)] = (_finished(handle, state) if suspect else None) or state
            return
        # Accounting lags behind, or may be down; what neither has ever heard of is gone.
        since = self._missing.setdefault(_key(handle), time.monotonic())
        if (accounted is None and self._accounting_answers) or time.monotonic() - since > _LOST_SECONDS:
            self._known[_key(handle)] = JobState(Status.FAILED, Reason.NODE, f"Slurm knows nothing of job {handle['job_id']} any more")

    def _queue(self, handles: Sequence[Handle]) -> dict[str, QueueEntry]:
        options = ("--noheader", "--array", "--states=all", "--Format=" + ",".join(f"{field}:|" for field in QUEUE_FIELDS))
        try:
            return read_queue(self.client.output("squeue", *options, f"--jobs={_ids(handles)}"))
        except SubmissionRejected as error:
            if "Invalid job id" in str(error):  # none of them is known to the controller any more
                return {}
            raise SchedulerUnavailable(str(error)) from None

    def _accounts(self, handles: Sequence[Handle]) -> dict[str, QueueEntry]:
        """Returns accounting's entries; empty without accounting, or if it does not answer now."""
        options = ("--noheader", "--parsable2", "--duplicates", f"--format={','.join(ACCOUNT_FIELDS)}")
        try:
            rows = read_accounts(self.client.output("sacct", *options, f"--jobs={_ids(handles)}"))
        except (SchedulerUnavailable, SubmissionRejected):
            self._accounting_answers = False
            return {}
        self._accounting_answers = True
        return rows


def _ours(row: QueueEntry | None, handle: Handle) -> QueueEntry | None:
    """``row`` if it is of the job of ``handle``, and not of another one that was given the same id."""
    return row if row is not None and row.name == handle["array"] else None


def _finished(handle: Handle, state: JobState) -> JobState | None:
    """Done, if an earlier start of the job has finished the trial: a controller that forgot that may have queued it again."""
    result = read_json(Path(handle["directory"]) / RESULT) or {}
    done = result.get("status") == Status.DONE.value and result.get("attempt", -1) >= handle["attempt"]
    return JobState(Status.DONE, attempt=result["attempt"], earlier=state.earlier) if done else None


def _newest_start(handle: Handle) -> int:
    """The attempt of the job's last start. Slurm's count of restarts includes some that came to nothing, and forgets others."""
    logs = Path(handle["directory"], "logs").glob("attempt*.slurm.log")
    return max((int(path.name.removeprefix("attempt").partition(".")[0]) for path in logs), default=handle["attempt"])


def _ids(handles: Iterable[Handle]) -> str:
    return ",".join(dict.fromkeys(handle["job_id"].partition("_")[0] for handle in handles))


def _key(handle: Handle) -> str:
    return f"{handle['array']} {handle['job_id']}"
