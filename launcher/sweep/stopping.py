"""Ending trials before their time: on interruption, and on the stop requests that other commands leave in the store."""

from __future__ import annotations

import time
from collections.abc import Sequence

from launcher.backends.contract import BackendError
from launcher.sweep.active_trial import ActiveTrial, by_backend
from launcher.sweep.settlement import Settlement
from launcher.sweep.state import SweepState
from launcher.sweep.submitter import Submitter
from launcher.trials.outcome import Verdict
from trainer.shared.records.outcome import Reason, Status

_REQUESTS_SECONDS = 0.5
"""Seconds between reads of stop requests."""


class Stopper:
    """Cancels jobs, and finishes trials that were never submitted."""

    def __init__(self, state: SweepState, settlement: Settlement, submitter: Submitter):
        self._state, self._settlement, self._submitter = state, settlement, submitter
        self._requests_read = float("-inf")

    def handle_requests(self) -> None:
        """Acts on an interruption and on the stop requests that ``Store.ask_to_stop`` left."""
        state = self._state
        if state.interrupted:
            state.waiting = []
            self.stop([t for t in state.active if not t.backend.outlives_launcher], Reason.CANCELLED, state.interrupted)
        if time.monotonic() - self._requests_read < _REQUESTS_SECONDS:
            return
        self._requests_read = time.monotonic()
        requests = state.store.stop_requests()
        for request in dict.fromkeys(requests.values()):
            wanted = [trial for trial in [*state.waiting, *state.active] if requests.get(trial.record.id) == request]
            self.stop([trial for trial in wanted if trial in state.active], *request)
            claimed = [t for t in wanted if t in state.waiting and state.claim(t)]  # the others are stopped by whoever runs them
            state.waiting = [trial for trial in state.waiting if trial not in claimed]
            self.end(claimed, *request)

    def handle_lost(self) -> None:
        """Cancels trials whose dependency has failed, last first (Slurm starts those behind a forgotten job); withdraws those of retried
        ones."""
        state = self._state
        for trial in reversed([trial for trial in [*state.waiting, *state.active] if trial.needs]):
            if trial.lost_words and trial in state.active:
                self.stop([trial], Reason.UPSTREAM, trial.lost_words)
            elif trial.lost is not None and not trial.under_way and state.claim(trial):
                state.waiting.remove(trial)
                self._settlement.finish(trial, Verdict(Status.FAILED, Reason.UPSTREAM, trial.lost_words, trial.record.attempt))
            elif (
                trial in state.active and not trial.withdrawn and any(need in state.waiting and not need.under_way for need in trial.unmet)
            ):
                trial.withdrawn = "its dependency is retried" if self.cancel([trial]) else ""

    def end(self, trials: Sequence[ActiveTrial], reason: Reason, detail: str) -> None:
        """Stops claimed trials that this launcher has not submitted: they may be done, or left under way by a previous launcher."""
        never_submitted: list[ActiveTrial] = []
        for backend, group in by_backend([trial for trial in trials if not trial.settled and trial.under_way]):
            missing = self._submitter.adopt(backend, group)
            never_submitted += missing
            self.stop([trial for trial in group if trial not in missing], reason, detail)
        for trial in trials:
            if trial in never_submitted or not (trial.settled or trial.under_way):
                self._settlement.finish(trial, Verdict(Status.STOPPED, reason, detail, trial.record.attempt))
            elif trial.settled:
                self._state.release(trial)

    def stop(self, trials: Sequence[ActiveTrial], reason: Reason, detail: str) -> None:
        """Cancels submitted trials. Those whose backend does not answer are tried again by the next call."""
        for _, group in by_backend([trial for trial in trials if trial.stop is None]):
            if self.cancel(group):
                for trial in group:
                    trial.stop = (reason, detail)

    def cancel(self, trials: Sequence[ActiveTrial]) -> bool:
        """Cancels jobs of one backend, all at once. False when it does not answer now."""
        try:
            trials[0].backend.cancel([trial.handle for trial in trials])
        except BackendError as error:
            self._state.note_silence(trials, error)
            return False
        return True
