"""Takes trials from planned to ended: claim, submit, poll, settle; over any backends, many trials at once.

``submitter`` claims and submits, ``poller`` follows, ``stopping`` cancels, ``settlement`` judges ended jobs; ``state`` is what they
share. Every decision is on disk before it is acted on, so that another launcher can continue from any moment.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from launcher.backends.contract import BackendError
from launcher.config.schema import SweepConfig
from launcher.sweep.active_trial import ActiveTrial, by_backend
from launcher.sweep.observer import Observer
from launcher.sweep.poller import Poller
from launcher.sweep.settlement import Settlement
from launcher.sweep.state import SweepState
from launcher.sweep.stopping import Stopper
from launcher.sweep.submitter import Submitter
from launcher.trials.job import JobState
from launcher.trials.lock import Locks
from launcher.trials.store import Record, Store
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.errors import ConfigError

TICK_SECONDS = 0.1


class Loop:
    """One run of a sweep's trials."""

    def __init__(
        self,
        store: Store,
        locks: Locks,
        settings: SweepConfig,
        sweep: str,
        launcher: str,
        observers: Sequence[Observer] = (),
        reading: bool = False,
    ):
        """``reading``: nothing may be ended or removed."""
        self._state = SweepState(store, locks, settings, sweep, launcher, observers, reading)
        self._settlement = Settlement(self._state)
        self._submitter = Submitter(self._state, self._settlement)
        self._stopper = Stopper(self._state, self._settlement, self._submitter)
        self._poller = Poller(self._state, self._settlement, self._stopper)

    def run(self, trials: Iterable[ActiveTrial]) -> None:
        """Until all have ended; with ``sweep.follow=false`` until all that may be submitted are."""
        state = self._state
        state.waiting = sorted(trials, key=lambda trial: not trial.under_way)
        for position, trial in enumerate(state.waiting):
            trial.position = position
        while state.waiting or state.active:
            self._stopper.handle_requests()
            self._stopper.handle_lost()
            self._submitter.launch()
            if not state.settings.follow and not self._submitter.waits_for_room:
                return
            if self._poller.poll():
                continue
            if state.interrupted and all(trial.backend.outlives_launcher for trial in state.active):
                return
            time.sleep(TICK_SECONDS)

    def interrupt(self, words: str) -> None:
        """Makes ``run`` end soon, at any time, for example from a signal handler. ``words`` say why."""
        self._state.interrupted = words

    def catch_up(self, trials: Iterable[ActiveTrial]) -> None:
        """Polls and settles trials that no launcher follows; submits nothing. Raises ``BackendError`` for silent backends, after asking
        all."""
        silent: list[str] = []
        for backend, group in by_backend([trial for trial in trials if self._state.claim(trial) and trial.under_way]):
            try:
                self._submitter.adopt(backend, group)
                self._poller.ask(backend, [trial for trial in group if trial in self._state.active])
            except (BackendError, ConfigError) as error:
                silent.append(str(error))
        if silent:
            raise BackendError("; ".join(dict.fromkeys(silent)))

    def forget(self, trials: Iterable[ActiveTrial], words: str) -> list[Record]:
        """Gives up trials that no launcher runs, without asking their places. Those that another launcher holds are returned."""
        trials = list(trials)
        claimed = [trial for trial in trials if self._state.claim(trial)]
        for trial in claimed:
            trial.record.left, trial.stop = [], (Reason.CANCELLED, words)
            if trial.record.status.final:
                self._state.store.save(trial.record)
                self._state.release(trial)
            else:
                self._settlement.settle(trial, JobState(Status.STOPPED, *trial.stop))
        return [trial.record for trial in trials if trial not in claimed]

    def end(self, trials: Iterable[ActiveTrial], patience_s: float) -> list[Record]:
        """Stops trials that no launcher runs; returns the others. Raises ``BackendError`` after ``patience_s`` of a backend's silence."""
        deadline = time.monotonic() + patience_s
        trials = list(trials)
        claimed = [trial for trial in trials if self._state.claim(trial)]
        for trial in claimed:
            self._state.remove_left_objects(trial)
            if trial.record.status.final:
                self._state.release(trial)
        self._stopper.end([trial for trial in claimed if not trial.record.status.final], Reason.CANCELLED, "")
        left = [trial.record for trial in trials if trial not in claimed]
        while self._state.active:
            self._state.silence = ""
            if not self._poller.poll():
                time.sleep(TICK_SECONDS)
            self._stopper.stop(self._state.active, Reason.CANCELLED, "")  # those whose backend did not answer before
            if self._state.silence and time.monotonic() > deadline:
                raise BackendError(self._state.silence)
        return left
