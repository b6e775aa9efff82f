"""From waiting to submitted: claim a trial, adopt its job if there is one already, else write down the intent and submit.

A record says ``submitted`` without a handle before its job is submitted. A launcher that is killed at any moment leaves a record from
which the next launcher finds the job again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.backends.contract import Backend, BackendError, NoRoom, Request
from launcher.sweep.active_trial import ActiveTrial, by_backend
from launcher.sweep.settlement import Settlement
from launcher.sweep.state import SweepState
from launcher.trials import exclusion
from launcher.trials.job import Handle, JobState
from launcher.trials.outcome import Verdict
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run import steady
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import write_text

log = logging.getLogger(__name__)


_LONGEST_PAUSE_SECONDS = 60.0
"""Longest seconds between submissions to a full backend, unless one of the sweep's jobs ends: others have jobs, too."""


@dataclass
class _Room:
    """State of a backend that took no more jobs."""

    most: int  # trials to try next
    jobs: int  # of the sweep that it had then
    pause: float = 1.0
    again: float = 0.0  # monotonic; when to try, should none of them end before


class Submitter:
    """Submits waiting trials while there is room for more."""

    def __init__(self, state: SweepState, settlement: Settlement):
        self._state, self._settlement = state, settlement
        self._rooms: dict[int, _Room] = {}  # by id() of their backends

    @property
    def waits_for_room(self) -> bool:
        return bool(self._rooms) and any(id(trial.backend) in self._rooms for trial in self._state.waiting)

    def launch(self) -> None:
        """Claims and submits as many waiting trials, in order, as there is room for; then those that were to come after them in a queue."""
        while self._launch() and any(trial.needs and self._ready(trial) for trial in self._state.waiting):
            pass

    def _launch(self) -> bool:
        """True when something was submitted."""
        batch = self._claim_batch()
        fresh = [trial for trial in batch if not trial.under_way]
        for backend, trials in by_backend([trial for trial in batch if trial.under_way]):
            try:
                fresh += self.adopt(backend, trials)
            except BackendError as error:
                self._ask_later(backend, trials, str(error))
        for backend, trials in by_backend(fresh):
            self._submit(backend, trials)
        return bool(batch)

    def adopt(self, backend: Backend, trials: Sequence[ActiveTrial]) -> list[ActiveTrial]:
        """Takes over trials that a previous launcher left under way. Those that were never submitted are returned."""
        without = [trial for trial in trials if trial.record.handle is None]
        found = backend.find([self._state.job(trial) for trial in without]) if without else {}
        missing = []
        for trial in trials:
            trial.record.handle = trial.record.handle or found.get(self._state.job(trial).name)
            if trial.record.handle is None:
                # Ranks that end with their launcher may still be ending: only another attempt is fenced against them.
                trial.record.attempt += 0 if backend.outlives_launcher else 1
                missing.append(trial)
            else:
                trial.inherited = True
        self._state.start_tracking([trial for trial in trials if trial.record.handle is not None])
        return missing

    # -- which trials ---------------------------------------------------------------------------------------------------

    def _claim_batch(self) -> list[ActiveTrial]:
        """Waiting trials that may be submitted or adopted now. They are claimed, and wait no longer."""
        state, batch = self._state, list[ActiveTrial]()
        for trial in list(state.waiting):
            if not self._ready(trial):
                continue
            if not self._has_room(trial, batch) or self._held_back(trial, batch):
                break
            if not trial.under_way and self._full(trial, batch):
                continue
            if trial.claimed and trial.under_way and not state.due(trial.backend):
                continue  # its backend did not answer a moment ago
            if not state.claim(trial):
                self._say_who_runs(trial)
                continue
            state.waiting.remove(trial)
            state.remove_left_objects(trial)
            if trial.settled:
                state.release(trial)
                state.tell(trial.record)
            else:
                batch.append(trial)
        return batch

    def _ready(self, trial: ActiveTrial) -> bool:
        """Returns whether its dependencies are done, or queued where the scheduler enforces them. A running trial is always followed."""
        chained = trial.backend.chains
        return trial.under_way or all(chained and need in self._state.active and need.backend is trial.backend for need in trial.unmet)

    def _has_room(self, trial: ActiveTrial, batch: Sequence[ActiveTrial]) -> bool:
        """Returns whether one more trial may run: ``sweep.max_parallel``, and the ranks that the backend can hold."""
        limit = self._state.limit(trial.backend) if self._state.keeps_limit(trial.backend) else 0
        capacity = trial.backend.capacity()
        if not limit and capacity is None:
            return True
        others = self._others(trial, batch)
        if limit and len(others) >= limit:
            return False
        return capacity is None or not others or sum(other.record.world_size for other in (*others, trial)) <= capacity

    def _full(self, trial: ActiveTrial, batch: Sequence[ActiveTrial]) -> bool:
        """Returns whether its backend recently took no more jobs and, as far as known, has as many still."""
        room = self._rooms.get(id(trial.backend))
        if room is None:
            return False
        freed = room.jobs - self._jobs(trial.backend)
        tried = sum(other.backend is trial.backend and not other.under_way for other in batch)
        return tried >= max(room.most, freed) or (freed <= 0 and time.monotonic() < room.again)

    def _jobs(self, backend: Backend) -> int:
        return sum(trial.backend is backend for trial in self._state.active)

    def _held_back(self, trial: ActiveTrial, batch: Sequence[ActiveTrial]) -> bool:
        others = (self._state.job(other) for other in self._others(trial, batch))
        return not trial.under_way and bool(trial.backend.admits(self._state.job(trial), others))

    def _others(self, trial: ActiveTrial, batch: Sequence[ActiveTrial]) -> list[ActiveTrial]:
        return [other for other in (*self._state.active, *batch) if other.backend is trial.backend]

    def _say_who_runs(self, trial: ActiveTrial) -> None:
        """Once for each trial that another launcher holds; it is tried again until that launcher releases it."""
        if not trial.held_elsewhere:
            holder = self._state.store.load(trial.record.id)
            words = f"{holder.launcher or 'another launcher'} for sweep {holder.sweep or '?'}"
            log.warning("trial %s is being run by %s; waiting for it", trial.record.id, words)
            trial.held_elsewhere = True

    # -- submission -----------------------------------------------------------------------------------------------------

    def _submit(self, backend: Backend, trials: Sequence[ActiveTrial]) -> None:
        """Records the intent, submits, and records the handles."""
        ready = self._intended(trials)
        if not ready:
            return
        self._state.store.save_intended([trial.record for trial, _ in ready])
        try:
            handles, failure = self._handles(backend, [request for _, request in ready])
        except BackendError as silence:  # whether they were started is found out when somebody answers
            self._ask_later(backend, [trial for trial, _ in ready], str(silence))
            return
        for (trial, _), handle in zip(ready, handles, strict=True):
            trial.record.handle = handle
        self._state.start_tracking([trial for trial, _ in ready if trial.record.handle is not None])
        left = [trial for trial, _ in ready if trial.record.handle is None]
        full = failure.status is Status.PLANNED
        self._note_room(backend, len(ready), len(left) if full else 0, failure.detail)
        if full:
            self._settlement.wait_for_room(left, failure.detail)
            return
        for trial in left:
            if self._state.interrupted and failure.reason is Reason.CANNOT_START:  # nobody waited until it was submitted
                self._settlement.submit_later(trial)
            else:
                self._settlement.settle(trial, failure)

    def _note_room(self, backend: Backend, tried: int, left: int, why: str) -> None:
        """Updates the known room with a submission: ``left`` of the ``tried`` trials have to wait."""
        room = self._rooms.get(id(backend))
        if left:
            if room is None:
                log.warning("%s; trials wait, and are submitted as there is room", why)
            self._state.full.add(id(backend))
            pause = min(2 * room.pause, _LONGEST_PAUSE_SECONDS) if room and left == tried else 1.0
            self._rooms[id(backend)] = _Room(1, self._jobs(backend), pause, time.monotonic() + pause)
        elif room is not None:
            self._rooms[id(backend)] = _Room(2 * tried, self._jobs(backend), 1.0, time.monotonic() + 1.0)

    def _intended(self, trials: Sequence[ActiveTrial]) -> list[tuple[ActiveTrial, Request]]:
        """Each trial with its request. One that cannot be rendered, or cannot ever run there, is finished."""
        ready = []
        for trial in trials:
            try:
                trial.check_fits()
                ready.append((trial, self._intend(trial)))
            except ConfigError as error:
                self._settlement.finish(trial, Verdict(Status.FAILED, Reason.CONFIGURATION, str(error), trial.record.attempt))
        return ready

    @staticmethod
    def _handles(backend: Backend, requests: Sequence[Request]) -> tuple[list[Handle | None], JobState]:
        """Returns a handle or None for each request, and why: ``planned`` without room. Raises ``BackendError`` if unknown."""
        try:
            return [*backend.submit(requests)], JobState(Status.SUBMITTED)
        except (ConfigError, BackendError) as error:
            found = backend.find([request.job for request in requests])
            reason = Reason.CONFIGURATION if isinstance(error, ConfigError) else Reason.CANNOT_START
            left = JobState(Status.PLANNED, None, str(error)) if isinstance(error, NoRoom) else JobState(Status.FAILED, reason, str(error))
            return [found.get(request.job.name) for request in requests], left

    def _ask_later(self, backend: Backend, trials: Sequence[ActiveTrial], detail: str) -> None:
        """Puts trials back that were, or may have been, submitted to a backend that does not answer now."""
        self._state.mark_polled(backend)
        self._state.note(trials, detail)
        self._state.waiting[:0] = trials

    def _intend(self, trial: ActiveTrial) -> Request:
        """Renders the next attempt of a trial. Its record, not saved yet, says that it is about to be submitted."""
        record = trial.record
        record.attempt += 1 if record.status.final else 0  # files of an earlier attempt are never taken for this one's
        self._choose_nodes(trial)
        request = trial.backend.render(self._state.job(trial))
        write_text(request.job.request_path, request.text)
        for name, text in request.files.items():
            write_text(record.directory / name, text)
        record.status, record.reason, record.detail = Status.SUBMITTED, None, record.avoided_words
        record.handle, record.launcher, record.sweep = None, self._state.launcher, self._state.sweep
        record.submitted, record.started, record.ended, record.nodes = time.time(), None, None, ()
        record.queue_clock, record.end_clock = steady.mark(), None
        trial.first_step, trial.result_seen, trial.inherited = trial.read_last_step(), None, False
        return request

    def _choose_nodes(self, trial: ActiveTrial) -> None:
        """Decides which nodes the next attempt leaves out."""
        record, wanted = trial.record, trial.exclusions()

        def possible(nodes: tuple[str, ...]) -> bool:
            return trial.backend.can_place(replace(self._state.job(trial), avoid=nodes))

        chosen = exclusion.choose(wanted, possible)
        record.avoided, record.avoided_words = exclusion.names(chosen), exclusion.words(wanted, chosen)
