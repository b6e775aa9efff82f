"""A place that does not answer says nothing of its jobs, also where their results need not be fetched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.backends.contract import BackendError
from launcher.backends.pool import Backends
from launcher.config.schema import SweepConfig
from launcher.sweep.run import run_sweep
from launcher.trials.job import Handle, JobState
from tests.search.planted import PlantedBackend
from tests.sweep.support import points, trial
from trainer.shared.records.outcome import Status


class SilentFirst(PlantedBackend):
    """Answers from the third question on."""

    asked = 0

    def poll(self, handles: Sequence[Handle]) -> list[JobState]:
        self.asked += 1
        if self.asked <= 2:
            raise BackendError("nobody answers")
        return super().poll(handles)


def test_a_trial_of_which_nothing_is_heard_goes_on(tmp_path: Path) -> None:
    place = SilentFirst(tmp_path / "place", lambda config: 0.01)
    (record,) = run_sweep("sweep", points(trial()), SweepConfig(dir=str(tmp_path / "runs"), retries=1), Backends(place))
    assert (record.status, record.attempt, len(place.submitted), len(record.history)) == (Status.DONE, 0, 1, 1)
