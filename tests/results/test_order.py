"""The order of trials is that of what was measured, and ties go by where medians may lie."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.results.ranking import Measurement, leaders, measurement, rank, tied
from tests.results.trial_files import STEPS, WARMUP, SweepOnDisk, point
from trainer.shared.records.outcome import Status

SECONDS = st.sampled_from((0.1, 0.2, 0.3))


@given(st.lists(st.tuples(SECONDS, st.none() | SECONDS), min_size=1, max_size=6))
def test_what_was_predicted_has_no_part_in_the_order(trials: list[tuple[float, float | None]]) -> None:
    known = [Measurement(f"t{i}", Status.DONE, step_time_s=time, predicted_step_time_s=told) for i, (time, told) in enumerate(trials)]
    assert [m.step_time_s for m in rank(known)] == sorted(time for time, _ in trials)


@given(st.permutations("abcd"))
def test_equal_times_are_ordered_by_trial(order: list[str]) -> None:
    ranked = rank(Measurement(name, Status.DONE, step_time_s=0.2) for name in order)
    assert [m.trial for m in ranked] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("interval", "tie"),
    [((0.08, 0.2), True), ((0.11, 0.2), True), ((0.12, 0.2), True), ((0.13, 0.2), False), ((0.01, 0.5), True)],
)
def test_a_slower_trial_ties_wherever_its_interval_meets_that_of_the_best(interval: tuple[float, float], tie: bool) -> None:
    best = Measurement("best", Status.DONE, step_time_s=0.1, step_time_interval_s=(0.09, 0.12))
    other = Measurement("other", Status.DONE, step_time_s=0.15, step_time_interval_s=interval)
    assert tied(best, other) is tied(other, best) is tie
    assert len(leaders(rank([other, best]))) == 1 + tie


def test_steps_of_the_warm_up_are_no_part_of_what_was_measured(tmp_path: Path) -> None:
    record = SweepOnDisk(tmp_path).done(point(1, 1), 0.1, spread=0.02)
    known = measurement(record, record.read_result() or {})
    assert known.steps_measured == STEPS - WARMUP
    assert known.step_time_interval_s is not None and known.step_time_interval_s[1] < 0.11
