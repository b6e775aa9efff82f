"""The process that copies sweeps to MLflow: it loses nothing, whoever is killed when, and nobody waits for it."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from launcher.cli import main, status
from launcher.tracking import copier, database, unmirrored
from launcher.tracking import process as tracking
from launcher.tracking.process import MlflowMirror
from launcher.trials.lock import Locks
from tests.results.trial_files import SweepOnDisk, demo_sweep, point, tracked_at
from tests.tracking.mirrored import children, history, runs
from trainer.spec import Status
from trainer.testing import free_port

COPIER = [sys.executable, "-m", "launcher.tracking.copier", "--dir"]
HOLDER = """
import sys
from pathlib import Path
from launcher.trials.lock import Locks
locks = Locks(Path(sys.argv[1]) / "mlflow.lock")
assert locks.take("mlflow")
print("held", flush=True)
sys.stdin.read()
"""


def until(condition: Callable[[], object]) -> None:
    """Wait for something that is bound to happen, however slow the machine."""
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def copying(root: Path, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*COPIER, str(root)], stdin=stdin, env=database.environment())


@contextmanager
def lock_held(root: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process holds the lock of the database; it lets go when its input ends, or is killed at the end."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    try:
        yield holder
    finally:
        holder.kill()
        holder.wait()


def finished_sweep(root: Path, name: str = "planted") -> SweepOnDisk:
    sweep = SweepOnDisk(root, name)
    for tensor, pipeline in ((1, 1), (2, 1), (1, 2), (2, 2)):
        sweep.done(point(tensor, pipeline), 0.2)
    unmirrored.add(root, name)
    return sweep


def test_copiers_that_start_at_once_make_one_database_and_no_duplicate(tmp_path: Path) -> None:
    demo_sweep(tmp_path)
    unmirrored.add(tmp_path, "planted")
    copiers = [copying(tmp_path) for _ in range(3)]
    assert [each.wait(600) for each in copiers] == [0, 0, 0]
    assert len(children(tmp_path)) == 6 - 1, "all but the one that waits"
    assert len(runs(tmp_path)) == 6
    assert unmirrored.names(tmp_path) == []


def test_lock_is_waited_for_however_long_its_holder_takes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []
    take = Locks.take

    def counting(locks: Locks, name: str) -> bool:
        taken = take(locks, name)
        refused.extend([] if taken else [name])
        return taken

    def let_go(holder: subprocess.Popen[bytes]) -> None:
        until(lambda: len(refused) > 3)
        holder.kill()

    monkeypatch.setattr(Locks, "take", counting)
    days = itertools.count(0.0, 86400.0)
    monkeypatch.setattr(database, "time", SimpleNamespace(monotonic=lambda: next(days), sleep=time.sleep))
    with lock_held(root) as holder:
        threading.Thread(target=let_go, args=(holder,)).start()
        with database.exclusively(root):
            assert len(refused) > 3


def test_tables_are_made_without_the_lock_and_put_in_place_whole(tmp_path: Path) -> None:
    finished_sweep(tmp_path)
    code = f"import sys; from pathlib import Path; from launcher.tracking import database; database.make_database(Path({str(tmp_path)!r}))"
    with lock_held(tmp_path):
        making = subprocess.Popen(
            [sys.executable, "-c", code + "; print('made')"], stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": str(tmp_path)}
        )
        until(lambda: psutil.Process(making.pid).children() == [] and list(tmp_path.glob("trireme-mlflow-*/mlflow.db")))
        assert not (tmp_path / "mlflow.db").exists()
    assert making.communicate()[0].strip().endswith(b"made")
    assert (tmp_path / "mlflow.db").exists() and not list(tmp_path.glob("trireme-mlflow-*"))


def test_copier_stands_back_only_while_its_launcher_lives(root: Path) -> None:
    """What stands back can never come forward again as an ordinary user's process, and a busy machine has no idle moment."""
    finished_sweep(root)
    with lock_held(root):
        process = copying(root, subprocess.PIPE)
        assert process.stdin is not None
        until(lambda: [os.sched_getscheduler(child.pid) for child in psutil.Process(process.pid).children()] == [os.SCHED_IDLE])
        (child,) = psutil.Process(process.pid).children()
        process.stdin.close()
        until(lambda: not child.is_running())
        assert os.sched_getscheduler(process.pid) == os.SCHED_OTHER and process.poll() is None
    assert process.wait(600) == 0
    assert len(children(root)) == 4


def test_copier_outlives_its_launcher_and_finishes(root: Path) -> None:
    sweep = finished_sweep(root)
    code = (
        "import os, sys; from launcher.tracking.process import MlflowMirror\n"
        f"mirror = MlflowMirror({str(root)!r}, 'planted'); mirror.on_trial(None); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    until(lambda: unmirrored.names(root) == [])
    assert set(children(root)) == {record.id for record in sweep.records}


def test_copier_killed_halfway_is_completed_by_the_next_command(root: Path) -> None:
    sweep = finished_sweep(root)
    process = copying(root)
    until(lambda: any((root / "mlartifacts").glob("*/artifacts/*")))
    process.kill()
    process.wait()
    assert unmirrored.names(root) == ["planted"]
    assert status.main(["--dir", str(root)]) == 0
    until(lambda: unmirrored.names(root) == [])
    mirrored = children(root)
    assert set(mirrored) == {record.id for record in sweep.records}
    assert all(history(root, run.info.run_id) == list(range(1, 9)) for run in mirrored.values())
    assert all(run.info.status == "FINISHED" for run in mirrored.values())


def test_one_copier_copies_the_sweeps_of_all_launchers(root: Path) -> None:
    finished_sweep(root, "first")
    with lock_held(root):
        first = copying(root, subprocess.PIPE)
        locks = Locks(root / "copier.lock")
        until(lambda: locks.held("copier"))
        finished_sweep(root, "second")
        assert copying(root).wait(600) == 0, "it leaves its sweep to the one that is at work"
        assert unmirrored.names(root) == ["first", "second"]
    first.communicate()
    assert first.returncode == 0 and unmirrored.names(root) == []
    assert {run.data.tags["sweep"] for run in runs(root) if run.data.tags.get("kind") == "sweep"} == {"first", "second"}


def test_command_that_was_refused_leaves_no_run(root: Path) -> None:
    SweepOnDisk(root).add(point(1, 1))
    for name in ("planted", "never-written"):
        unmirrored.add(root, name)
    assert copying(root).wait(600) == 0
    assert unmirrored.names(root) == [] and not (root / "mlartifacts").exists()


def test_news_that_comes_while_a_sweep_is_copied_is_not_forgotten(tmp_path: Path) -> None:
    unmirrored.add(tmp_path, "planted")
    unmirrored.take(tmp_path, "planted")
    unmirrored.add(tmp_path, "planted")
    unmirrored.forget(tmp_path, "planted")
    assert unmirrored.names(tmp_path) == ["planted"]


def test_one_server_that_is_away_does_not_hold_up_other_sweeps(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(copier, "GIVE_UP_S", 0.0)
    away = SweepOnDisk(root, "away")
    away.done(tracked_at(point(1, 1, micro_batch=2), f"http://127.0.0.1:{free_port()}"), 0.2)
    unmirrored.add(root, "away")
    finished_sweep(root)
    assert not copier.Copier(root).finish()
    assert unmirrored.names(root) == ["away"] and "127.0.0.1" in unmirrored.trouble(root, "away")
    assert len(children(root)) == 4


def test_a_copier_ends_at_its_limit_in_the_middle_of_another_attempt(root: Path) -> None:
    """As MLflow tries a database that cannot be opened: a quarter of an hour for each attempt."""
    finished_sweep(root)
    unmirrored.add(root, "planted")
    body = """
import itertools, sys, time
from pathlib import Path
from launcher.tracking import copier
numbers = itertools.count()
copier.attempt = lambda mirror: "it fails" if next(numbers) == 0 else time.sleep(1000)
copier.GIVE_UP_S = 2.0
copier.Copier(Path(sys.argv[1])).finish()
"""
    done = subprocess.run([sys.executable, "-c", body, str(root)], env=database.environment(), timeout=600, check=False)
    assert done.returncode == 1 and unmirrored.names(root) == ["planted"]
    assert unmirrored.trouble(root, "planted") == "it fails", "and the next command goes on"


@pytest.mark.parametrize("name", ["q?x=1", "p%41", "%2541 #ü"])
def test_a_folder_of_any_name_has_its_database_in_itself(root: Path, name: str) -> None:
    folder = root / name
    folder.mkdir()
    shutil.copy(root / "mlflow.db", folder)
    SweepOnDisk(folder).done(point(1, 1), 0.2)
    unmirrored.add(folder, "planted")
    assert copying(folder).wait(600) == 0
    assert len(children(folder)) == 1 and list(folder.glob("mlartifacts/*/artifacts/*"))
    assert {path.name for path in root.iterdir()} == {"mlflow.db", name}


def test_launcher_waits_for_a_copier_that_is_about_to_finish(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracking, "PATIENCE_S", 600.0)
    sweep = finished_sweep(root)
    observer = MlflowMirror(root, "planted")
    observer.on_trial(sweep.records[0])
    observer.close()
    observer.finish(600.0)
    assert "MLflow does not have" not in capfd.readouterr().err
    assert all(run.info.status == "FINISHED" for run in children(root).values())


def test_launcher_never_waits_for_a_copier_that_hangs(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sweep = finished_sweep(root)
    observer = MlflowMirror(root, "planted")
    with lock_held(root):
        for _ in range(1000):
            observer.on_trial(sweep.records[0])
            observer.on_poll([sweep.records[0]])
        observer.close()
        observer.finish(0.1)
        assert observer._process is not None and observer._process.poll() is None, "it is left to finish"
    assert capfd.readouterr().err.count("is being copied to MLflow in the background") == 1
    assert observer._process.wait(600) == 0 and len(children(root)) == 4


def test_ctrl_c_while_mlflow_is_copied_leaves_that_to_the_background(
    root: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished_sweep(root)
    observer = MlflowMirror(root, "planted")

    def said(text: str) -> None:
        print(text, file=sys.stderr)
        if "Ctrl-C" in text:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(tracking, "say", said)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with lock_held(root):
            observer.finish(600.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "copying to MLflow; Ctrl-C leaves it to the background" in capfd.readouterr().err
    assert observer._process is not None and observer._process.wait(600) == 0 and len(children(root)) == 4


def test_trials_that_end_in_a_queue_reach_mlflow_by_whoever_looks(root: Path) -> None:
    """With sweep.follow=false nobody is there when a trial ends: the command that notices has it copied."""
    sweep = SweepOnDisk(root)
    record = sweep.add(point(1, 1), Status.SUBMITTED)
    record.handle = {"job": "lost", "pids": [], "host": "nowhere"}
    sweep.store.save(record)
    assert unmirrored.names(root) == []
    assert status.main(["--dir", str(root)]) == 0
    assert sweep.store.load(record.id).status is not Status.SUBMITTED
    until(lambda: unmirrored.names(root) == [])


def test_a_folder_in_place_of_the_copiers_log_is_said_and_ends_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mlflow.log").mkdir()
    words = ["train", "model=gpt_tiny", "data=synthetic", "run.steps=2", "run.warmup_steps=1", f"sweep.dir={tmp_path}"]
    assert main.main(words) == 0
    assert (
        f"what copying to MLflow has to say is lost: {tmp_path / 'mlflow.log'} cannot be written (Is a directory)" in capfd.readouterr().err
    )
    until(lambda: unmirrored.names(tmp_path) == [])
