"""The state that the parts of the sweep loop share: waiting and submitted trials, and how their records are locked and saved."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence

from launcher.backends.contract import Backend, BackendError
from launcher.config.schema import SweepConfig
from launcher.sweep.active_trial import ActiveTrial
from launcher.sweep.observer import Observer
from launcher.trials.job import Job
from launcher.trials.lock import Locks
from launcher.trials.store import Record, Store

log = logging.getLogger(__name__)


class SweepState:
    """One run of a sweep's trials."""

    def __init__(
        self, store: Store, locks: Locks, settings: SweepConfig, sweep: str, launcher: str, observers: Sequence[Observer], reading: bool
    ):
        self.store, self.settings, self.sweep, self.launcher = store, settings, sweep, launcher
        self.reading = reading  # nothing may be ended or removed: remains of ended jobs are noted for whoever may
        self.interrupted = ""  # why the run has to end, in words
        self.silence = ""  # the words of the backend that did not answer last
        self.waiting: list[ActiveTrial] = []
        self.active: list[ActiveTrial] = []  # submitted, and not yet ended
        self.full: set[int] = set()  # backends that took no more jobs at some time, by id()
        self._locks, self._observers = locks, observers
        self._polled: dict[int, float] = {}  # monotonic; when each backend was last asked, by id()

    # -- locks and records ----------------------------------------------------------------------------------------------

    def claim(self, trial: ActiveTrial) -> bool:
        """Locks the trial against other launchers and reads their records. False while one of them holds it."""
        if not trial.claimed:
            if not self._locks.take(trial.record.id):
                return False
            trial.claimed = True
            trial.refresh(self.store.load(trial.record.id))
        return True

    def release(self, trial: ActiveTrial) -> None:
        self.store.forget_stop(trial.record)
        self._locks.free(trial.record.id)
        trial.claimed = False

    def save_and_tell(self, record: Record) -> None:
        self.store.save(record)
        self.tell(record)

    def tell(self, record: Record) -> None:
        for observer in self._observers:
            observer.on_trial(record)

    def tell_poll(self) -> None:
        for observer in self._observers:
            observer.on_poll([trial.record for trial in self.active])

    def note(self, trials: Sequence[ActiveTrial], detail: str) -> None:
        """Records a remark on trials whose status stays as it is."""
        for trial in trials:
            if trial.record.detail != detail:
                trial.record.detail = detail
                self.store.save(trial.record)

    def note_silence(self, trials: Sequence[ActiveTrial], error: BackendError) -> None:
        """The backend of these trials does not answer now."""
        self.silence = str(error)
        self.note(trials, self.silence)

    def start_tracking(self, trials: Sequence[ActiveTrial]) -> None:
        """These have been submitted: save their handles and poll them from now on."""
        for trial in trials:
            trial.record.launcher = self.launcher
        self.store.save_all([trial.record for trial in trials])
        for trial in trials:
            self.active.append(trial)
            self.tell(trial.record)

    # -- jobs and backends ----------------------------------------------------------------------------------------------

    def job(self, trial: ActiveTrial) -> Job:
        return trial.job(0 if id(trial.backend) in self.full else self.limit(trial.backend))

    def keeps_limit(self, backend: Backend) -> bool:
        """Returns whether the loop, not the backend's queue, limits running trials: a queue that is given few at a time sees only those."""
        return not backend.throttles or id(backend) in self.full

    def limit(self, backend: Backend) -> int:
        """Trials that may run at once; 0 = any number. A queue gives every job resources of its own, one machine does not."""
        given = self.settings.max_parallel
        if given is not None:
            return given
        return 0 if backend.outlives_launcher else 1

    def due(self, backend: Backend) -> bool:
        return time.monotonic() - self._polled.get(id(backend), float("-inf")) >= backend.poll_seconds

    def mark_polled(self, backend: Backend) -> None:
        self._polled[id(backend)] = time.monotonic()

    def remove_left_objects(self, trial: ActiveTrial) -> None:
        """Removes objects that read-only commands have left of ended attempts."""
        record = trial.record
        try:
            while record.left:
                old = record.left[-1]
                trial.backend.collect(dataclasses.replace(self.job(trial), attempt=old["attempt"]), old["handle"])
                record.left.pop()
                self.store.save(record)
        except BackendError as error:  # they do no harm, and the next command tries again
            log.warning("files of trial %s cannot be removed now: %s", record.id, error)
