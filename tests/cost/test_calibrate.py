"""Measured runs correct the constants of their machine: as far as they say, no further, and with honest spreads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from launcher.cli import calibrate
from launcher.cli.main import main
from launcher.config import compose
from launcher.config.hardware import shipped_hardware
from launcher.config.schema import HardwareConfig
from launcher.config.uncertainty import shipped_widths
from launcher.tables.canonical import MeasuredRun, read, write
from launcher.tables.cases import TableCase, table_case
from launcher.tables.learning import learn, missed, on, start, with_values
from launcher.tables.predictions import predict_rows
from trainer.spec import ConfigError

HARDWARE = "a100_80"
ROWS = [row for row in read(Path(__file__).parent.parent / "search" / "layouts_13b.csv") if row["gpus"] == 64 and row.step_seconds]
PLAIN = [row for row in ROWS if row["trainer_changes"] == ROWS[-1]["trainer_changes"]]
"""Rows of one kernel: they are predicted together."""


def cases_of(rows: list[MeasuredRun]) -> list[TableCase]:
    return [table_case(row, shipped_hardware()) for row in rows]


def measured_as(cases: list[TableCase], seconds: np.ndarray) -> list[TableCase]:
    return [
        dataclasses.replace(case, row=MeasuredRun(case.row.number, {**case.row.cells, "step_time_s": float(s)}))
        for case, s in zip(cases, seconds, strict=True)
    ]


def planted(seed: int, count: int = 8) -> tuple[list[TableCase], dict[str, float], HardwareConfig]:
    """Runs of a machine whose constants are drawn from what is believed of one, with noise; its constants; what is known of it."""
    draw, widths, hardware = np.random.default_rng(seed), shipped_widths(), shipped_hardware()[HARDWARE]
    cases = cases_of([PLAIN[i] for i in draw.choice(len(PLAIN), count, replace=False)])
    values = start(cases, hardware)
    true = {name: value * float(np.exp(draw.normal(0, widths.constant))) for name, value in values.items()}
    seconds = np.array([each.step_time_s for each in predict_rows(on(cases, with_values(hardware, true)))])
    noise = draw.normal(0, widths.common) + draw.normal(0, np.hypot(widths.layout, widths.rough), count)
    return measured_as(cases, seconds * np.exp(noise)), true, hardware


def recovered(seed: int) -> np.ndarray:
    """Distance of each constant that was learnt from the planted one, in stated spreads."""
    cases, true, hardware = planted(seed)
    found = learn(cases, hardware, "here").hardware
    spreads = found.learnt["spreads"]
    now = start(cases, found)
    return np.array([(np.log(now[name] / true[name])) / spread for name, spread in spreads.items() if name in now])


def test_planted_constants_lie_within_their_stated_spreads() -> None:
    """90 % of them within 1.645 spreads, of 6 draws here; 200 by hand: python -m tests.cost.test_calibrate."""
    distances = np.concatenate([recovered(seed) for seed in range(6)])
    assert np.mean(abs(distances) < 1.645) >= 0.88


def test_one_run_takes_most_of_the_common_error_away() -> None:
    hardware = shipped_hardware()[HARDWARE]
    cases = cases_of(ROWS[:20])
    slower = measured_as(cases, 1.3 * np.array([each.step_time_s for each in predict_rows(cases)]))
    found = learn(slower[:1], hardware, "here").hardware
    assert np.median(abs(missed(slower[1:], hardware))) == pytest.approx(np.log(1.3))
    assert np.median(abs(missed(slower[1:], found))) < 0.5 * np.log(1.3)


def test_more_runs_leave_less_open() -> None:
    cases, _, hardware = planted(1, 14)
    few, many = (learn(cases[:count], hardware, "here").hardware.learnt for count in (3, 14))
    assert sum(many["spreads"].values()) < sum(few["spreads"][name] for name in many["spreads"] if name in few["spreads"])


def test_learning_in_two_parts_comes_near_learning_at_once() -> None:
    cases, _, hardware = planted(2, 12)
    once = learn(cases, hardware, "here").hardware
    twice = learn(cases, learn(cases[:6], hardware, "first").hardware, "here").hardware
    assert missed(cases, twice) == pytest.approx(missed(cases, once), abs=0.06)
    assert twice.learnt["runs"] == once.learnt["runs"]


def test_a_run_counts_once() -> None:
    cases, _, hardware = planted(3, 4)
    found = learn(cases, hardware, "here").hardware
    with pytest.raises(ConfigError, match="all runs with a step time are in here already"):
        learn(cases, found, "again")


class TestCommand:
    @pytest.fixture(autouse=True)
    def somewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        write("runs.csv", [row.cells for row in ROWS[:6]])

    def test_the_file_predicts_with_narrower_intervals_and_says_what_it_learnt(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["calibrate", "runs.csv", "--out", "cluster"]) == 0
        assert "hardware=cluster" in capsys.readouterr().out
        found = compose(["hardware=cluster"]).cluster.hardware
        assert found.learnt["widths"]["common"] < shipped_widths().constant and found.name == "cluster"
        assert main(["calibrate", "--show", "cluster"]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith("learnt from 6 runs:") and "TFLOP/s in bf16" in shown

    def test_a_search_keeps_no_file_that_is_not_its_own(self, capsys: pytest.CaptureFixture[str]) -> None:
        Path("runs/hardware").mkdir(parents=True)
        Path("runs/hardware/mine.yaml").write_text("name: mine\n")
        assert calibrate.keep("mine", "runs", shipped_hardware()[HARDWARE]) is None
        assert "stays what it is" in capsys.readouterr().err and Path("runs/hardware/mine.yaml").read_text() == "name: mine\n"

    @pytest.mark.parametrize(
        "arguments, words",
        [
            (["no_such_sweep"], "no_such_sweep"),
            (["none.csv"], "cannot read the table none.csv"),
            (["short.csv"], "has no column"),
            (["empty.csv"], "no run has a step time"),
            (["runs.csv", "--out", "taken"], "exists and stays what it is"),
            (["runs.csv", "--out", "h100"], "is a device that ships"),
            (["runs.csv", "--out", "../x"], "cannot name a file"),
            (["--show", "nowhere"], "--show=nowhere is no hardware file"),
            (["--show", "h100"], "--show=h100 has learnt nothing"),
            (["runs.csv", "--config-dir", "runs.csv"], "cannot be written"),
        ],
    )
    def test_wrong_input_is_one_line(self, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
        Path("short.csv").write_text("layers,step_time_s\n4,1.0\n")
        write("empty.csv", [{**ROWS[0].cells, "step_time_s": None}])
        Path("runs/hardware").mkdir(parents=True)
        Path("runs/hardware/taken.yaml").write_text("name: taken\n")
        assert main(["calibrate", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error and error.startswith("error: ") and error.count("\n") == 1


def draws(count: int = 200) -> None:
    """The share of planted constants within their 90 % interval, and within two spreads."""
    distances = [recovered(seed) for seed in range(count)]
    all_of_them = abs(np.concatenate(distances))
    print(
        f"{count} draws, {len(all_of_them)} constants: {np.mean(all_of_them < 1.645):.1%} within 1.645 spreads, {np.mean(all_of_them < 2):.1%} within 2"
    )


if __name__ == "__main__":
    draws()
