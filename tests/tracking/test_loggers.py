"""Loggers other than MLflow's: each holds what the files of a sweep hold, once, whoever was killed before."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import main
from launcher.config.packages import MODULES
from launcher.results.measurements import measure
from launcher.results.ranking import rank
from launcher.tracking import copier, unmirrored
from launcher.tracking.loggers import LOGGERS, open_logger
from launcher.tracking.loggers.tables import columns_of
from launcher.trials.store import Point, Store, Sweep
from tests.results.trial_files import STEPS, SweepOnDisk, demo_sweep, metric_line, point, seeded, step_times, write_metrics
from trainer.shared.records.outcome import Status
from trainer.shared.run.keys import field_docs
from trainer.shared.run.schema import TrackingConfig

pytestmark = pytest.mark.slow


def logged(root: Path, name: str, sweep: str = "planted") -> Path:
    logger = open_logger(name, root, sweep)
    logger.update(Store(root).sweep(sweep))
    return logger.folder


def with_loggers(planned: Point, *loggers: str) -> Point:
    assert planned.config is not None
    return replace(planned, config=replace(planned.config, tracking=replace(planned.config.tracking, loggers=[*loggers])))


def opened(root: Path, name: str = "planted") -> Sweep:
    return Store(root).sweep(name)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def test_every_key_names_a_logger_and_every_logger_has_its_package() -> None:
    assert [*TrackingConfig.__dataclass_fields__["loggers"].metadata["choices"]] == [*LOGGERS]
    assert {kind.extra for kind in LOGGERS.values() if kind.extra} <= {*MODULES} and "tracking.loggers" in field_docs(
        TrackingConfig, "tracking."
    )


def test_tables_hold_every_trial_as_ranked_and_every_step_once(tmp_path: Path) -> None:
    demo_sweep(tmp_path)
    folder = logged(tmp_path, "csv")
    trials, steps = read_csv(folder / "trials.csv"), read_csv(folder / "steps.csv")
    ranked = rank(measure(opened(tmp_path).records))
    assert [(row["trial"], row["status"], row["place"]) for row in trials] == [
        (m.trial, m.status.value, str(m.place or "")) for m in ranked
    ]
    assert [float(row["step_time_s"]) for row in trials[:3]] == [m.step_time_s for m in ranked[:3]] and trials[0]["layout.tensor"] == "2"
    assert trials[0]["memory/weights"] and trials[-1]["reason"] + trials[-1]["detail"]
    assert not any(name.startswith(("tracking.", "cluster.env")) for name in trials[0])
    assert len(steps) == 3 * STEPS and {row["trial"] for row in steps} == {m.trial for m in ranked[:3]}
    assert float(steps[1]["loss"]) == pytest.approx(metric_line(2, 1.0)["loss"])


def test_parquet_has_the_cells_of_csv_with_their_types(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet is not written: pip install -e '.[parquet]'")
    demo_sweep(tmp_path)
    folder, texts = logged(tmp_path, "parquet"), logged(tmp_path, "csv")
    for name in ("trials", "steps"):
        rows, words = parquet.read_table(folder / f"{name}.parquet").to_pylist(), read_csv(texts / f"{name}.csv")
        assert [{key: "" if value is None else str(value) for key, value in row.items()} for row in rows] == words
    assert {type(row["step_time_s"]) for row in parquet.read_table(folder / "trials.parquet").to_pylist()} == {float, type(None)}


@pytest.mark.parametrize(
    ("values", "column"),
    [
        ([1, None, 2.5], [1.0, None, 2.5]),
        ([True, False], [True, False]),
        ([True, 1], ["true", "1"]),
        (["a", 1, None], ["a", "1", None]),
        ([[1, 2], None], ["[1, 2]", None]),
        ([None], [None]),
    ],
)
def test_a_column_has_one_type(values: list[Any], column: list[Any]) -> None:
    assert columns_of([{"x": value} for value in values]) == {"x": column}
    assert columns_of([{"x": 1}, {"y": 2}]) == {"x": [1, None], "y": [None, 2]}


def events(folder: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Scalars of every run by tag, as TensorBoard shows them."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="event files are not written: pip install -e '.[tensorboard]'"
    )
    found = {}
    for run in sorted(folder.iterdir()):
        read = accumulator.EventAccumulator(str(run)).Reload()
        found[run.name] = {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    return found


def test_tensorboard_has_a_run_of_each_trial_that_grows_and_is_written_anew_after_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="event files are not written: pip install -e '.[tensorboard]'")
    sweep = SweepOnDisk(tmp_path)
    done = sweep.done(point(1, 1), 0.3)
    running = sweep.add(point(2, 2), Status.RUNNING)
    write_metrics(running, step_times(0.2, 0.02)[:3])
    logger = open_logger("tensorboard", tmp_path, "planted")
    logger.update(opened(tmp_path))
    before = events(logger.folder)
    assert [len(run["train/loss"]) for name, run in before.items() if name.endswith(running.id[:6])] == [3]
    write_metrics(running, step_times(0.2, 0.02)[3:], first=4)
    write_metrics(running, [0.2] * 3, first=7, attempt=1)  # a later attempt runs two steps again, and one more
    for again in (logger, open_logger("tensorboard", tmp_path, "planted")):
        again.update(opened(tmp_path))
        sizes = {path: path.stat().st_size for path in logger.folder.rglob("events*")}
        again.update(opened(tmp_path))
        assert {path: path.stat().st_size for path in logger.folder.rglob("events*")} == sizes, "nothing is written twice"
        found = events(logger.folder)
        (grown,) = (run for name, run in found.items() if name.endswith(running.id[:6]))
        (whole,) = (run for name, run in found.items() if name.endswith(done.id[:6]))
        assert [step for step, _ in grown["train/loss"]] == [*range(1, 10)] and grown["train/loss"][2][1] == pytest.approx(
            metric_line(3, 1)["loss"]
        )
        assert whole["trial/step_time_s"][0][1] == pytest.approx(0.3, rel=1e-3) and "trial/step_time_s" not in grown
    assert len(found) == 2


def test_a_run_of_tensorboard_follows_the_name_of_its_trial(tmp_path: Path) -> None:
    """A name says what sets a trial apart, and trials may be added."""
    pytest.importorskip("tensorboard", reason="event files are not written: pip install -e '.[tensorboard]'")
    sweep = SweepOnDisk(tmp_path)
    sweep.done(seeded(1), 0.3)
    logger = open_logger("tensorboard", tmp_path, "planted")
    logger.update(opened(tmp_path))
    (first,) = logger.folder.iterdir()
    sweep.done(seeded(2), 0.2)
    logger.update(opened(tmp_path))
    assert len([*logger.folder.iterdir()]) == 2 and not first.exists()
    assert all(len(run["train/loss"]) == STEPS for run in events(logger.folder).values())


def test_weights_and_biases_gets_an_offline_run_of_each_trial_that_ended_once(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="offline runs are not written: pip install -e '.[wandb]'")
    demo_sweep(tmp_path)
    for _ in range(2):
        folder = logged(tmp_path, "wandb")
    ended = [record for record in opened(tmp_path).records if record.status.final and record.config]
    assert sorted(path.name.rpartition("-")[2] for path in (folder / "wandb").glob("offline-run-*")) == sorted(
        record.id for record in ended
    )
    for record in ended:
        (file,) = folder.glob(f"wandb/offline-run-*-{record.id}/*.wandb")
        content = file.read_bytes()
        assert record.id.encode() in content and (b"train/loss" in content) == (record.status is Status.DONE)


def test_the_copier_fills_the_loggers_of_a_sweep_beside_mlflow_or_without_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = SweepOnDisk(root)
    sweep.done(with_loggers(point(1, 1), "csv"), 0.3)
    unmirrored.add(root, "planted")
    monkeypatch.setattr(copier, "missing", lambda extra: "mlflow")
    assert copier.Copier(root).finish() and not unmirrored.names(root)
    assert len(read_csv(root / "exports" / "planted" / "csv" / "trials.csv")) == 1


def test_what_goes_wrong_in_a_logger_is_said_and_tried_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = SweepOnDisk(root)
    sweep.done(with_loggers(point(1, 1), "csv"), 0.3)
    (root / "exports").write_text("in the way")
    unmirrored.add(root, "planted")
    monkeypatch.setattr(copier, "missing", lambda extra: "mlflow")
    working = copier.Copier(root)
    assert not working.look() and "exports" in unmirrored.trouble(root, "planted")
    (root / "exports").unlink()
    working._due.clear()
    assert working.look() and not unmirrored.names(root)


@pytest.mark.parametrize("names", [["csv"], ["csv", "parquet"]])
def test_a_finished_sweep_is_exported_and_no_page_is_written_unasked(
    names: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo_sweep(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    assert main(["report", "planted", "--export", ",".join(names)]) == 0
    told = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert told == [tmp_path / "runs" / "exports" / "planted" / name for name in names] and all([*folder.iterdir()] for folder in told)
    assert not (tmp_path / "report.html").exists()
    assert main(["report", "planted", "--export", "csv", "-o", "page.html"]) == 0 and (tmp_path / "page.html").exists()


def test_wrong_loggers_are_one_line_with_the_command_that_installs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo_sweep(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(MODULES, "wandb", ("no_such_package_here",))
    for words, message in (
        (["report", "--export", "excel"], "--export='excel' is not a logger; use csv, parquet, tensorboard, wandb"),
        (
            ["report", "--export", "wandb"],
            f"--export=wandb needs the Python package 'no_such_package_here'; run {sys.executable} -m pip install",
        ),
        (
            ["train", "model=gpt_tiny", "data.kind=synthetic", "tracking.loggers=[wandb]"],
            "tracking.loggers=wandb needs the Python package 'no_such_package_here'",
        ),
        (["train", "model=gpt_tiny", "data.kind=synthetic", "tracking.loggers=[excel]"], "tracking.loggers[0]='excel' is not one of"),
    ):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert message in said and "Traceback" not in said
    assert not (tmp_path / "runs" / "exports").exists() and [*Store(tmp_path / "runs").names()] == ["planted"]
