"""A file with a value of a wrong type is as good as missing, and hides nothing else: every verb that reads goes on, with exit code 0."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli.main import main
from launcher.results.measurements import measure
from launcher.results.ranking import rank
from launcher.tracking import names as tracked
from launcher.trials.store import Record, Store
from tests.draws import draws
from tests.results.trial_files import SweepOnDisk, demo_sweep
from trainer.shared.records.outcome import Status

pytestmark = pytest.mark.slow

Place = tuple[str | int, ...]
WRONG: list[Any] = [None, True, -1, 0, 1.5, "x", "", [], {}, [1], ["x"], [[]], {"a": 1}, {"a": {}}, 1e300, float("nan"), 10**30]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[SweepOnDisk, Record]:
    """A sweep, and a measured trial of it of which there is something in every field."""
    found = demo_sweep(tmp_path_factory.mktemp("runs"))
    record = found.records[2]
    record.handle = {"job": record.id, "pids": [1], "host": "here", "since": 1.0, "code": "0" * 12}
    times = {"started": 1.0, "ended": 2.0}
    record.history = [{"attempt": 0, "status": "failed", "reason": "node", "detail": "x", "nodes": ["a"], "bad_nodes": ["a"]} | times]
    record.predicted = {"step_time_s": 0.2, "interval_s": [0.1, 0.3], "memory_bytes": 2e7, "parts": {"compute": 0.1}}
    record.left = [{"attempt": 0, "handle": {"job": "x"}}]
    found.store.save(record)
    return found, record


def places(data: Any, at: Place = ()) -> Iterator[Place]:
    """Every value in plain data."""
    entries = list(data.items()) if isinstance(data, dict) else list(enumerate(data)) if isinstance(data, list) else []
    for key, value in entries:
        yield (*at, key)
        yield from places(value, (*at, key))


def with_value(data: Any, place: Place, value: Any) -> Any:
    changed = copy.deepcopy(data)
    within = changed
    for key in place[:-1]:
        within = within[key]
    within[place[-1]] = value
    return changed


def read_all(root: Path, record: Record) -> None:
    """What status, rank, report, logs and the mirror read."""
    words = (["status"], ["status", "--all"], ["rank", "--csv", str(root / "table.csv")], ["report", "-o", str(root / "page.html")])
    for verb in words:
        assert main([*verb, "--dir", str(root)]) == 0, verb
    assert main(["logs", record.id, "--dir", str(root)]) in (0, 2), "the record is gone, in one line"
    sweep = Store(root).sweep("planted")
    assert tracked.sweep_tags(sweep, rank(measure(sweep.records))) and int(1000 * sweep.created) >= 0
    assert all(tracked.tags(each, "planted") and tracked.params(each) is not None for each in sweep.records)


@draws(gate=12, campaign=300)
@given(st.data())
def test_one_wrong_value_in_a_record_hides_no_other_trial(planted: tuple[SweepOnDisk, Record], data: st.DataObject) -> None:
    found, record = planted
    path = record.directory / "trial.json"
    whole = json.loads(path.read_text())
    try:
        place = data.draw(st.sampled_from([each for each in places(whole) if each != ("format",)]))  # a newer one is refused, for all
        path.write_text(json.dumps(with_value(whole, place, data.draw(st.sampled_from(WRONG)))))
        read_all(found.store.root, record)
    finally:
        path.write_text(json.dumps(whole))


@draws(gate=8, campaign=300)
@given(st.data())
def test_one_wrong_value_in_a_sweeps_file_is_left_out(planted: tuple[SweepOnDisk, Record], data: st.DataObject) -> None:
    found, record = planted
    path = found.store.sweeps / "planted.json"
    whole = json.loads(path.read_text())
    try:
        place = data.draw(st.sampled_from([place for place in places(whole) if place != ("format",)]))
        path.write_text(json.dumps(with_value(whole, place, data.draw(st.sampled_from(WRONG)))))
        read_all(found.store.root, record)
    finally:
        path.write_text(json.dumps(whole))


@pytest.mark.parametrize(("place", "value"), [
    (("attempt",), "1"), (("config",), []), (("config", "layout"), []), (("config", "layout", "tensor"), "2"), (("config", "run"), None),
    (("started",), "noon"), (("created",), float("nan")), (("id",), 12), (("id",), "0" * 12), (("handle", "code"), []), (("nodes",), "n1"),
    (("world_size",), "4"), (("cluster", "backend"), ["local"]), (("history", 0), 3), (("status",), []),
])  # fmt: skip
def test_a_record_with_a_value_of_a_wrong_type_is_rebuilt_from_its_result(
    planted: tuple[SweepOnDisk, Record], place: Place, value: Any
) -> None:
    found, record = planted
    path = record.directory / "trial.json"
    whole = path.read_text()
    try:
        path.write_text(json.dumps(with_value(json.loads(whole), place, value)))
        rebuilt = found.store.load(record.id)
        assert (rebuilt.status, rebuilt.attempt, rebuilt.config) == (Status.DONE, 0, {})
        read_all(found.store.root, record)
    finally:
        path.write_text(whole)
    assert found.store.load(record.id) == record
