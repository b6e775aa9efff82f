"""Which parts of a trial's configuration become parameters of its run in MLflow, which many can read."""

from __future__ import annotations

from pathlib import Path

from launcher.tracking.names import RUN_STATUS, params
from launcher.trials.store import Record
from trainer.spec import Status


def test_variables_of_the_ranks_and_where_runs_are_mirrored_are_no_parameters(tmp_path: Path) -> None:
    record = Record("0123456789ab", tmp_path)
    record.config = {"layout": {"tensor": 2}, "run": {"steps": 5}, "tracking": {"uri": "http://somewhere"}}
    hardware = {"name": "cpu", "calibration": {"launch": 1.0}}
    record.cluster = {"backend": "local", "env": {"WORD": "private", "LEVEL": {"deep": "private"}}, "hardware": hardware}
    assert params(record) == {
        "layout.tensor": "2",
        "run.steps": "5",
        "cluster.backend": "local",
        "cluster.hardware.name": "cpu",
    }


def test_a_run_has_finished_only_where_its_trial_is_done() -> None:
    assert [status for status, word in RUN_STATUS.items() if word == "FINISHED"] == [Status.DONE]
    assert RUN_STATUS.keys() == set(Status)
