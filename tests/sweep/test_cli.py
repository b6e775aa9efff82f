"""``trireme status``, ``logs`` and ``cancel``, with a launcher at work and without."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest

from launcher.cli import cancel, logs, main, status
from launcher.trials.store import Store
from tests.sweep.support import Point, launcher, starts, sweep, trial, trial_json, until
from tests.warm import Process
from trainer.shared.records.outcome import Reason, Status

pytestmark = pytest.mark.slow

RUN = """
records = sweep(Path(sys.argv[1]), trial("sleep 0.2", tensor=2, steps=10_000, seed=0), trial("ok", seed=1))
print(*(record.status.value for record in records))
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a busy machine takes to end what is cancelled."""
    monkeypatch.setattr(cancel, "_PATIENCE_SECONDS", 600.0)


def running_sweep(runs: Path) -> tuple[Process, str]:
    """A launcher whose first trial makes steps, and the id of that trial."""
    process = launcher(RUN, runs)
    path = until(lambda: list(runs.glob("trials/*/metrics.jsonl")))[0]
    until(lambda: trial_json(path.parent).get("status") == "running")
    return process, path.parent.name


def ended(runs: Path, *behaviours: str) -> Store:
    sweep(runs, *(trial(behaviour, tensor=2, seed=seed) for seed, behaviour in enumerate(behaviours)), retries=1)
    return Store(runs)


def test_status_shows_every_trial_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(tmp_path, "ok", "fail 1 out_of_memory")
    assert status.main(["--dir", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert table.startswith("sweep demo (layout t2 p1 d1 mb1)\n") and "data.pattern=ok" in table and "done" in table and "4/4" in table
    assert "failed: out of memory" in table and "rank 1: played failure" in table


def test_status_as_json_is_one_document_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = ended(tmp_path, "ok", "once communication")
    status.main(["demo", "--json", "--dir", str(tmp_path)])
    document = json.loads(capsys.readouterr().out)
    first, second = document["trials"]
    assert (document["sweep"], first["status"], first["step"], first["steps"], first["attempt"]) == ("demo", "done", 4, 4, 0)
    assert (second["status"], second["attempt"], second["dir"]) == ("done", 1, str(store.sweep().records[1].directory))


def test_status_of_a_running_sweep_shows_the_step_it_is_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process, identifier = running_sweep(tmp_path)
    status.main(["--json", "--dir", str(tmp_path)])
    first, second = json.loads(capsys.readouterr().out)["trials"]
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert (first["trial"], first["status"], second["status"]) == (identifier, "running", "planned")
    assert first["step"] >= 1


def test_status_tells_that_a_trial_ended_with_its_killed_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process, identifier = running_sweep(tmp_path)
    pids = trial_json(tmp_path / "trials" / identifier)["handle"]["pids"]
    process.kill()
    process.wait()
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    status.main(["--json", "--dir", str(tmp_path)])
    first = json.loads(capsys.readouterr().out)["trials"][0]
    assert (first["status"], first["reason"], first["detail"]) == ("planned", "node", "its launcher ended, and its ranks with it")


def test_logs_without_a_name_are_of_the_trial_that_was_submitted_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = ended(tmp_path, "ok", "ok").sweep().records
    first.submitted, second.submitted = 20.0, 10.0
    (first.directory / "logs" / "attempt0.rank0.log").write_text("the newest\n")
    for record in (first, second):
        Store(tmp_path).save(record)
    capsys.readouterr()
    logs.main(["--rank", "0", "--dir", str(tmp_path)])
    assert capsys.readouterr().out == "the newest\n"


def test_logs_of_a_trial_that_waits_for_another_attempt_are_those_of_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (record,) = ended(tmp_path, "ok").sweep().records
    record.status, record.attempt, record.handle = Status.PLANNED, 1, None
    Store(tmp_path).save(record)
    capsys.readouterr()
    logs.main([record.id, "--rank", "0", "--dir", str(tmp_path)])
    assert capsys.readouterr().out == "rank 0 of attempt 0 begins\n"


def test_status_all_lists_the_sweeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(tmp_path, "ok")
    sweep(tmp_path, trial("ok", tensor=2, seed=0), name="second")
    status.main(["--all", "--json", "--dir", str(tmp_path)])
    assert [(s["sweep"], s["done"], s["failed"]) for s in json.loads(capsys.readouterr().out)] == [("second", 1, 0), ("demo", 1, 0)]


def test_hostile_overrides_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = ("a=[bold]x[/bold]", "$(touch owned)", "[/]")
    store = Store(tmp_path)
    store.write_sweep("demo", [store.plan(Point(hostile, None, "[red]no[/red]"), "demo")], "test")
    status.main(["--dir", str(tmp_path)])
    table = capsys.readouterr().out
    assert " ".join(hostile) in table and "[red]no[/red]" in table


def test_logs_of_all_ranks_or_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (record,) = ended(tmp_path, "ok").sweep().records
    logs.main([record.id[:5], "--dir", str(tmp_path)])
    assert capsys.readouterr().out.splitlines() == ["[0] rank 0 of attempt 0 begins", "[1] rank 1 of attempt 0 begins"]
    logs.main([record.id[:5], "--rank", "1", "--dir", str(tmp_path)])
    assert capsys.readouterr().out.splitlines() == ["rank 1 of attempt 0 begins"]


def test_logs_are_of_the_newest_attempt_unless_another_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (record,) = ended(tmp_path, "once communication").sweep().records
    logs.main([record.id, "--rank", "0", "--dir", str(tmp_path)])
    logs.main([record.id, "--rank", "0", "--attempt", "0", "--dir", str(tmp_path)])
    assert capsys.readouterr().out.splitlines() == ["rank 0 of attempt 1 begins", "rank 0 of attempt 0 begins"]


@pytest.mark.parametrize(("arguments", "words"), [
    (["logs", "ffff"], "error: there is no trial 'ffff'"),
    (["logs", "ID", "--rank", "2"], "error: --rank 2 is not a rank of trial"),
    (["logs", "ID", "--attempt", "5"], "has no log of attempt 5; there is 0"),
    (["status", "dem"], "error: there is no sweep 'dem' in"),
    (["cancel", "dem"], "error: there is no trial 'dem' in"),
])  # fmt: skip
def test_what_does_not_exist_is_one_plain_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    (record,) = ended(tmp_path, "ok").sweep().records
    capsys.readouterr()
    assert main.main([record.id if a == "ID" else a for a in arguments] + ["--dir", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


def test_following_logs_goes_on_through_attempts_and_ends_with_the_trial(tmp_path: Path) -> None:
    process = launcher("sweep(Path(sys.argv[1]), trial('gate communication', tensor=2))", tmp_path)
    directory = until(lambda: list(tmp_path.glob("trials/*/metrics.jsonl")))[0].parent
    with Process("-m", "launcher", "logs", "-f", directory.name, "--dir", tmp_path, stdout=PIPE, stderr=PIPE, text=True) as follower:
        assert follower.stderr.readline() == "-- attempt 0 --\n"
        (directory / "go").touch()
        lines = sorted(follower.communicate(timeout=600)[0].splitlines())
    process.communicate()
    assert lines == [f"[{rank}] rank {rank} of attempt {attempt} begins" for rank in (0, 1) for attempt in (0, 1)]


def test_cancelling_a_sweep_at_work_ends_its_trials_and_its_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process, identifier = running_sweep(tmp_path)
    pids = trial_json(tmp_path / "trials" / identifier)["handle"]["pids"]
    assert cancel.main(["demo", "--dir", str(tmp_path)]) == 0
    assert "2 stopped" in capsys.readouterr().out
    assert "stopped stopped" in process.communicate(timeout=600)[0]
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))  # an orphan is collected a moment after its end
    records = Store(tmp_path).sweep().records
    assert [(r.status, r.reason) for r in records] == [(Status.STOPPED, Reason.CANCELLED)] * 2
    assert starts(records[1]) == [] and Store(tmp_path).stop_requests() == {}


def test_cancelling_a_trial_lets_the_sweep_go_on(tmp_path: Path) -> None:
    process, identifier = running_sweep(tmp_path)
    assert cancel.main([identifier[:8], "--dir", str(tmp_path)]) == 0
    assert "stopped done" in process.communicate(timeout=600)[0]


def test_cancelling_what_has_ended_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(tmp_path, "ok")
    capsys.readouterr()
    assert cancel.main(["demo", "--dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "nothing to stop: demo has ended\n"
