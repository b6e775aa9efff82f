"""Measured runs correct the constants of their machine: as far as they say, no further, and with honest spreads."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from launcher.cli import calibrate
from launcher.cli.main import main
from launcher.config import compose
from launcher.config.folders import conf_dir
from launcher.config.hardware import hardware_files, shipped_hardware
from launcher.config.schema import HardwareConfig, ModelConfig, RunConfig
from launcher.config.uncertainty import Widths, shipped_widths, widths_on
from launcher.config.yaml_text import read_yaml
from launcher.cost import CostModel
from launcher.cost.inputs.layouts import to_layout, to_table
from launcher.cost.uncertainty import TimeSurrogate
from launcher.tables.canonical import MeasuredRun, read, write, written
from launcher.tables.cases import TableCase, table_case
from launcher.tables.learning import as_id, learn, missed, on, run_id, start, step_seconds, step_seconds_on_each, traits, with_values
from launcher.tables.predictions import predict_rows
from trainer.shared.run.errors import ConfigError

pytestmark = pytest.mark.slow

HARDWARE = "a100_80"
TABLE = Path(__file__).parent.parent / "search" / "layouts_13b.csv"
ROWS = [row for row in read(TABLE) if row["gpus"] == 64 and row.step_seconds]
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


@pytest.mark.parametrize("count", [2, pytest.param(200, marks=pytest.mark.campaign("words"))])
def test_planted_constants_lie_within_their_stated_spreads(count: int) -> None:
    """90 % of them within 1.645 spreads."""
    distances = np.concatenate([recovered(seed) for seed in range(count)])
    assert np.mean(abs(distances) < 1.645) >= 0.88


def test_steps_predicted_for_many_constants_at_once_are_those_of_each() -> None:
    cases, hardware = cases_of([row for row in read(TABLE) if row.step_seconds][::40]), shipped_hardware()[HARDWARE]
    values = start(cases, hardware)
    machines = [with_values(hardware, values | {name: 0.8 * values[name]}) for name in values]
    each = np.stack([step_seconds(on(cases, machine)) for machine in machines])
    assert len(np.unique(each[:, 0])) > 10 and step_seconds_on_each(cases, machines) == pytest.approx(each, rel=1e-12)


def test_one_run_takes_most_of_the_common_error_away() -> None:
    hardware = shipped_hardware()[HARDWARE]
    cases = cases_of(ROWS[:20])
    slower = measured_as(cases, 1.3 * np.array([each.step_time_s for each in predict_rows(cases)]))
    found = learn(slower[:1], hardware, "here").hardware
    assert np.median(abs(missed(slower[1:], hardware))) == pytest.approx(np.log(1.3))
    assert np.median(abs(missed(slower[1:], found))) < 0.5 * np.log(1.3)


@cache
def taught(count: int) -> tuple[list[TableCase], HardwareConfig]:
    """The first of fourteen runs of a planted machine, and what they say."""
    cases, _, hardware = planted(1, 14)
    return cases[:count], learn(cases[:count], hardware, "here").hardware


def test_more_runs_leave_less_open() -> None:
    few, many = (taught(count)[1].learnt for count in (4, 14))
    assert sum(many["spreads"].values()) < sum(few["spreads"][name] for name in many["spreads"] if name in few["spreads"])


def test_learning_in_two_parts_comes_near_learning_at_once() -> None:
    cases, once = taught(14)
    twice = learn(cases, taught(4)[1], "here").hardware
    assert missed(cases, twice) == pytest.approx(missed(cases, once), abs=0.06)
    assert twice.learnt["runs"] == once.learnt["runs"]


def test_a_run_counts_once() -> None:
    cases, found = taught(4)
    with pytest.raises(ConfigError, match="all runs with a step time are in here already"):
        learn(cases, found, "again")


def test_a_row_that_stands_twice_in_a_table_counts_once() -> None:
    cases, found = taught(4)
    assert learn([*cases, *cases, *cases], shipped_hardware()[HARDWARE], "here").hardware == found


def test_the_order_of_rows_says_nothing() -> None:
    cases, hardware = cases_of(ROWS[:3] + [row for row in read(TABLE) if row.step_seconds][::72]), shipped_hardware()[HARDWARE]
    one, other = (learn(some, hardware, "here").hardware for some in (cases, cases[::-1]))
    assert (one.learnt["runs"], one.learnt["places"]) == (other.learnt["runs"], other.learnt["places"])
    assert one.learnt["widths"] == pytest.approx(other.learnt["widths"], rel=1e-2) and one.constants == pytest.approx(
        other.constants, rel=1e-2
    )


def test_repeats_of_one_layout_say_nothing_of_other_layouts() -> None:
    """Twenty runs of one layout that agree to 0.1 % leave as much open between layouts as one."""
    case, hardware = cases_of(PLAIN[:1])[0], shipped_hardware()[HARDWARE]
    seconds = case.row.step_seconds * (1 + 0.001 * np.linspace(-1, 1, 20))
    many, one = (learn(measured_as([case] * len(some), some), hardware, "here").hardware for some in (seconds, seconds[10:11]))
    assert len(many.learnt["runs"]) == 20
    for name in ("layout", "rough", "part", "common"):
        assert many.learnt["widths"][name] == pytest.approx(one.learnt["widths"][name], rel=0.1)


def test_repeats_are_counted_apart_from_rows_that_stand_twice() -> None:
    case, other, hardware = *cases_of(PLAIN[:2]), shipped_hardware()[HARDWARE]
    seconds = case.row.step_seconds * np.array([1, 1, 1.01])
    assert learn(measured_as([case] * 3, seconds), hardware, "here").counted == "2 runs (1 without repeats)"
    assert learn([case, case, other], hardware, "here").counted == "2 runs"
    assert learn([case, case], hardware, "here").counted == "1 run"


def test_a_sweep_and_its_table_are_the_same_runs() -> None:
    case = measured_as(cases_of(ROWS[:1]), np.array([0.123456789012345678]))[0]
    assert run_id(case) == run_id(measured_as([case], np.array([float(written(case.row.step_seconds))]))[0])


@cache
def usual() -> HardwareConfig:
    """What ten runs of the machine say, as they were measured."""
    return learn(cases_of(PLAIN)[::2][:10], shipped_hardware()[HARDWARE], "here").hardware


@pytest.mark.parametrize("slower", [5.0, *(pytest.param(slower, marks=pytest.mark.campaign("words")) for slower in (2.0, 0.4))])
def test_a_machine_far_from_what_is_expected_is_learnt_from_ten_runs(slower: float) -> None:
    """What all layouts share may be off by much more than elsewhere; other layouts are then predicted, and lie in their intervals."""
    hardware, expected = shipped_hardware()[HARDWARE], cases_of(PLAIN)
    cases = measured_as(expected, slower * np.array([case.row.step_seconds for case in expected]))
    found = learn(cases[::2][:10], hardware, "here").hardware
    others, same = ([case for i, case in enumerate(some) if i % 2] for some in (cases, expected))
    assert abs(np.median(missed(others, found)) - np.median(missed(same, usual()))) < 0.15 * abs(np.log(slower))
    seconds = step_seconds(on(others, found))
    low, high = TimeSurrogate(seconds, traits(on(others, found)), widths_on(found.learnt)).posterior().interval
    measured = seconds * np.exp(missed(others, found))
    assert np.mean((low < measured) & (measured < high)) >= 0.8


def test_what_is_learnt_of_scatter_grows_with_it_and_is_as_sure_as_its_runs_allow() -> None:
    """A standard deviation estimated from n numbers is known to 1 / sqrt(2 n)."""
    cases, hardware = cases_of(PLAIN), shipped_hardware()[HARDWARE]
    seconds, noise = step_seconds(on(cases, hardware)), np.random.default_rng(0).normal(0, 0.1, len(cases))
    learnt = [learn(measured_as(cases, seconds * np.exp(size * noise)), hardware, "here").hardware.learnt for size in (1.0, 1.3)]
    widths = [each["widths"]["layout"] for each in learnt]
    assert widths[1] / widths[0] == pytest.approx(1.3, rel=0.02)
    assert [each["widths"]["scale"] for each in learnt] == pytest.approx([(2 * len(cases)) ** -0.5] * 2, rel=0.2)


@cache
def without_pipeline() -> tuple[list[TableCase], HardwareConfig]:
    """Runs of one stage, and what they say."""
    cases = [case for case in cases_of(PLAIN) if case.layout["pipeline"] == 1]
    return cases, learn(cases, shipped_hardware()[HARDWARE], "here").hardware


def test_parts_that_the_runs_do_not_have_keep_their_width() -> None:
    """Runs without a pipeline teach nothing of its bubble."""
    flat, found = without_pipeline()
    widths = found.learnt["widths"]
    assert len(flat) > 5 and widths["bubble"] == pytest.approx(shipped_widths().bubble, rel=1e-3) and widths["part"] < shipped_widths().part


class TestWidths:
    """How far predictions with what was learnt may be off depends on how much the question is like the runs."""

    def widths(self, *overrides: str) -> list[Widths]:
        """Before and after, of one question."""
        return [model.widths(model.case(*question)) for model, question in self.asked(*overrides)]

    def asked(self, *overrides: str) -> list[tuple[CostModel, tuple[ModelConfig, np.ndarray, RunConfig]]]:
        """The same with a model that knows nothing of the machine, and with one that learnt from runs."""
        hardware = shipped_hardware()[HARDWARE]
        cases, found = without_pipeline()
        config = compose(["recipe=llama_13b", f"trainer={cases[0].row['trainer']}", *overrides])
        models = (CostModel(dataclasses.replace(config.cluster, hardware=each), config.trainer) for each in (hardware, found))
        layout = dataclasses.replace(config.layout, data=config.cluster.world_size)
        return [(model, (config.model, to_table([layout]), config.run)) for model in models]

    def test_they_leave_less_open_near_the_runs(self) -> None:
        before, after = self.widths()
        assert after.part < before.part and after.scale < before.scale
        lengths = []
        for model, (of, table, run) in self.asked():
            low, high = model.predict(of, to_layout(table[0]), run).interval_s
            lengths.append(high / low)
        assert lengths[1] < lengths[0]

    def test_they_are_no_narrower_under_another_trainer(self) -> None:
        before, after = self.widths("trainer=deepspeed")
        assert after.common >= before.common and after.layout >= before.layout and after.part >= before.part

    def test_they_grow_with_the_distance_from_the_runs(self) -> None:
        assert self.widths("model.seq=131072", "model.layers=4")[1].common > 2 * self.widths()[1].common


class TestCommand:
    @pytest.fixture(autouse=True)
    def somewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        write("runs.csv", [row.cells for row in ROWS[:6]])

    def test_the_file_predicts_with_narrower_intervals_says_what_it_learnt_and_is_the_same_for_every_reader(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["calibrate", "runs.csv", "--out", "cluster"]) == 0
        assert "hardware=cluster" in capsys.readouterr().out
        found = compose(["hardware=cluster"]).cluster.hardware
        assert found.learnt["widths"]["common"] < shipped_widths().constant and found.name == "cluster"
        assert main(["calibrate", "--show", "cluster"]) == 0
        shown = capsys.readouterr().out
        assert shown.startswith("learnt from 6 runs:") and "TFLOP/s in bf16" in shown
        path = Path("runs/hardware/cluster.yaml")
        text = path.read_text()
        path.write_text(text.replace(read_yaml(text)["learnt"]["runs"][0], as_id("1234e567")))  # a number for some
        assert compose(["hardware=cluster"]).cluster.hardware.learnt == hardware_files()["cluster"].learnt

    def test_what_is_in_a_folder_of_ones_own_can_be_calibrated_again(self) -> None:
        assert main(["calibrate", "runs.csv", "--out", "first", "--config-dir", "own"]) == 0
        write("more.csv", [{**row.cells, "hardware": "first"} for row in ROWS[6:9]])
        assert main(["calibrate", "more.csv", "--out", "second", "--config-dir", "own"]) == 0
        assert len(compose(["hardware=second"], Path("own")).cluster.hardware.learnt["runs"]) == 9

    @pytest.mark.parametrize(
        "learnt, words",
        [
            ("{widths: {comon: 0.1}}", "learnt.widths"),
            ("{widths: {common: .nan}}", "learnt.widths"),
            ("{widths: {common: -1}}", "learnt.widths"),
            ("{runs: 3}", "learnt.runs"),
            ("{spreads: {link: x}}", "learnt.spreads"),
            ("{places: [here]}", "learnt.places"),
        ],
    )
    def test_a_file_that_was_mangled_is_one_line(self, learnt: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
        Path("runs/hardware").mkdir(parents=True)
        shipped = (conf_dir() / "hardware" / f"{HARDWARE}.yaml").read_text()
        Path("runs/hardware/mangled.yaml").write_text(f"{shipped}\nlearnt: {learnt}\n")
        for asked in (["calibrate", "--show", "mangled"], ["plan", "model=gpt_tiny", "hardware=mangled"]):
            assert main(asked) == 2
            error = capsys.readouterr().err
            assert words in error and error.count("\n") == 1

    @pytest.mark.parametrize("verb", ["calibrate", "validate"])
    def test_rows_of_one_layout_that_contradict_each_other_are_named_in_one_line(
        self, verb: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        cells = [dict(row.cells) for row in PLAIN[:4]]
        took = float(cells[1]["step_time_s"])
        write("same.csv", [*cells, cells[1] | {"step_time_s": took * 1.09}])
        write("other.csv", [*cells, *(cells[1] | {"step_time_s": took * factor} for factor in (10, 2, 3, 4))])
        assert main([verb, "same.csv"]) == 0 and "contradict" not in capsys.readouterr().err
        assert main([verb, "other.csv", "--out", "other"]) == 0
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "contradict" in line]
        assert "row 2 " in line and "row 5 " in line and "(1 between)" in line and "row 3 " not in line

    def test_a_search_keeps_no_file_that_is_not_its_own(self, capsys: pytest.CaptureFixture[str]) -> None:
        Path("runs/hardware").mkdir(parents=True)
        Path("runs/hardware/mine.yaml").write_text("name: mine\n")
        assert calibrate.keep("mine", "runs", shipped_hardware()[HARDWARE]) is None
        assert "will not be overwritten" in capsys.readouterr().err and Path("runs/hardware/mine.yaml").read_text() == "name: mine\n"

    @pytest.mark.parametrize(
        "arguments, words",
        [
            (["no_such_sweep"], "no_such_sweep"),
            (["none.csv"], "cannot read the table none.csv"),
            (["short.csv"], "has no column"),
            (["empty.csv"], "no run has a step time"),
            (["runs.csv", "--out", "taken"], "already exists and will not be overwritten"),
            (["runs.csv", "--out", "h100"], "is a device that ships"),
            (["runs.csv", "--out", "../x"], "cannot name a file"),
            (["--show", "nowhere"], "--show=nowhere is not a hardware file"),
            (["--show", "h100"], "--show=h100 has learnt nothing"),
            (["runs.csv", "--config-dir", "runs.csv"], "cannot be written"),
            (["runs.csv", "--out", "null"], "hardware=null is not read as that name"),
            (["runs.csv", "--out", "x.yaml"], "hardware=x.yaml is not read as that name"),
            (["runs.csv", "--out", ""], "--out= is empty"),
            (["milliseconds.csv"], "times more than predicted; convert them to seconds"),
            (["nameless.csv"], "row 2 has hardware=unknown"),
        ],
    )
    def test_wrong_input_is_one_line(self, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
        Path("short.csv").write_text("layers,step_time_s\n4,1.0\n")
        write("empty.csv", [{**ROWS[0].cells, "step_time_s": None}])
        write("milliseconds.csv", [{**row.cells, "step_time_s": 1000 * (row.step_seconds or 0.0)} for row in ROWS[:3]])
        write("nameless.csv", [ROWS[0].cells, {**ROWS[1].cells, "hardware": None}])
        Path("runs/hardware").mkdir(parents=True)
        Path("runs/hardware/taken.yaml").write_text("name: taken\n")
        assert main(["calibrate", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error and error.startswith("error: ") and error.count("\n") == 1


def test_a_few_runs_that_nothing_explains_do_not_move_all_others() -> None:
    cases, hardware = cases_of(ROWS[::5]), shipped_hardware()[HARDWARE]
    odd = np.arange(len(cases)) % 6 == 0
    lesson = learn(measured_as(cases, step_seconds(cases) * np.where(odd, 1.6, 1.0)), hardware, "odd")
    assert np.median(abs(lesson.after[~odd])) < 0.015
    assert np.median(abs(lesson.after[odd])) > 0.4
