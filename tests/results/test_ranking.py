"""The order of trials: the known fastest first, whatever is missing; nothing hidden."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli import rank as rank_verb
from launcher.results.measurements import measure
from launcher.results.ranking import CONFIDENCE, Measurement, _first_losses, leaders, measurement, median_interval, problem, rank, tied
from launcher.trials.store import Point, Store
from tests.results.trial_files import SweepOnDisk, demo_sweep, point, step_times, write_json, write_metrics
from trainer.shared.records.outcome import Reason, Status

NUMBERS = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True), st.integers(-3, 3))


def done(trial: str, *times: float) -> Measurement:
    """A trial with these measured steps."""
    middle = statistics.median(times) if times else None
    interval = median_interval(times) if times else None
    return Measurement(trial, Status.DONE, step_time_s=middle, step_time_interval_s=interval, steps_measured=len(times))


def test_known_fastest_comes_first_among_missing_and_failed_trials(tmp_path: Path) -> None:
    sweep = demo_sweep(tmp_path)
    damaged = sweep.done(point(2, 1, micro_batch=2), 0.01)
    (damaged.directory / "result.json").write_text('{"status": "done", "step_time_s": 0.01')
    (damaged.directory / "metrics.jsonl").unlink()
    ranked = rank(measure(Store(tmp_path).sweep().records))
    assert [m.layout.get("pipeline") for m in ranked[:3]] == [2, 4, 1]
    assert [m.place for m in ranked] == [1, 2, 3, None, None, None, None]
    assert len(ranked) == len(sweep.records)


def test_every_trial_without_a_measurement_is_shown_last_with_its_reason(tmp_path: Path) -> None:
    demo_sweep(tmp_path)
    rest = [m for m in rank(measure(Store(tmp_path).sweep().records)) if m.place is None]
    assert [(m.status, m.reason) for m in rest] == [
        (Status.PLANNED, None), (Status.FAILED, Reason.OUT_OF_MEMORY), (Status.PRUNED, Reason.CONFIGURATION),
    ]  # fmt: skip
    assert rest[1].detail == "rank 1: needs 3.2e9 bytes, has 2e9"
    assert rest[2].dir is None and "does not divide" in rest[2].detail


def test_stopped_trial_never_wins_by_its_partial_time(tmp_path: Path) -> None:
    sweep = SweepOnDisk(tmp_path)
    sweep.done(point(1, 1), 0.3)
    stopped = sweep.add(point(2, 1), Status.STOPPED, Reason.CANNOT_WIN)
    write_metrics(stopped, step_times(0.1, 0.01))
    ranked = rank(measure(sweep.records))
    assert [m.status for m in ranked] == [Status.DONE, Status.STOPPED]
    assert ranked[1].step_time_s == pytest.approx(0.1, rel=0.01), "what it did measure is shown"
    assert ranked[1].place is None


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -1.0, 0, "fast", True, [1], 1e308, 10**400])
def test_a_step_time_that_is_no_time_is_no_measurement(tmp_path: Path, value: object) -> None:
    sweep = SweepOnDisk(tmp_path)
    sweep.done(point(1, 1), 0.3)
    odd = sweep.done(point(2, 1), 0.1, step_time_s=value)
    ranked = rank([measurement(r, r.read_result() or {}) for r in sweep.records])
    assert ranked[0].step_time_s == pytest.approx(0.3, rel=0.01)
    assert (ranked[1].trial, ranked[1].place, ranked[1].step_time_s) == (odd.id, None, None)


@given(st.lists(st.tuples(st.sampled_from(Status), NUMBERS, NUMBERS), max_size=8), st.randoms())
def test_order_is_complete_and_independent_of_the_input_order(rows: list[tuple[Status, float, float]], shuffled: random.Random) -> None:
    trials = [Measurement(f"t{i}", status, step_time_s=time, step_time_spread_s=spread) for i, (status, time, spread) in enumerate(rows)]
    ranked = rank(trials)
    assert {m.trial for m in ranked} == {m.trial for m in trials}
    times = [m.step_time_s for m in ranked if m.place]
    assert times == sorted(times) and all(math.isfinite(t) for t in times)
    assert [m.place for m in ranked if m.place] == list(range(1, len(times) + 1))
    shuffled.shuffle(trials)
    assert [m.trial for m in rank(trials)] == [m.trial for m in ranked]


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=60))
def test_the_interval_of_a_median_lies_within_what_was_measured_and_holds_the_median(times: list[float]) -> None:
    low, high = median_interval(times)
    assert min(times) <= low <= statistics.median(times) * (1 + 1e-12) and statistics.median(times) * (1 - 1e-12) <= high <= max(times)


@pytest.mark.parametrize("steps", [4, 5, 8, 30])
def test_the_interval_of_a_median_holds_the_true_one_as_often_as_it_promises(steps: int) -> None:
    generator = random.Random(steps)
    intervals = [median_interval([generator.lognormvariate(0, 0.5) for _ in range(steps)]) for _ in range(4000)]
    assert sum(low <= 1.0 <= high for low, high in intervals) / len(intervals) == pytest.approx(CONFIDENCE, abs=0.02)


def test_the_interval_of_a_median_narrows_with_more_steps_and_is_the_range_of_a_few() -> None:
    def width(steps: int) -> float:
        low, high = median_interval([step / steps for step in range(steps + 1)])
        return high - low

    assert width(10_000) < width(1000) / 2 < width(100) / 4
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0) and median_interval([2.0]) == (2.0, 2.0)


def test_a_trial_is_tied_with_the_best_when_the_intervals_of_their_medians_overlap() -> None:
    best = done("a", *(1.0 + step / 100 for step in range(10)))
    assert tied(best, done("b", *(1.03 + step / 100 for step in range(10))))
    assert not tied(best, done("b", *(1.06 + step / 100 for step in range(10))))
    hundred = [done(name, *(start + step / 1000 for step in range(100))) for name, start in (("a", 1.0), ("b", 1.03))]
    assert not tied(*hundred), "more steps narrow the intervals"
    assert tied(best, done("b", 1.05)) and not tied(best, done("b", 1.2)), "a single step is a point"


@pytest.mark.parametrize("slow", [
    (0.780, 0.790, 0.793, 0.793, 2.0, 2.1),  # its quartiles are so far apart that their range over root n reaches below every step
    (0.793, 0.793),
])  # fmt: skip
def test_what_is_faster_in_every_step_is_never_tied(slow: tuple[float, ...]) -> None:
    assert not tied(done("best", 0.290, 0.295, 0.296), done("slow", *slow))


def test_one_odd_step_ties_nothing() -> None:
    assert not tied(done("best", 0.290, 0.294, 0.295, 0.300, 0.900), done("slow", 0.780, 0.790, 0.793, 0.795, 0.800))


def test_ties_with_the_best_are_flagged_and_the_best_is_not() -> None:
    ranked = rank([done("slow", 2.0, 2.1), done("close", 1.01, 1.2), done("best", 1.0, 1.1)])
    assert [(m.trial, m.tied_with_best) for m in ranked] == [("best", False), ("close", True), ("slow", False)]
    assert [m.trial for m in leaders(ranked)] == ["best", "close"]


def test_json_ranking_has_every_promised_key_and_no_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = demo_sweep(tmp_path)
    sweep.done(point(1, 2), 0.4, step_time_spread_s=math.nan, mfu=math.inf)
    assert rank_verb.main(["--json", "--dir", str(tmp_path)]) == 0
    records = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    promised = {
        "trial", "status", "reason", "layout", "step_time_s", "step_time_spread_s", "tokens_per_s", "peak_memory_bytes",
        "predicted_step_time_s", "predicted_memory_bytes", "mfu", "tied_with_best", "dir", "overrides", "loss_gap", "other_model",
    }  # fmt: skip
    assert all(promised <= record.keys() for record in records)
    assert [r["predicted_step_time_s"] for r in records[:2]] == [0.22, None]
    assert (Path(records[0]["dir"]) / "result.json").exists()
    assert records[0]["layout"]["tensor"] == 2 and records[0]["overrides"] == ["layout.tensor=2", "layout.pipeline=2"]


def test_energy_and_faults_of_gpus_are_shown_where_they_are_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = demo_sweep(tmp_path)
    assert rank_verb.main(["planted", "--dir", str(tmp_path)]) == 0
    assert "J/step" not in (plain := capsys.readouterr().out) and "GPUs with a fault" not in plain
    hot = {"rank": 1, "host": "n7", "gpu": "GPU-1", "slowed_by": {"temperature": 0.5}}
    sweep.done(point(1, 4), 0.5, energy_per_step_j=1234.0, gpus=[hot])
    assert rank_verb.main(["planted", "--dir", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "J/step" in table and "1.23 k" in table
    assert "rank 1 on n7 (GPU-1): slowed down by temperature in 50 % of the readings" in " ".join(table.split())


def test_table_shows_prediction_beside_measurement_and_each_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo_sweep(tmp_path)
    assert rank_verb.main(["planted", "--dir", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "predicted" in table and "220 ms" in table and "+10.0 %" in table
    assert (
        "failed: out of memory" in table
        and "Pruned, and not run:\n  layout.tensor=3: layout.tensor=3 does not" in table
        and "t2 p2 d1 mb1 1f1b" in table
    )


def test_table_prints_markup_in_messages_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SweepOnDisk(tmp_path).add(Point(("a=[red]x[/red]",), None, "[/bold] is [link=x]odd"))
    rank_verb.main(["--dir", str(tmp_path)])
    table = capsys.readouterr().out
    assert "a=[red]x[/red]" in table and "[/bold] is [link=x]odd" in table


def test_steps_repeated_after_a_resumption_count_once(tmp_path: Path) -> None:
    record = SweepOnDisk(tmp_path).add(point(1, 1), Status.RUNNING)
    write_metrics(record, [9.0, 9.0, 9.0, 9.0, 9.0])
    write_metrics(record, [1.0, 1.0, 1.0], first=3, attempt=1)
    m = measure([record])[0]
    assert (m.step_time_s, m.steps_measured) == (1.0, 3)


def test_half_written_metrics_are_read_up_to_the_last_whole_line(tmp_path: Path) -> None:
    record = SweepOnDisk(tmp_path).add(point(1, 1), Status.RUNNING)
    write_metrics(record, [3.0, 3.0, 1.0])
    with (record.directory / "metrics.jsonl").open("a") as file:
        file.write('not json\n{"step": "x"}\n{"step": 4, "step_time_s": 5')
    assert measure([record])[0].step_time_s == 1.0


def test_result_of_an_older_attempt_does_not_count(tmp_path: Path) -> None:
    sweep = SweepOnDisk(tmp_path)
    record = sweep.done(point(1, 1), 0.1)
    record.attempt = 1
    write_json(record.directory / "metrics.jsonl", {})
    assert measure([record])[0].step_time_s is None


@pytest.mark.parametrize(
    "precision, gap, marked", [("fp32", 1e-4, False), ("fp32", 0.01, True), ("bf16", 0.01, False), ("bf16", 0.05, True)]
)
def test_a_trial_that_does_not_train_the_same_model_never_wins(precision: str, gap: float, marked: bool) -> None:
    def of(name: str, seconds: float, factor: float, **changes: Any) -> Measurement:
        losses = tuple(factor * loss for loss in (9.0, 8.5, 8.0))
        same = problem({"model": {"layers": 2}, "run": {"precision": precision, "global_batch": 8, "seed": 1}})
        return Measurement(name, Status.DONE, step_time_s=seconds, losses=losses, problem=same, **changes)

    ranked = rank([of("wrong", 0.1, 1 + gap), of("right", 0.2, 1.0), of("also", 0.3, 1.0), of("third", 0.4, 1.0)])
    assert [m.trial for m in ranked if m.other_model] == ["wrong"] * marked
    assert ranked[0].trial == ("right" if marked else "wrong") and ranked[-1].place == 4


@pytest.mark.parametrize("odd", [math.inf, math.nan])
def test_a_loss_that_is_not_finite_shifts_no_other_loss(odd: float) -> None:
    curves = [[9, 8, 7, 6, 5], [9, 8, 7, 6, 5], [9, odd, 7, 6, 5]]
    same = problem({"model": {"layers": 2}, "run": {"precision": "fp16", "global_batch": 8, "seed": 1}})
    ranked = rank(
        Measurement(str(i), Status.DONE, step_time_s=3.0 - i, losses=_first_losses(curve), problem=same) for i, curve in enumerate(curves)
    )
    assert not any(m.other_model for m in ranked) and ranked[0].trial == "2"


def test_losses_are_compared_only_between_trials_of_one_problem_and_one_trainer() -> None:
    run = {"model": {"layers": 2}, "run": {"precision": "fp32"}}
    problems = [problem(run | {"command": {"trainer": name}}) for name in ("a", "b")] + [problem(run | {"model": {"layers": 4}})]
    ranked = rank(Measurement(p, Status.DONE, step_time_s=1.0, losses=(float(i + 1),), problem=p) for i, p in enumerate(problems))
    assert problem(run) == problem(run | {"tune": {"method": "full", "base": None}}) == problem(run, {})
    assert len({problem(run | {"tune": {"method": name}}, {"examples": read}) for name in ("full", "lora") for read in ("1", "2")}) == 4
    assert len(set(problems)) == 3 and not any(m.other_model for m in ranked)
