"""What a person sees of a sweep in a terminal: the figures that matter at any width, and rows that can be told apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.cli import rank, status
from launcher.results import report
from launcher.sweep.search import measured_steps
from launcher.tracking import names as tracked
from launcher.trials.labels import left_s, newest_step, trial_labels
from launcher.trials.store import Point, Record, Store
from tests.results.trial_files import SweepOnDisk, demo_sweep, point, seeded, write_metrics
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.records.trial_files import read_steps, step_metrics
from trainer.shared.run.errors import ConfigError

pytestmark = pytest.mark.slow

LONG = ("layout.tensor=3", "data.path=/scratch/" + "very/" * 30 + "long", "run.seed=7\n8", "cluster.env.TOKEN=planted-secret")


def hostile_sweep(root: Path) -> None:
    """Measured, tied, failed and pruned trials; names and words that are long or of several lines."""
    sweep = demo_sweep(root)
    sweep.done(point(2, 1, micro_batch=2, recompute="selective"), 0.201)
    sweep.failed(point(1, 2), Reason.COMMUNICATION, "the first line\nand " + "more " * 50)
    sweep.add(point(4, 1, micro_batch=2), Status.STOPPED, Reason.CANNOT_WIN, "8 steps of 0.3 s at least\x1b[31m")
    sweep.add(Point(LONG, None, "layout.tensor=3 does not divide model.heads=4; " + "use another one " * 20))


def shown(verb: object, root: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert verb.main([*arguments, "--dir", str(root)]) == 0  # type: ignore[attr-defined]
    return capsys.readouterr().out.splitlines()


def row_of(lines: list[str], words: str) -> str:
    return next(line for line in lines if words in line)


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_no_line_is_wider_than_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    hostile_sweep(tmp_path)
    for lines in (shown(verb, tmp_path, capsys, *words) for verb, words in ((rank, []), (status, []), (status, ["--all"]))):
        assert max(map(len, lines)) <= columns
        assert not any("…" in line and "/…" not in line and "y/v" not in line for line in lines), "nothing is cut"
        assert all(line.isprintable() for line in lines)


def test_eighty_columns_show_place_layout_time_spread_ties_and_outcome(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    hostile_sweep(tmp_path)
    lines = shown(rank, tmp_path, capsys)
    assert all(head in row_of(lines, "layout") for head in ("layout", "step time", "spread", "outcome"))
    best, tie, failed = row_of(lines, "t2 p2 d1"), row_of(lines, "2="), row_of(lines, "out of memory")
    assert best.startswith("1 ") and "200 ms" in best and "±" in best and best.rstrip().endswith("done")
    assert "201 ms" in tie and "±" in tie
    assert "t4 p1 d1 mb1" in failed and "failed: out of memory" in failed


def test_forty_columns_show_place_layout_and_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    hostile_sweep(tmp_path)
    best = row_of(shown(rank, tmp_path, capsys), "t2 p2 d1")
    assert best.startswith("1 ") and best.endswith("200 ms")
    lines = shown(status, tmp_path, capsys)
    assert row_of(lines, "layout").split() == ["layout", "status", "step"]
    assert row_of(lines, "t2 p2 d1").split()[-2:] == ["done", "8/8"]


def test_pruned_combinations_are_a_list_below_the_table_with_the_reason_of_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile_sweep(tmp_path)
    for verb in (rank, status):
        lines = shown(verb, tmp_path, capsys)
        below = lines[lines.index("Pruned, and not run:") :]
        assert len(below) == 3 and all("does not divide model.heads=4; use " in line for line in below[1:])
        assert not any("tensor=3" in line for line in lines[: -len(below)])


def test_a_pipe_gets_every_column_and_each_row_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    hostile_sweep(tmp_path)
    lines = shown(rank, tmp_path, capsys)
    heads = ("trial", "layout", "step time", "spread", "predicted", "error", "tokens/s", "memory", "outcome")
    assert all(head in row_of(lines, "layout") for head in heads)
    assert row_of(lines, "use another one").count("use another one") == 20
    assert not any(line.endswith("  " * 20) for line in lines)


@pytest.mark.parametrize(("overrides", "label"), [
    ([("run.seed=1",), ("run.seed=2",)], "run.seed=2"),
    ([("model=gpt_tiny", "optimizer.lr=0.1"), ("model=gpt_tiny", "optimizer.lr=0.2")], "optimizer.lr=0.2"),
    ([("model=gpt_tiny",), ("model=gpt_mini",)], "model=gpt_mini"),
    ([(), ("+run.seed=1",)], "run.seed=1"),
    ([("serving.tensor=[1]", "run.seed=1"), ("serving.tensor=[2]", "run.seed=2")], "run.seed=2"),  # the layout says it
    ([("data.path=/a/" + 60 * "b" + "/1",), ("data.path=/a/" + 60 * "b" + "/2",)], "data.path=/a/bbbbbbbbbbbbbbbbb…bbbbbbbbbbbbbbbbb/2"),
    ([("run.seed=1", "sweep.name=a"), ("run.seed=1", "sweep.name=b")], "t2 p2 d1 mb1 1f1b run.seed=2"),  # composed from other files
])  # fmt: skip
def test_rows_are_labelled_by_what_differs_between_them(tmp_path: Path, overrides: list[tuple[str, ...]], label: str) -> None:
    sweep = SweepOnDisk(tmp_path)
    for seed, words in enumerate(overrides, start=1):
        planned = seeded(seed)
        sweep.done(Point(words, planned.config), 0.2 + seed / 10)
    labels = trial_labels(Store(tmp_path).sweep().records)
    assert labels[sweep.records[1].id] == label
    assert len(set(labels.values())) == 2


def test_the_layout_is_in_the_label_where_layouts_differ_and_in_the_heading_where_they_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = SweepOnDisk(tmp_path)
    sweep.done(seeded(1), 0.2)
    assert trial_labels(sweep.records) == {sweep.records[0].id: "t2 p2 d1 mb1 1f1b"}
    sweep.done(seeded(2), 0.3)
    assert shown(rank, tmp_path, capsys)[0] == "planted (layout t2 p2 d1 mb1 1f1b)"
    sweep.done(replace(point(1, 4), overrides=("model=gpt_tiny", "layout.pipeline=4")), 0.4)
    assert sorted(trial_labels(sweep.records).values()) == [
        "t1 p4 d1 mb1 1f1b",
        "t2 p2 d1 mb1 1f1b run.seed=1",
        "t2 p2 d1 mb1 1f1b run.seed=2",
    ]
    assert shown(rank, tmp_path, capsys)[0] == "planted"


def test_report_and_status_use_the_same_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = SweepOnDisk(tmp_path)
    for seed in (1, 2):
        sweep.done(seeded(seed), 0.2 + seed / 10)
    page = report.render(Store(tmp_path).sweep())
    lines = "\n".join(shown(status, tmp_path, capsys))
    assert all(f"run.seed={seed}" in page and f"run.seed={seed}" in lines for seed in (1, 2))


ABSURD = ("1e308", "-5", "NaN", "Infinity", '"x"', "1" + "0" * 400, "null", "[1]", "true", "{}")


def spoil(record: Record, value: str, result: bool) -> None:
    """Put ``value`` in the place of every figure that a trial left."""
    line = f'{{"attempt": 0, "step": %d, "loss": {value}, "step_time_s": {value}, "tokens_per_s": {value}, "time": {value}}}\n'
    text = "".join(line % step for step in range(1, 9)) + f'{{"attempt": 0, "step": 1{"0" * 400}, "step_time_s": 1}}\n'
    (record.directory / "metrics.jsonl").write_text(text)
    names = ("step_time_s", "step_time_spread_s", "tokens_per_s", "mfu", "peak_memory_bytes", "memory", "step_split_s", "layout", "losses")
    figures = "".join(f'"{name}": {value}, ' for name in names)
    written = f'{{{figures} "step_times_s": [{value}, {value}, {value}, {value}], "status": "done", "attempt": 0}}'
    (record.directory / "result.json").write_text(written if result else "")


@pytest.mark.parametrize("result", [True, False], ids=["result", "metrics"])
@pytest.mark.parametrize("value", ABSURD, ids=lambda value: value[:8])
def test_absurd_figures_are_no_measurements_and_hide_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str, result: bool
) -> None:
    sweep = SweepOnDisk(tmp_path)
    spoil(sweep.done(point(2, 1), 0.1), value, result)
    sweep.done(point(1, 4), 0.25)
    best = row_of(shown(rank, tmp_path, capsys), "t1 p4")
    assert best.startswith("1 ") and "250 ms" in best
    records = Store(tmp_path).sweep().records
    json.loads("\n".join(shown(rank, tmp_path, capsys, "--json")), parse_constant=pytest.fail)
    shown(status, tmp_path, capsys)
    page = report.render(Store(tmp_path).sweep())
    assert "250 ms" in page
    assert "step_time_s" not in tracked.trial_metrics(records[0])
    assert all(isinstance(metric[1], float) for line in read_steps(records[0].directory) for metric in step_metrics(line))
    assert measured_steps(records[0]) == [] and newest_step(records[0]).count("step") <= 1


def test_no_value_of_an_environment_variable_is_part_of_a_label(tmp_path: Path) -> None:
    sweep = SweepOnDisk(tmp_path)
    for number in (1, 2):
        sweep.add(Point((f"cluster.env.TOKEN=planted-{number}", "layout.tensor=3", f"run.seed={number}"), None, "no"))
    assert sorted(trial_labels(sweep.records).values()) == ["run.seed=1", "run.seed=2"]


def test_repeats_that_contradict_each_other_are_named_in_one_line_and_those_that_agree_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = SweepOnDisk(tmp_path)
    first = sweep.done(seeded(1), 0.2)
    sweep.done(seeded(2), 0.202)
    sweep.done(point(4, 1), 2.0)
    rank.main(["--dir", str(tmp_path)])
    assert capsys.readouterr().err == ""
    last = sweep.done(seeded(3), 2.0)
    rank.main(["--dir", str(tmp_path), "--json"])
    told = capsys.readouterr()
    (line,) = told.err.splitlines()
    assert line.startswith(f"warning: repeats of one layout contradict each other: {first.id} 200 ms, ") and f"{last.id} 2.00 s;" in line
    assert len(json.loads(told.out)) == 4
    rank.main(["--dir", str(tmp_path)])
    told = capsys.readouterr()
    assert told.err == "" and "repeats of one layout contradict each other" in told.out.splitlines()[-1]


def test_a_watched_sweep_is_a_line_for_each_change_until_all_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = SweepOnDisk(tmp_path)
    first, second = sweep.done(seeded(1), 0.2), sweep.done(seeded(2), 0.2)
    later = [(first, Status.RUNNING), (first, Status.RUNNING), (first, Status.DONE), (second, Status.DONE)]
    first.status = second.status = Status.PLANNED
    for record in (first, second):
        sweep.store.save(record)

    def pass_time(seconds: float) -> None:
        assert seconds == 2.0
        record, record.status = later[0][0], later[0][1]
        sweep.store.save(later.pop(0)[0])

    monkeypatch.setattr(status.time, "sleep", pass_time)
    monkeypatch.setattr(status, "caught_up", lambda _, read: read())
    assert status.main(["--watch", "--dir", str(tmp_path)]) == 0
    head, *lines = [line.split("  ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert head == "sweep planted: 2 planned" and not later
    assert [line.split("  ")[::2][:2] for line in lines] == [
        [first.id, "running"],
        [f"[1/2] {first.id}", "done"],
        [f"[2/2] {second.id}", "done"],
    ]
    for words in (["--watch", "0"], ["--watch", "--all"], ["--watch", "1", "--json"]):
        with pytest.raises(ConfigError, match="--watch="):
            status.main([*words, "--dir", str(tmp_path)])


def test_a_running_trial_says_what_is_left_by_its_steps_or_the_prediction(tmp_path: Path) -> None:
    record = SweepOnDisk(tmp_path).add(seeded(1), Status.RUNNING)
    assert left_s(record) is None
    record.predicted = {"step_time_s": 2.0}
    total = record.config["run"]["steps"]
    assert left_s(record) == 2.0 * total
    write_metrics(record, [9.0, 0.5])
    assert left_s(record) == 0.5 * (total - 2)
    record.status = Status.DONE
    assert left_s(record) is None


def test_what_is_said_of_a_measured_trial_stands_below_the_ranking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = demo_sweep(tmp_path)
    record = sweep.done(point(2, 1, micro_batch=2), 0.4)
    record.detail = "its log ends at step 3, and run.steps=5"
    sweep.store.save(record)
    lines = shown(rank, tmp_path, capsys)
    below = lines[lines.index("Measured, with a remark:") :]
    assert [line for line in below if record.id in line and "step 3" in line]
