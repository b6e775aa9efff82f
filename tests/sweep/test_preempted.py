"""Attempts that their place has ended after some steps are no tries: a trial goes on for as long as it gets further."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.backends.pool import Backends
from launcher.config.schema import SweepConfig
from launcher.sweep.run import run_sweep
from launcher.trials.job import Handle, JobState
from tests.search.planted import PlantedBackend
from tests.sweep.support import points, trial
from trainer.spec import Reason, Status
from trainer.spec.files import write_json
from trainer.spec.records import read_steps

STEPS, RETRIES = 5, 1


class Preempting(PlantedBackend):
    """Each attempt goes one step further, up to ``most``, and is preempted unless it was the last step."""

    def __init__(self, folder: Path, most: int):
        super().__init__(folder, lambda config: 0.01)
        self.most = most

    def _step(self, handle: Handle) -> JobState:
        job = self._change(handle)
        directory, step = Path(str(job["directory"])), 0
        if (step := len(read_steps(directory)) + 1) <= self.most:
            with (directory / "metrics.jsonl").open("a") as stream:
                stream.write(json.dumps({"attempt": job["attempt"], "step": step, "step_time_s": 0.01}) + "\n")
        ended = "done" if min(step, self.most) == STEPS else "stopped"
        write_json(directory / "result.json", {"status": ended, "attempt": job["attempt"], "step_time_s": 0.01})
        return JobState(Status.DONE) if ended == "done" else JobState(Status.STOPPED, Reason.PREEMPTED)


@pytest.mark.parametrize(("most", "status", "attempts"), [(STEPS, Status.DONE, STEPS), (2, Status.STOPPED, 2 + 1 + RETRIES)])
def test_a_preempted_trial_is_tried_as_often_as_it_gets_further_and_then_so_often(
    tmp_path: Path, most: int, status: Status, attempts: int
) -> None:
    place = Preempting(tmp_path / "place", most)
    settings = SweepConfig(dir=str(tmp_path / "runs"), retries=RETRIES)
    (record,) = run_sweep("sweep", points(trial(steps=STEPS)), settings, Backends(place))
    assert (record.status, len(place.submitted), len(record.history)) == (status, attempts, attempts)
