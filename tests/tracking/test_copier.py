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

from launcher.cli import status
from launcher.tracking import copier, database, unmirrored
from launcher.tracking import process as tracking
from launcher.tracking.process import MlflowMirror
from launcher.trials.lock import Locks
from tests.farm import free_port
from tests.results.trial_files import SweepOnDisk, demo_sweep, point, tracked_at
from tests.tracking.fixtures import at_work
from tests.tracking.mirrored import children, history, runs
from trainer.shared.records.outcome import Status

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tracking")]
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
    copiers = [copying(tmp_path) for _ in range(2)]
    assert [each.wait(600) for each in copiers] == [0, 0]
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


def test_tables_are_made_without_the_lock_put_in_place_whole_and_kept_for_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept = database.cached_database()
    assert kept is not None and kept.is_relative_to(tmp_path)
    code = f"""
import sys
from pathlib import Path
from launcher.tracking.database import UNUSED, make_database
make_database(Path({str(first)!r}))
assert "mlflow" in sys.modules and not set(UNUSED) & set(sys.modules), "packages that take long, and are not needed"
"""
    with lock_held(first):
        making = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(first)})
        until(kept.exists)
        assert not (first / "mlflow.db").exists()
    assert making.wait(600) == 0
    assert {path.name for path in first.iterdir()} == {"mlflow.db", "mlflow.lock"}
    written = kept.stat().st_mtime_ns
    database.make_database(second)
    whole = kept.read_bytes()
    assert (second / "mlflow.db").read_bytes() == whole and kept.stat().st_mtime_ns == written
    for damaged in (b"", whole[: len(whole) // 2], b"x" * 5000):
        kept.write_bytes(damaged)
        assert not database._has_tables(kept), "it is made again"


@pytest.mark.parametrize(("work", "code"), [("spin_in_idle_time", -signal.SIGKILL), ("rest", 0)])
def test_child_that_stands_back_is_ended_once_it_hardly_gets_a_processor(work: str, code: int) -> None:
    """It can never come forward again as an ordinary user's process, and a busy machine has no idle moment."""
    body = """
import os, sys, time
from launcher.tracking import copier

copier.TURN_S = 0.1
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])


def spin():
    while True:
        pass


def spin_in_idle_time():
    copier.stand_back()
    spin()


def rest():
    time.sleep(10 * copier.TURN_S)
    os._exit(0)


def child(work):
    if pid := os.fork():
        return pid
    work()


other = child(spin)
print(copier.finish_in_child(child(globals()[sys.argv[1]])))
os.kill(other, 9)
"""
    done = subprocess.run([sys.executable, "-c", body, work], stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    assert int(done.stdout) == code


def test_copier_stands_back_while_its_launcher_lives_and_outlives_it(root: Path) -> None:
    sweep = finished_sweep(root)
    code = (
        "import sys; from launcher.tracking.process import MlflowMirror\n"
        f"mirror = MlflowMirror({str(root)!r}, 'planted'); mirror.on_trial(None); print(mirror._process.pid, flush=True); sys.stdin.read()"
    )
    with lock_held(root), subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        copier_id = int(launcher.stdout.readline())
        until(lambda: [os.sched_getscheduler(child.pid) for child in psutil.Process(copier_id).children()] == [os.SCHED_IDLE])
        assert os.sched_getscheduler(copier_id) == os.SCHED_OTHER
        launcher.kill()
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


@pytest.mark.campaign("tracking")
def test_one_copier_copies_the_sweeps_of_all_launchers(root: Path) -> None:
    finished_sweep(root, "first")
    with lock_held(root):
        first = copying(root, subprocess.PIPE)
        locks = Locks(root / "copier.lock")
        until(lambda: locks.held("copier"))
        locks.close()
        finished_sweep(root, "second")
        assert copying(root).wait(600) == 0, "it leaves its sweep to the one that is at work"
        assert unmirrored.names(root) == ["first", "second"]
    first.communicate()
    assert first.returncode == 0 and unmirrored.names(root) == []
    assert {run.data.tags["sweep"] for run in runs(root) if run.data.tags.get("kind") == "sweep"} == {"first", "second"}


def test_copier_without_anything_to_copy_leaves_no_run_and_imports_nothing_for_it(root: Path) -> None:
    """Of a command that was refused, or of a sweep that another copier is at work on."""
    SweepOnDisk(root).add(point(1, 1))
    code = (
        "import sys; from launcher.tracking import copier; code = copier.main(['--dir', sys.argv[1]]); print(code, 'mlflow' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(root)]
    for name in ("planted", "never-written"):
        unmirrored.add(root, name)
    assert subprocess.check_output(command, stdin=subprocess.DEVNULL, text=True).split() == ["0", "False"]
    assert unmirrored.names(root) == [] and not (root / "mlartifacts").exists()
    finished_sweep(root)
    with at_work(root):
        assert subprocess.check_output(command, stdin=subprocess.DEVNULL, text=True).split() == ["0", "False"]
    assert unmirrored.names(root) == ["planted"]


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
copier.LOOK_S, copier.GIVE_UP_S = 0.05, 0.2
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
    assert copier.Copier(folder).finish()
    assert len(children(folder)) == 1 and list(folder.glob("mlartifacts/*/artifacts/*"))
    assert {path.name for path in root.iterdir()} == {"mlflow.db", name}


def test_launcher_waits_no_longer_than_it_was_told_nor_after_ctrl_c_but_until_all_is_copied(
    root: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = finished_sweep(root)
    observer = MlflowMirror(root, "planted")

    def said(text: str) -> None:
        print(text, file=sys.stderr)
        if "Ctrl-C" in text:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(tracking, "say", said)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with lock_held(root):
            for _ in range(1000):
                observer.on_trial(sweep.records[0])
                observer.on_poll([sweep.records[0]])
            observer.close()
            observer.finish(0.1)
            observer.finish(600.0)
            assert observer._process is not None and observer._process.poll() is None, "it is left to finish"
    finally:
        signal.signal(signal.SIGINT, before)
    words = capfd.readouterr().err
    assert words.count("is being copied to MLflow in the background") == 2
    assert words.count("copying to MLflow; Ctrl-C leaves it to the background") == 1
    monkeypatch.setattr(tracking, "say", print)
    observer.finish(600.0)
    assert "MLflow does not have" not in capfd.readouterr().out
    assert observer._process.wait(600) == 0
    assert [run.info.status for run in children(root).values()] == ["FINISHED"] * 4


def test_a_command_that_its_copier_would_end_with_waits_until_all_is_copied_unless_a_key_says_otherwise(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "PATIENCE_S", 0.1)

    def slow(*_: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sh", "-c", f"sleep 0.5; rm {tmp_path}/unmirrored/planted; cat"], stdin=subprocess.PIPE)

    monkeypatch.setattr(tracking, "start_copier", slow)
    for contained, wait_s, copied in ((False, None, False), (True, 0.1, False), (True, None, True), (False, 600.0, True)):
        monkeypatch.setattr(tracking, "nothing_outlives_us", lambda contained=contained: contained)
        observer = MlflowMirror(tmp_path, "planted", wait_s)
        observer.begin()
        observer.finish()
        assert (unmirrored.names(tmp_path) == []) == copied, (contained, wait_s)
        words = capfd.readouterr().err
        assert ("background" in words, "any later command copies the rest" in words) == (
            not contained and not copied,
            contained and not copied,
        )
        assert observer._process is not None and observer._process.wait(600) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes PID namespaces")
@pytest.mark.parametrize(
    ("command", "alone"), [("exec {}", True), ("{}; true", True), ("sh -c '{}; true'; true", False)], ids=["first", "child", "deeper"]
)
def test_a_command_knows_whether_it_is_what_a_container_was_started_for(command: str, alone: bool) -> None:
    asks = f'{sys.executable} -c "from launcher.tracking.process import nothing_outlives_us as asked; print(asked())"'
    here = ["unshare", "--pid", "--fork", "sh", "-c", command.format(asks)]
    assert subprocess.run(here, capture_output=True, text=True, check=True).stdout == f"{alone}\n"
    assert not tracking.nothing_outlives_us()


def test_trials_that_end_in_a_queue_reach_mlflow_by_whoever_looks(root: Path) -> None:
    """With sweep.follow=false nobody is there when a trial ends: the command that notices has it copied."""
    sweep = SweepOnDisk(root)
    record = sweep.add(point(1, 1), Status.SUBMITTED)
    record.handle = {"job": "lost", "pids": [], "host": "nowhere"}
    sweep.store.save(record)
    assert unmirrored.names(root) == []
    with at_work(root):  # one that is at work already copies it
        assert status.main(["--dir", str(root)]) == 0
    assert sweep.store.load(record.id).status is not Status.SUBMITTED
    assert unmirrored.names(root) == ["planted"]


def test_a_folder_in_place_of_the_copiers_log_is_said_and_ends_nothing(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (root / "mlflow.log").mkdir()
    observer = MlflowMirror(root, finished_sweep(root).name)
    with at_work(root):
        observer.finish(0)
        assert observer._process is not None and observer._process.wait(600) == 0
    words = f"what copying to MLflow has to say is lost: {root / 'mlflow.log'} cannot be written (Is a directory)"
    assert words in capfd.readouterr().err
