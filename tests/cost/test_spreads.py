"""How likely the misses of a source are, and the widths under which they are likeliest."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from benchmarks import spreads
from benchmarks.left_out import Learner
from benchmarks.replay import __main__ as replay
from benchmarks.spreads import FINE, LEARNT, Missed, likeliest, runs_of
from launcher.config.hardware import shipped_hardware
from launcher.config.uncertainty import shipped_widths, widened
from launcher.cost.normal import normal_pdf
from launcher.cost.parts import WIDTH_OF_PART
from launcher.cost.uncertainty import Traits, between
from launcher.tables.canonical import read, write
from launcher.tables.validation import judge

pytestmark = pytest.mark.slow


def planted(source: str, count: int, size: float, seed: int) -> Missed:
    """Misses drawn from the shipped widths, of two machines, where what no part explains is ``size`` times as large."""
    draw, widths = np.random.default_rng(seed), shipped_widths()
    shares = draw.dirichlet(np.full(len(WIDTH_OF_PART), 0.3), count)
    traits = Traits(shares, draw.uniform(0, 6, (count, 4)), draw.integers(0, 2, count))
    covariance = between(widths, traits, traits, np.eye(count)).at(size**2) + widths.noise**2 * np.eye(count)
    return Missed(source, traits, np.zeros(count), draw.multivariate_normal(np.zeros(count), covariance), np.zeros(count, dtype=bool))


def test_the_evidence_is_the_integral_over_all_sizes() -> None:
    """By the determinant and the inverse of each covariance, up to a constant."""
    missed, widths = planted("a", 12, 1.0, 0), shipped_widths()
    errors = between(widths, missed.traits, missed.traits, np.eye(12))
    weights = normal_pdf(FINE) / normal_pdf(FINE).sum()
    summed = 0.0
    for node, weight in zip(FINE, weights, strict=True):
        covariance = errors.at(np.exp(2 * widths.scale * node)) + widths.noise**2 * np.eye(12)
        quadratic = missed.ratios @ np.linalg.inv(covariance) @ missed.ratios
        summed += weight * np.exp(-0.5 * quadratic) / np.sqrt(np.linalg.det(covariance))
    assert missed.evidence(widths) == pytest.approx(np.log(summed))


def test_an_interval_is_judged_as_wide_as_it_is_told_that_far_away() -> None:
    widths = shipped_widths()
    for distance in (0.0, widths.seen, 3 * widths.seen):
        missed = dataclasses.replace(planted("a", 12, 1.0, 0), distance=np.full(12, distance), assumed=np.arange(12) > 5)
        told = [widened(dataclasses.replace(widths, rate=rate), distance) for rate in (0.0, widths.chip)]
        near = dataclasses.replace(missed, distance=np.zeros(12))
        right = [near.rows(np.array([i])) for i in range(12)]
        levels = [dataclasses.replace(one, assumed=np.zeros(1, dtype=bool)).levels(told[i > 5])[0] for i, one in enumerate(right)]
        assert missed.levels(widths) == pytest.approx(np.array(levels))


def test_a_run_that_two_tables_have_counts_once_under_whichever_name(tmp_path: Path) -> None:
    """Under the other name it would be fitted to when its source is left out."""
    rows = read(Path(__file__).parent.parent / "search" / "layouts_13b.csv")
    paths = [str(tmp_path / name) for name in ("part.csv", "whole.csv")]
    write(paths[0], [row.cells for row in rows[:20]])
    write(paths[1], [{**row.cells, "source": "the same elsewhere", "assumed": "tied (usual)"} for row in rows])
    for tables in (paths, paths[::-1]):
        assert len(runs_of(tables)) == len(rows)
    assert len(runs_of(paths[1:])) == len(rows)  # repeats in one table are repeats


def test_a_run_given_of_each_machine_is_one_of_each_device_and_trainer() -> None:
    judged = [
        one
        for one in judge(read(Path(__file__).parent / "data" / "training.csv"), shipped_hardware())
        if one.prediction and one.case and one.step_seconds and one.row["source"].startswith("MosaicML")
    ]
    learner = Learner.of(judged, "machine")
    for told in (learner.drawn(1, np.random.default_rng(0)), learner.chosen(1)):
        machines = [(judged[i].row["hardware"], judged[i].row["trainer"]) for i in told]
        assert len(machines) == len(set(machines)) > 1
        assert set(machines) == {(one.row["hardware"], one.row["trainer"]) for one in judged}
    assert len(Learner.of(judged, "source").chosen(1)) == 1


@pytest.mark.parametrize("program", [spreads, replay])
def test_tables_that_leave_no_source_out_are_one_line(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = read(Path(__file__).parent.parent / "search" / "layouts_13b.csv")
    write("nothing.csv", [])
    write("one_source.csv", [row.cells for row in rows[:20]])
    write("no_times.csv", [{**row.cells, "step_time_s": None} for row in rows[:3]])
    Path("broken.csv").write_text("layers\n")
    for table, words in (*dict.fromkeys(("nothing.csv", "one_source.csv", "no_times.csv"), "fewer than two sources").items(),
                         ("broken.csv", "has no column"), ("absent.csv", "cannot read the table")):  # fmt: skip
        assert program.main([table]) == 2
        error = capsys.readouterr().err
        assert words in error and error.startswith("error: ") and error.count("\n") == 1


def test_a_doubt_that_is_no_probability_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main(["any.csv", "--doubt", "0.1", "2"]) == 2
    assert capsys.readouterr().err == "error: --doubt=2 is no probability; give numbers from 0 to 1\n"


def test_widths_are_learnt_from_any_start() -> None:
    """A width that is far below the noise of a measurement hardly makes the misses likelier or less likely: it is no better known."""
    missed = [planted(str(i), 16, size, i) for i, size in enumerate((0.3, 0.6, 1.0, 1.7, 3.0))]
    start = shipped_widths()
    far = dataclasses.replace(start, **{name: 3 * getattr(start, name) for name in LEARNT if name != "reach"})
    one, other = likeliest(missed, start), likeliest(missed, far)
    for name in ("common", "part", "layout", "rough", "scale"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=0.05, abs=start.noise / 2)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.campaign("words")) for seed in (2, 3))])
def test_a_common_error_that_few_sources_hardly_show_is_not_taken_for_none(seed: int) -> None:
    """Of eight sources with four runs each the likelihood alone finds a width of 0.001."""
    missed = [planted(str(source), 4, 1.0, 100 * seed + source) for source in range(8)]
    assert likeliest(missed, shipped_widths()).common > shipped_widths().common / 2


def test_a_benchmark_whose_reader_goes_away_ends_without_a_word() -> None:
    """As in ``python -m benchmarks.step_scatter | head``."""
    read, written = os.pipe()
    os.close(read)
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-m", "benchmarks.step_scatter"], stdout=written, stderr=subprocess.PIPE, cwd=root, timeout=120)
    os.close(written)
    assert (done.returncode, done.stderr) == (0, b"")
