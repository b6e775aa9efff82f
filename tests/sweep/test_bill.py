"""GPU-hours and money before runs and after them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import labels
from launcher.cli import main
from launcher.config import compose, resolve
from launcher.config.schema import SweepConfig
from launcher.results.ranking import measurement
from launcher.sweep import bill
from launcher.sweep.bill import Bill, added_up, confirm, of_points
from launcher.sweep.run import Point
from launcher.trials.spent import gpu_hours
from launcher.trials.store import Store
from trainer.shared.records.outcome import Status
from trainer.shared.run.errors import ConfigError

PRICED = ["model=gpt_tiny", "data=synthetic", "cluster.gpus_per_node=4", "cluster.price_per_gpu_hour=2.5", "run.steps=720"]


def points(count: int = 2, predicted: bool = True) -> list[Point]:
    config = resolve(compose([*PRICED, "layout.tensor=2"]))
    runs = [dataclasses.replace(config.run, seed=seed) for seed in range(count)]
    figures = {"step_time_s": 10.0, "interval_s": None, "memory_bytes": 1.0, "parts": {}} if predicted else None
    return [Point((), dataclasses.replace(config, run=run), predicted=figures) for run in runs]


@given(st.lists(st.tuples(st.one_of(st.none(), st.floats(0, 1e9)), st.integers(1, 10_000), st.one_of(st.none(), st.floats(0.01, 100)))))
def test_a_bill_is_the_sum_of_its_runs_and_has_a_price_only_if_all_have(runs: list[tuple[Any, int, Any]]) -> None:
    made = added_up(runs)
    known = [(s * ranks / 3600, price) for s, ranks, price in runs if s is not None]
    assert made.gpu_hours == pytest.approx(sum(hours for hours, _ in known)) and made.unknown == len(runs) - len(known)
    if known and all(price for _, price in known):
        assert made.price == pytest.approx(sum(hours * price for hours, price in known))
    else:
        assert made.price is None


def test_a_sweep_is_billed_for_the_trials_that_it_will_start(tmp_path: Path) -> None:
    settings, made = SweepConfig(dir=str(tmp_path)), points()
    assert of_points(made, settings) == Bill(16.0, 7200.0, 40.0)  # 2 trials of 2 hours on 4 ranks
    store = Store(tmp_path)
    record = store.plan(made[0], "s")
    record.status = Status.RUNNING
    store.save(record)
    assert of_points(made, settings) == Bill(8.0, 7200.0, 20.0)
    assert of_points([*made, *points(1, predicted=False)], settings).unknown == 0  # the trial under way is the same


def test_above_the_limit_nothing_starts_without_a_yes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    confirm(Bill(16.0, 7200.0, 40.0), 16.0, "predicted")
    assert capsys.readouterr().err == "predicted: 2.00 hours, 16.0 GPU-hours, 40.00\n"
    for large in (Bill(16.1, 7200.0, None), Bill(0.0, 0.0, None, unknown=1)):
        with pytest.raises(
            ConfigError, match=r"^sweep\.confirm_gpu_hours=16 and this takes .*raise sweep\.confirm_gpu_hours or set it to null"
        ):
            confirm(large, 16.0, "predicted")
        confirm(large, None, "predicted")

    class Terminal:
        def __init__(self, answer: str):
            self.answer = answer

        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return self.answer

    monkeypatch.setattr(bill.sys, "stderr", type("Shown", (Terminal,), {"write": lambda *_: 0, "flush": lambda *_: None})(""))
    for answer, starts in (("y\n", True), ("Yes\n", True), ("\n", False), ("", False), ("no\n", False)):
        monkeypatch.setattr(bill.sys, "stdin", Terminal(answer))
        if starts:
            confirm(Bill(17.0, 7200.0, None), 16.0, "predicted")
        else:
            with pytest.raises(ConfigError, match="not started"):
                confirm(Bill(17.0, 7200.0, None), 16.0, "predicted")


@pytest.mark.parametrize("verb", [["train"], ["search"]])
def test_a_refused_launch_leaves_nothing(
    verb: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main([*verb, *PRICED, "hardware=l40s", "sweep.confirm_gpu_hours=0"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: sweep.confirm_gpu_hours=0 and this takes ") and not [*tmp_path.glob("runs/trials/*")]


def test_what_a_trial_cost_is_what_its_attempts_held(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record = store.plan(points(1)[0], "s")
    record.status, record.attempt, record.started, record.ended = Status.DONE, 1, 1000.0, 4600.0
    record.history = [{"attempt": 0, "status": "failed", "started": 100.0, "ended": 1900.0}]
    assert gpu_hours(record) == 6.0  # an hour and a lost half on 4 ranks
    found = measurement(record, {"tokens_per_s": 1e6, "step_time_s": 1.0}, gpu_hours(record))
    assert (found.gpu_hours, found.price) == (6.0, 15.0)
    assert found.gpu_hours_per_billion_tokens == pytest.approx(4 * 1000 / 3600)
    assert found.price_per_billion_tokens == pytest.approx(2.5 * 4 * 1000 / 3600)
    record.cluster["price_per_gpu_hour"] = None
    assert measurement(record, {"tokens_per_s": 1e6}, 6.0).price_per_billion_tokens is None


def test_sums_and_money_are_to_the_cent() -> None:
    assert [labels.money(value) for value in (None, 0, 0.01234, 1.005, 1234.5)] == ["-", "0.00", "0.0123", "1.00", "1,234.50"]
    assert labels.spent([(1.5, 3.0), (2.5, None)]) == "2 trials took 4.00 GPU-hours, 3.00"
    assert labels.spent([]) == "0 trials took 0.00 GPU-hours"
