"""Attempts that their place has ended after some steps are no tries: a trial goes on for as long as it gets further."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.backends.pool import Backends
from launcher.config.schema import SweepConfig
from launcher.sweep.run import run_sweep
from launcher.sweep.search import lost_s
from launcher.sweep.settlement import note_earlier
from launcher.trials.job import Handle, JobState
from launcher.trials.store import Record
from tests.search.planted import PlantedBackend
from tests.sweep.support import points, trial
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.records.trial_files import read_steps
from trainer.shared.run.files import write_json

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


def test_an_attempt_that_its_place_follows_by_another_is_entered_as_seen_until_the_place_tells_of_it(tmp_path: Path) -> None:
    record = Record("0" * 12, tmp_path, Status.RUNNING, started=1000.0, nodes=("n1",))
    assert not note_earlier(record, JobState(Status.RUNNING, attempt=0)) and not record.history
    assert note_earlier(record, JobState(Status.RUNNING, attempt=2))
    record.attempt = 2
    (seen,) = record.history
    assert (seen["attempt"], seen["started"], seen["nodes"]) == (0, 1000.0, ["n1"]) and seen["ended"] > 1000.0
    runs = (
        JobState(Status.FAILED, Reason.NODE, "a node failed (n1)", 1000.0, ("n1",), 1060.0, 0),
        JobState(Status.STOPPED, Reason.PREEMPTED, "put back into the queue (n2)", 1100.0, ("n2",), 1140.0, 1),
    )
    assert note_earlier(record, JobState(Status.RUNNING, attempt=2, earlier=runs))
    assert [(entry["attempt"], entry["reason"], entry["nodes"]) for entry in record.history] == [
        (0, "node", ["n1"]),
        (1, "preempted", ["n2"]),
    ]
    assert lost_s(record) == 100.0
    assert not note_earlier(record, JobState(Status.RUNNING, attempt=2, earlier=runs)), "it is said once"
