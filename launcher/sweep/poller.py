"""Follows submitted trials: polls their backends, records changes, and notices jobs that have ended or should."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from launcher.backends.contract import Backend, BackendError
from launcher.sweep.active_trial import ActiveTrial, by_backend
from launcher.sweep.settlement import Settlement, note_earlier
from launcher.sweep.state import SweepState
from launcher.sweep.stopping import Stopper
from launcher.trials import exclusion
from launcher.trials.job import JobState
from launcher.trials.labels import total_steps
from launcher.trials.outcome import all_said
from launcher.trials.store import Record
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.records.trial_files import failures_in
from trainer.shared.run import steady
from trainer.shared.run.files import look_again

log = logging.getLogger(__name__)

_ROOM_SECONDS = 30.0
"""Seconds for which a job may hold part of its nodes while it waits for the rest; doubled each time it is withdrawn."""


class Poller:
    """Keeps the records of submitted trials up to date."""

    def __init__(self, state: SweepState, settlement: Settlement, stopper: Stopper):
        self._state, self._settlement, self._stopper = state, settlement, stopper

    def poll(self) -> bool:
        """Asks each backend that is due. True when a trial ended, so that there may be room for another."""
        due = [(backend, trials) for backend, trials in by_backend(self._state.active) if self._state.due(backend)]
        ended = [self.ask(backend, trials) for backend, trials in due]
        if due:
            self._state.tell_poll()
        return any(ended)

    def ask(self, backend: Backend, trials: Sequence[ActiveTrial]) -> bool:
        """Asks one backend about its trials. True when one of them ended."""
        self._state.mark_polled(backend)
        try:
            states = backend.poll([trial.handle for trial in trials])
        except BackendError as error:  # nobody answers now: no reason to think that anything has changed
            self._state.note_silence(trials, error)
            return False
        ended = [self._update(trial, job) for trial, job in zip(trials, states, strict=True)]
        return any(ended)

    def _update(self, trial: ActiveTrial, job: JobState) -> bool:
        """Records the state of a trial's job. True when it has ended."""
        record, reading = trial.record, self._state.reading
        if note_earlier(record, job):
            self._state.store.save(record)
        if job.attempt is not None and job.attempt > record.attempt:
            record.attempt = job.attempt
        if job.status.final and (self._files_awaited(trial, job) or self._need_awaited(trial, job)):
            return False
        if job.status.final or (not reading and (self._lingers(trial, job) or self._waits_too_long(trial, job))):
            return self._collect(trial, job)
        if not reading:
            self._watch_room(trial, job)
            job = self._readmit(trial, job)
        self._record(trial, job)
        return False

    def _collect(self, trial: ActiveTrial, job: JobState) -> bool:
        """Collects the results of an ended job and settles its trial. False when they are out of reach now."""
        record, reading = trial.record, self._state.reading
        try:
            trial.backend.collect(self._state.job(trial), trial.handle, remove=not reading)
        except BackendError as error:
            self._state.note_silence([trial], error)
            return False
        if reading and trial.backend.leaves_objects:
            record.left.append({"attempt": record.attempt, "handle": trial.handle})
        self._state.active.remove(trial)
        self._settlement.settle(trial, job)
        return True

    def _record(self, trial: ActiveTrial, job: JobState) -> None:
        record = trial.record
        expected = None if job.expected is None else job.expected // 60 * 60
        seen = (job.status, job.started or record.started, job.nodes or record.nodes, job.detail, expected)
        if seen == (record.status, record.started, record.nodes, record.detail, record.expected):
            return
        changed = record.status is not job.status
        record.status, record.started, record.nodes, record.detail, record.expected = seen
        self._state.store.save(record)
        if changed:
            self._state.tell(record)

    def _need_awaited(self, trial: ActiveTrial, job: JobState) -> bool:
        """Returns whether its queue dropped it and it is unknown yet whether its dependency is retried."""
        return job.reason is Reason.UPSTREAM and trial.lost is None and any(need in self._state.active for need in trial.unmet)

    # -- files that arrive late -----------------------------------------------------------------------------------------

    def _files_awaited(self, trial: ActiveTrial, job: JobState) -> bool:
        """The job has ended, and files of its ranks may still appear: a network file system may show them late."""
        record, patience = trial.record, trial.backend.visibility_s
        if not patience or trial.stop is not None or not (record.started or job.started or job.nodes):
            return False
        look_again(record.directory)
        if _files_complete(trial, job):
            return False
        if record.end_clock is None:
            record.detail = "its job has ended; the files of its ranks are not visible here yet"
        return self._waited(record, "end_clock") < patience

    # -- jobs that do not start or do not end ---------------------------------------------------------------------------

    def _watch_room(self, trial: ActiveTrial, job: JobState) -> None:
        """Warns when a trial waits long for room, and withdraws it when it is in the way of an earlier one."""
        if not job.waits_for_room or trial.stop is not None or trial.withdrawn:
            trial.room_wanted = None
            return
        if trial.room_wanted is None:
            trial.room_wanted = time.monotonic()
        if time.monotonic() - trial.room_wanted < _ROOM_SECONDS * 2 ** min(trial.withdrawals, 6):
            return
        words = f"trial {trial.record.id} waits for room for all of its parts ({job.detail})"
        if words != trial.room_words:
            trial.room_words = words
            remedy = "it is withdrawn and submitted again later" if job.yields else "set cluster.start_timeout to limit the wait"
            log.warning("%s; %s", words, remedy)
        if job.yields and self._stopper.cancel([trial]):
            trial.withdrawn, trial.withdrawals = job.detail, trial.withdrawals + 1

    def _lingers(self, trial: ActiveTrial, job: JobState) -> bool:
        """Cancels a job that outlives its result by ``cluster.linger_s``, unless only its cluster is still busy; returns whether it did."""
        if job.status is not Status.RUNNING or trial.record.read_result() is None:
            trial.result_seen = None  # it may have been that of an attempt before a requeue
            return False
        trial.result_seen = trial.result_seen or time.monotonic()
        if time.monotonic() - trial.result_seen < trial.cluster.linger_s:
            return False
        return job.clearing_up or self._stopper.cancel([trial])

    def _waits_too_long(self, trial: ActiveTrial, job: JobState) -> bool:
        """Returns whether a job did not start within ``cluster.start_timeout``, and cancels it as one that cannot start."""
        limit, record = trial.cluster.start_timeout, trial.record
        if job.status is not Status.SUBMITTED or record.started or not limit or self._waited(record, "queue_clock") < limit:
            return False
        words = f": {job.detail}" if job.detail else ""
        trial.stop = (Reason.CANNOT_START, f"did not start within cluster.start_timeout={limit:g} s{words}")
        return self._stopper.cancel([trial])

    def _waited(self, record: Record, clock: str) -> float:
        """Seconds since the mark that the record has as ``clock``. A machine that cannot compare it counts from now."""
        waited = steady.age(getattr(record, clock))
        if waited is None:
            setattr(record, clock, steady.mark())
            self._state.store.save(record)
        return waited or 0.0

    def _readmit(self, trial: ActiveTrial, job: JobState) -> JobState:
        """Lets a job that waits use nodes again whose exclusion has ended; its state, with the nodes that it still leaves out."""
        record = trial.record
        if job.status is not Status.SUBMITTED or not record.avoided_words:
            return job
        left = [e for e in trial.exclusions() if e.node in record.avoided]
        allowed = replace(self._state.job(trial), avoid=exclusion.names(left))
        if len(left) < len(record.avoided) and trial.backend.readmit(allowed, trial.handle):
            record.avoided, record.avoided_words = exclusion.names(left), exclusion.words(left, left)
            self._state.store.save(record)
        return replace(job, detail="; ".join(filter(None, [job.detail, record.avoided_words])))


def _files_complete(trial: ActiveTrial, job: JobState) -> bool:
    record, result = trial.record, trial.record.read_result()
    if result is not None and result.get("status") == Status.DONE.value:
        if record.config.get("command") and job.status is Status.FAILED and not failures_in(record.directory):
            return False  # a rank failed: what it wrote tells whether that was in its shutdown
        return trial.read_last_step() >= (total_steps(record) or 0)
    return all_said(record.attempt, job, result, failures_in(record.directory))
