"""``trireme compare``: trials of two sweeps are matched by what varies inside them, and held against each other."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import main
from launcher.results.comparison import compare
from launcher.results.ranking import Measurement, measurement
from launcher.sweep.run import Point
from tests.results.trial_files import SweepOnDisk, point
from trainer.shared.records.outcome import Reason, Status


def with_run(planned: Point, **changes: Any) -> Point:
    assert planned.config is not None
    return dataclasses.replace(planned, config=dataclasses.replace(planned.config, run=dataclasses.replace(planned.config.run, **changes)))


def two_sweeps(root: Path, factor: float = 0.5, spread: float = 0.02) -> None:
    """Sweep a, and b with another precision: two layouts in both, one in each alone, one that failed in b."""
    first, second = SweepOnDisk(root, "a"), SweepOnDisk(root, "b")
    for tensor, seconds in ((1, 0.4), (2, 0.3)):
        first.done(point(tensor, 1), seconds, spread)
        second.done(with_run(point(tensor, 1), precision="bf16"), factor * seconds, spread)
    first.done(point(4, 1), 0.2)
    first.done(point(1, 2), 0.2)
    second.done(with_run(point(1, 4), precision="bf16"), 0.2)
    second.failed(with_run(point(1, 2), precision="bf16"), Reason.OUT_OF_MEMORY)


def compared(root: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main.main(["compare", "a", "b", "--dir", str(root), *words])
    return code, capsys.readouterr().out


def test_trials_match_by_what_varies_and_the_rest_is_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_sweeps(tmp_path)
    code, out = compared(tmp_path, capsys, "--json")
    found = json.loads(out)
    assert code == 0 and [one["layout"]["tensor"] for one in found["matched"]] == [2, 1]
    for one in found["matched"]:
        assert one["ratio"] == pytest.approx(0.5) and one["interval"][0] < 0.5 < one["interval"][1] and one["loss_difference"] == 0
    assert found["overall"]["ratio"] == pytest.approx(0.5) and found["overall"]["high"] < 0.51
    assert found["changed"] == {"run.precision": ["fp32", "bf16"]}
    assert [len(labels) for labels in found["only"]] == [2, 2]  # a failed trial matches nothing, and is not hidden


@pytest.mark.parametrize("columns", [40, 80, 160])
def test_a_comparison_fits_the_terminal(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    two_sweeps(tmp_path)
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out = compared(tmp_path, capsys)
    assert code == 0 and max(map(len, out.splitlines())) <= columns
    words = " ".join(out.split())
    assert "0.500" in words and "run.precision: fp32 -> bf16" in words and "Only in B" in words and ("95 %" in words)


def test_a_pipe_has_every_figure_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    two_sweeps(tmp_path, factor=1.0, spread=0.5)
    _, out = compared(tmp_path, capsys)
    lines = [line for line in out.splitlines() if " ms " in line]
    assert len(lines) == 2 and all("1.000" in line and "+0" in line for line in lines) and "which is faster" in out


def test_sweeps_without_a_common_trial_end_with_1_and_unknown_ones_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SweepOnDisk(tmp_path, "a").done(point(1, 1), 0.4)
    SweepOnDisk(tmp_path, "b").add(point(1, 1, micro_batch=2), Status.RUNNING)
    code, out = compared(tmp_path, capsys)
    assert code == 1 and "no trial of one matches" in out
    assert main.main(["compare", "a", "c", "--dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_sweep_of_another_folder_is_named_by_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SweepOnDisk(tmp_path / "old", "nightly").done(point(1, 1), 0.4)
    SweepOnDisk(tmp_path / "new", "nightly").done(point(1, 1), 0.1)
    assert main.main(["compare", str(tmp_path / "old" / "nightly"), "nightly", "--dir", str(tmp_path / "new"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["matched"][0]["ratio"] == pytest.approx(0.25)


def test_the_interval_of_a_ratio_holds_it_as_often_as_it_says(tmp_path: Path) -> None:
    """Two sweeps of one trial each, drawn from the same lognormal scatter: the true ratio 1 is inside in 93 to 99 of 100."""
    record = SweepOnDisk(tmp_path).done(point(1, 1), 0.2)
    draws = random.Random(7)

    def drawn() -> Measurement:
        times = [math.exp(draws.gauss(0, 0.1)) for _ in range(40)]
        return measurement(record, {"step_times_s": [1.0, 1.0, *times], "step_time_s": sorted(times)[20]})

    held = 0
    for _ in range(400):
        (one,) = compare([(record, drawn(), {})], [(record, drawn(), {})], {record.id: "x"}).matched
        held += one.interval[0] <= 1 <= one.interval[1]
    assert 0.93 <= held / 400 <= 0.99
