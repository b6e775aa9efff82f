"""Which parts of a trial's configuration become parameters of its run in MLflow, which many can read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.tracking.names import RUN_STATUS, accepted, params
from launcher.trials.store import Record
from tests.draws import draws
from trainer.shared.records.outcome import Status

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tracking")]


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


@draws(gate=40, campaign=2000)
@given(st.lists(st.text("ab_,;/.: é\n", max_size=8) | st.text("a/", min_size=230, max_size=300), unique=True))
def test_every_value_has_a_name_of_its_own_that_mlflow_takes(names: list[str]) -> None:
    from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, _validate_metric_name  # seconds, for each process that collects tests

    found = accepted({name: name for name in names})
    assert sorted(found.values()) == sorted(names)
    for new in found:
        _validate_metric_name(new)
        assert len(new) <= MAX_ENTITY_KEY_LENGTH
    assert all(found[name] == name for name in names if name in ("a", "a_b", "é", "a b", "a/b"))


def test_keys_of_mappings_are_parameters_whatever_their_letters(tmp_path: Path) -> None:
    record = Record("0123456789ab", tmp_path)
    record.cluster = {"labels": {"a,b": "1", "a_b": "2", "x/y": "3"}}
    assert params(record) == {"cluster.labels.a_b": "2", "cluster.labels.a_b_2": "1", "cluster.labels.x/y": "3"}
