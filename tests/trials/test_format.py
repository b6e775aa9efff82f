"""Folders that another version has written: an older one's are read, a newer one's are refused in one plain line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import main
from launcher.trials.store import Record, Store
from tests.results.trial_files import SweepOnDisk, point
from tests.sweep.support import launcher, sweep, trial, until
from trainer.shared.records.outcome import Status
from trainer.shared.records.trial_files import FORMAT
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import from_record, to_dict
from trainer.shared.run.schema import LayoutConfig, RunConfig, TrainConfig

pytestmark = pytest.mark.slow

VERBS = (["rank"], ["rank", "--json"], ["status"], ["status", "--all"], ["report"], ["cancel", "planted"])


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def older(data: dict[str, Any]) -> None:
    """As a version wrote it that had other keys: some are gone since, at every depth, and some were not there yet."""
    del data["format"], data["avoided"], data["left"], data["queue_clock"], data["end_clock"], data["launcher"]
    data["flown"] = True
    for part in (
        data["config"],
        data["config"]["layout"],
        data["config"]["layout"]["sharding"],
        data["config"]["tracking"],
        data["cluster"],
    ):
        part["removed_key"] = 3
    data["cluster"]["hardware"]["peak_tflops"]["removed_number_format"] = 1.0
    del data["config"]["layout"]["recompute"], data["config"]["optimizer"], data["config"]["run"]["seed"], data["cluster"]["linger_s"]


@pytest.fixture
def earlier(tmp_path: Path) -> tuple[Path, Record]:
    """A sweep of an earlier version, and its trial that was measured; another one failed."""
    planted = SweepOnDisk(tmp_path / "runs")
    predicted = {"step_time_s": 0.5, "memory_bytes": 1e9, "parts": {}}
    done, failed = planted.done(point(2, 2, predicted=predicted), 0.5), planted.failed(point(1, 2))
    rewrite(tmp_path / "runs/sweeps/planted.json", lambda data: data.pop("format"))
    for record in (done, failed):
        rewrite(record.directory / "trial.json", older)
    return tmp_path / "runs", done


@pytest.mark.parametrize("words", [*VERBS, ["rank", "--csv", "table.csv"]], ids=" ".join)
def test_every_verb_reads_a_sweep_of_an_earlier_version(
    words: list[str], earlier: tuple[Path, Record], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, done = earlier
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--dir", str(root)]) == 0
    said = capsys.readouterr()
    assert "unknown key" not in said.out + said.err and "error" not in said.err
    if words == ["rank", "--json"]:
        (measured,) = [row for row in json.loads(said.out) if row["trial"] == done.id]
        assert measured["status"] == "done" and measured["step_time_s"] == pytest.approx(0.5, rel=0.01)
    if "--csv" in words:
        assert len(Path("table.csv").read_text().splitlines()) == 3, "a title, the measured trial, and the one that ran out of memory"


def test_the_logs_of_an_earlier_version_are_shown(earlier: tuple[Path, Record], capsys: pytest.CaptureFixture[str]) -> None:
    root, done = earlier
    assert main(["logs", done.id, "--dir", str(root)]) == 0
    assert "rank 0 is ready" in capsys.readouterr().out


def test_a_trial_under_way_that_an_earlier_version_began_is_cancelled(tmp_path: Path) -> None:
    process = launcher('sweep(Path(sys.argv[1]), trial("sleep 0.2", tensor=2, steps=100))', tmp_path)
    (path,) = until(lambda: list(tmp_path.glob("trials/*/metrics.jsonl")))
    until(lambda: Store(tmp_path).load(path.parent.name).status is Status.RUNNING)
    process.kill()
    process.communicate()
    rewrite(path.parent / "trial.json", older)
    assert main(["cancel", path.parent.name, "--dir", str(tmp_path)]) == 0
    assert Store(tmp_path).load(path.parent.name).status is Status.STOPPED


@pytest.mark.parametrize(
    ("words", "name"),
    [
        *((words, name) for words in VERBS for name in ("trial.json", "sweeps/planted.json")),
        (["rank"], "result.json"),
        (["report"], "result.json"),
    ],
)
def test_a_newer_format_is_refused_with_its_file_its_number_and_what_to_do(
    words: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = SweepOnDisk(tmp_path)
    path = planted.done(point(), 0.5).directory / name
    path = path if path.exists() else tmp_path / name
    rewrite(path, lambda data: data.update(format=FORMAT + 1))
    code, error = main([*words, "--dir", str(tmp_path)]), capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1
    assert error.startswith(f"error: {path} has format {FORMAT + 1}") and f"up to {FORMAT}: upgrade it" in error


def test_every_file_of_a_sweep_states_its_format(tmp_path: Path) -> None:
    sweep(tmp_path, trial(), trial("fail 1 out_of_memory", seed=1))
    files = [*tmp_path.glob("sweeps/*.json"), *tmp_path.glob("trials/*/trial.json"), *tmp_path.glob("trials/*/result.json")]
    assert len(files) == 5 and {json.loads(path.read_text()).get("format") for path in files} == {FORMAT}


def test_a_sweep_is_not_run_in_a_folder_of_a_newer_version(tmp_path: Path) -> None:
    (record,) = sweep(tmp_path, trial())
    rewrite(record.directory / "trial.json", lambda data: data.update(format=FORMAT + 1))
    before = (record.directory / "trial.json").read_text()
    with pytest.raises(ConfigError, match=f"has format {FORMAT + 1}"):
        sweep(tmp_path, trial())
    assert (record.directory / "trial.json").read_text() == before


def test_a_recorded_configuration_keeps_its_values_and_drops_what_no_longer_exists() -> None:
    config = TrainConfig(layout=LayoutConfig(tensor=4), run=RunConfig(steps=7))
    data = to_dict(config) | {"gone": {"deep": 1}}
    data["layout"]["sharding"]["gone"] = 2
    assert from_record(TrainConfig, data) == config
    del data["run"]["seed"], data["layout"]["pipeline"]
    assert from_record(TrainConfig, data) == config
    with pytest.raises(ConfigError, match=r"tensor=0"):
        from_record(LayoutConfig, {"tensor": 0})
