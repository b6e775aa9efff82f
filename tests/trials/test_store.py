"""The files are the only state: whole or absent, rebuilt where they are lost, and named plainly where they are unknown."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli.main import main
from launcher.trials.store import Point, Record, Store, check_name
from tests.sweep.support import points, sweep, trial
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import last_object, look_again, read_json, remove_if, write_json, write_json_first
from trainer.shared.run.read import load, to_dict


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs")


def plan(store: Store, *seeds: int, name: str = "demo") -> list[Record]:
    records = [store.plan(point, name) for point in points(*(trial(seed=seed) for seed in seeds))]
    for record in records:
        store.save(record)
    store.write_sweep(name, records, "test")
    return records


def test_a_planned_trial_has_its_configuration_and_its_record_on_disk(store: Store) -> None:
    (record,) = plan(store, 1)
    assert to_dict(load(record.directory / "config.yaml")) == to_dict(trial(seed=1).train_config())
    assert store.load(record.id) == record
    assert record.status is Status.PLANNED


@pytest.mark.parametrize(
    "text", ["a: b", "- x", "null", "1e3", "'\"", "line\nline", " ", "#x", "&a *a !b", "\x85\u2028", "\U0001f6a3", "%", "\t", "\\"]
)
def test_any_text_in_a_configuration_reaches_the_trainer_unchanged(store: Store, text: str) -> None:
    record = store.plan(points(trial(text))[0], "demo")
    assert load(record.directory / "config.yaml").data.pattern == text


def test_a_record_comes_back_as_it_was_written(store: Store) -> None:
    (record,) = plan(store, 1)
    record.status, record.reason, record.detail, record.attempt = Status.FAILED, Reason.NODE, "line 1\nline 2 \"'$(x)", 3
    record.handle, record.nodes, record.history = {"job_id": "12_3"}, ("n1", "n2"), [{"attempt": 0}]
    store.save(record)
    assert store.load(record.id) == record


def test_planning_again_keeps_what_is_known_of_the_trial(store: Store) -> None:
    (record,) = plan(store, 1)
    record.status, record.attempt, record.submitted = Status.RUNNING, 2, 5.0
    store.save(record)
    (again,) = plan(store, 1, name="other")
    assert (again.status, again.attempt, again.submitted, again.created) == (Status.RUNNING, 2, 5.0, record.created)


@pytest.mark.parametrize("torn", ["", "{", '{"id": 1', "[]", '{"status": "no such"}', '{"id": "x", "status": "done", "reason": "?"}'])
def test_a_torn_record_of_a_finished_trial_is_rebuilt_from_its_result(store: Store, torn: str) -> None:
    (record,) = plan(store, 1)
    write_json(record.directory / "result.json", {"status": "done", "attempt": 2})
    (record.directory / "trial.json").write_text(torn)
    (rebuilt,) = store.sweep("demo").records
    assert (rebuilt.status, rebuilt.attempt, rebuilt.answered()) == (Status.DONE, 2, True)


def test_a_rebuilt_record_of_a_trial_that_a_search_ended_is_not_taken_for_whole(store: Store) -> None:
    (record,) = plan(store, 1)
    write_json(record.directory / "result.json", {"status": "done", "reason": "measured", "attempt": 0})
    (record.directory / "trial.json").write_text("")
    (rebuilt,) = store.sweep("demo").records
    assert (rebuilt.status, rebuilt.reason) == (Status.DONE, Reason.MEASURED)
    assert not rebuilt.answered() and rebuilt.answered([Reason.MEASURED])


@pytest.mark.parametrize("lost", ["trial.json", "config.yaml", "result.json"])
def test_a_lost_file_hides_no_other_trial(store: Store, lost: str) -> None:
    first, second = plan(store, 1, 2)
    (first.directory / lost).unlink(missing_ok=True)
    assert [record.id for record in store.sweep("demo").records] == [first.id, second.id]


def test_a_trial_whose_result_was_deleted_is_not_taken_for_measured(store: Store) -> None:
    (record,) = plan(store, 1)
    write_json(record.directory / "result.json", {"status": "done", "attempt": 0})
    record.status = Status.DONE
    assert record.answered()
    (record.directory / "result.json").unlink()
    assert not record.answered()


@pytest.mark.parametrize("text", ["{", "[1]", '{"points": 3}', '{"points": [3, {"trial": "../x"}, {"trial": null}]}'])
def test_a_damaged_sweep_file_is_read_without_an_error(store: Store, text: str) -> None:
    plan(store, 1)
    (store.sweeps / "demo.json").write_text(text)
    assert store.sweep("demo").records == []
    plan(store, 1)
    assert len(store.sweep("demo").records) == 1


def test_a_sweep_keeps_its_order_and_grows_by_points_it_did_not_have(store: Store) -> None:
    first = plan(store, 3, 1)
    second = plan(store, 1, 2)
    assert [r.id for r in store.sweep("demo").records] == [first[0].id, first[1].id, second[1].id]


def test_a_pruned_point_is_listed_with_its_reason_and_has_no_directory(store: Store) -> None:
    record = store.plan(Point(("layout.tensor=3",), None, "3 does not divide 4"), "demo")
    store.write_sweep("demo", [record], "test")
    (listed,) = store.sweep("demo").records
    assert (listed.status, listed.reason, listed.detail) == (Status.PRUNED, Reason.CONFIGURATION, "3 does not divide 4")
    assert not listed.directory.exists()


def test_the_newest_sweep_is_the_one_written_last(store: Store) -> None:
    for name in ("b", "a", "c"):
        plan(store, 1, name=name)
        os.utime(store.sweeps / f"{name}.json", ns=(1, "bac".index(name)))
    assert store.sweep().name == "c"
    assert store.names() == ["c", "a", "b"]


@pytest.mark.parametrize("name", ["demo (copy)", "._demo", "-dash", "ü", "", "x" * 65, "a\nb"])
def test_a_file_whose_name_no_sweep_can_have_hides_none(store: Store, name: str) -> None:
    (record,) = plan(store, 1)
    stray = store.sweeps / f"{name}.json"
    stray.write_text((store.sweeps / "demo.json").read_text())
    (store.sweeps / "gone.json").symlink_to("nowhere")
    os.utime(stray, ns=(1, 1 << 62))  # the newest
    assert store.names() == ["demo"] and store.sweep().name == "demo"
    assert store.stage("tune") is None and store.trial(record.id).id == record.id
    for words in (["rank"], ["status", "--all"], ["logs", record.id[:4]], ["report", "-o", str(store.root / "page.html")]):
        assert main([*words, "--dir", str(store.root)]) == 0


def test_an_unknown_sweep_names_the_nearest_known(store: Store) -> None:
    plan(store, 1)
    with pytest.raises(ConfigError, match=r"no sweep 'demp' in .*; did you mean 'demo'\?"):
        store.sweep("demp")
    with pytest.raises(ConfigError, match=r"no sweep in .* yet"):
        Store(store.root / "empty").sweep()


def test_a_trial_is_found_by_the_first_digits_of_its_id(store: Store) -> None:
    first, second = plan(store, 1, 2)
    assert store.trial(first.id[:6]).id == first.id
    near = second.id[:-1] + ("0" if second.id[-1] != "0" else "1")
    with pytest.raises(ConfigError, match=f"no trial '{near}' .*did you mean '{second.id}'"):
        store.trial(near)
    with pytest.raises(ConfigError, match="no trial ''"):
        store.trial("")


def test_a_prefix_of_several_trials_asks_for_more_digits(store: Store) -> None:
    for name in ("aaaaaaaaaaa0", "aaaaaaaaaaa1"):
        (store.trials / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match="is ambiguous"):
        store.trial("aaa")


@given(st.text(max_size=80))
def test_a_sweep_name_is_a_plain_file_name_or_a_plain_error(name: str) -> None:
    try:
        accepted = check_name(name)
    except ConfigError as error:
        assert str(error).startswith("sweep.name=") and "\n" not in str(error)
    else:
        assert Path(accepted).name == accepted and not accepted.startswith(".") and "\n" not in accepted


@pytest.mark.parametrize("name", ["../escape", "a/b", "$(touch x)", "", ".hidden", "a\nb", "-rf", "x" * 65])
def test_a_hostile_sweep_name_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"sweep\.name="):
        sweep(tmp_path / "runs", trial(), name=name)
    assert not (tmp_path / "runs" / "trials").exists()


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trial.json"
    write_json(path, {"n": 1})

    def die(*_: object) -> None:
        assert read_json(path) == {"n": 1}, "the old file is there until the new one is whole"
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(OSError, match="no space"):
        write_json(path, {"n": 2})
    assert read_json(path) == {"n": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["trial.json"]


def test_the_last_whole_line_of_a_growing_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_object(path) is None
    path.write_text("".join(json.dumps({"step": n, "text": "x" * 50}) + "\n" for n in range(1000)) + '{"step": 10')
    assert (last_object(path) or {})["step"] == 999


def test_a_file_is_written_once_and_removed_only_if_it_is_what_it_was_thought_to_be(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert write_json_first(path, {"attempt": 1}) and not write_json_first(path, {"attempt": 2})
    remove_if(path, lambda held: (held or {})["attempt"] < 1)
    assert read_json(path) == {"attempt": 1}, "back in its place"
    remove_if(path, lambda held: (held or {})["attempt"] < 2)
    remove_if(path, lambda held: True)
    look_again(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_written_once_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", link)
    assert write_json_first(tmp_path / "a", {"attempt": 1}) and not write_json_first(tmp_path / "a", {"attempt": 2})
    remove_if(tmp_path / "a", lambda held: False)
    assert read_json(tmp_path / "a") == {"attempt": 1}
