"""A launcher may be killed at any moment: the same command continues from the files and the queue, and trains nothing twice."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from launcher.trials.store import Store
from tests.sweep.support import PlayedQueue, launcher, starts, sweep, trial, trial_json, until
from tests.warm import Process
from trainer.shared.records.outcome import Reason, Status

pytestmark = pytest.mark.slow

QUEUED = """
moment, runs, queue = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
sweep(runs, trial(seed=1), trial(seed=2), backends=lambda cluster: PlayedQueue(queue, cluster, moment), max_parallel=0)
"""
LOCAL = """
runs, *behaviours = sys.argv[1:]
records = sweep(Path(runs), *(trial(behaviour, tensor=2, seed=seed) for seed, behaviour in enumerate(behaviours)), name="demo")
print(*(record.status.value for record in records))
"""


def queue_of(tmp_path: Path) -> PlayedQueue:
    return PlayedQueue(tmp_path / "queue")


def repeat(tmp_path: Path, queue: PlayedQueue) -> None:
    """The same command again, on a cluster that runs what is queued."""
    process = launcher(QUEUED, "", tmp_path / "runs", queue.folder)
    while process.poll() is None:
        queue.play()
        time.sleep(0.01)
    assert process.returncode == 0, process.communicate()[0]


@pytest.mark.parametrize("moment", ["before submit", "after submit"])
def test_killed_between_intent_and_record_every_trial_is_trained_once(tmp_path: Path, moment: str) -> None:
    queue = queue_of(tmp_path)
    assert launcher(QUEUED, moment, tmp_path / "runs", queue.folder).wait() == -signal.SIGKILL
    killed = Store(tmp_path / "runs").sweep("demo").records
    assert [(r.status, r.handle) for r in killed] == [(Status.SUBMITTED, None)] * 2, "the intent is on disk, the handle is not"
    assert len(queue.queued()) == (0 if moment == "before submit" else 2)
    if moment == "after submit":
        (queue.folder / "full").touch()  # what exists is adopted: nothing is submitted again
    repeat(tmp_path, queue)
    assert not (queue.folder / "refused").exists()
    records = Store(tmp_path / "runs").sweep("demo").records
    assert [(r.status, r.attempt, starts(r)) for r in records] == [(Status.DONE, 0, [0])] * 2


def test_killed_while_following_the_jobs_go_on_and_are_found_again(tmp_path: Path) -> None:
    queue = queue_of(tmp_path)
    process = launcher(QUEUED, "", tmp_path / "runs", queue.folder)
    until(lambda: all(r.handle for r in Store(tmp_path / "runs").sweep("demo").records) if len(queue.queued()) == 2 else False)
    process.kill()
    process.wait()
    queue.play()
    repeat(tmp_path, queue)
    assert [starts(r) for r in Store(tmp_path / "runs").sweep("demo").records] == [[0], [0]]


@pytest.mark.campaign("launchers")
def test_killed_again_and_again_at_any_moment_every_trial_is_trained_once(tmp_path: Path) -> None:
    queue, chance = queue_of(tmp_path), random.Random(7)
    for _ in range(6):
        process = launcher(QUEUED, "", tmp_path / "runs", queue.folder)
        end = time.monotonic() + chance.uniform(0.2, 0.8)
        while process.poll() is None and time.monotonic() < end:
            if chance.random() < 0.02:
                queue.play()
            time.sleep(0.01)
        process.kill()
        process.wait()
    repeat(tmp_path, queue)
    records = Store(tmp_path / "runs").sweep("demo").records
    assert [(r.status, starts(r)) for r in records] == [(Status.DONE, [0])] * 2


def ranks_of(directory: Path) -> list[int]:
    """Process ids that the record holds, once it holds them."""
    return until(lambda: (trial_json(directory).get("handle") or {}).get("pids") if (directory / "metrics.jsonl").exists() else None)


def second_trial(runs: Path) -> Path:
    records = until(lambda: Store(runs).sweep("demo").records if (runs / "sweeps" / "demo.json").exists() else None)
    return records[1].directory


def test_local_ranks_die_with_their_launcher_and_only_the_unfinished_trial_runs_again(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    process = launcher(LOCAL, runs, "ok", "gate")
    pids = ranks_of(second_trial(runs))
    process.kill()
    process.wait()
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    records = sweep(runs, trial("ok", tensor=2, seed=0), trial("gate", tensor=2, seed=1), retries=0)  # a dead launcher uses up no try
    assert [(r.status, starts(r)) for r in records] == [(Status.DONE, [0]), (Status.DONE, [0, 1])]
    assert records[1].history[0]["reason"] == Reason.NODE.value


def test_a_trial_that_finished_unseen_is_not_trained_again(tmp_path: Path) -> None:
    """The launcher was killed after the trainer had written its result and before it had looked."""
    runs = tmp_path / "runs"
    (record,) = sweep(runs, trial())
    record.status, record.ended, record.history = Status.RUNNING, None, []
    Store(runs).save(record)
    (again,) = sweep(runs, trial())
    assert (again.status, again.attempt, starts(again)) == (Status.DONE, 0, [0])


def test_an_interrupt_ends_running_ranks_submits_no_more_and_says_how_to_go_on(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    process = launcher(LOCAL, runs, "ok", "gate", "ok")
    pids = ranks_of(second_trial(runs))
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=600)[0]
    assert "the same command continues where sweep demo stopped" in output
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))  # an orphan is collected a moment after its end
    records = Store(runs).sweep("demo").records
    assert [record.status.value for record in records] == ["done", "stopped", "planned"]
    assert (records[1].reason, records[1].detail) == (Reason.CANCELLED, "interrupted")
    again = sweep(runs, trial("ok", tensor=2, seed=0), trial("gate", tensor=2, seed=1), trial("ok", tensor=2, seed=2))
    assert [(r.status, len(starts(r))) for r in again] == [(Status.DONE, 1), (Status.DONE, 2), (Status.DONE, 1)]


def open_gate(runs: Path) -> None:
    """Let trials that wait at their gates go on to their ends."""
    for directory in runs.glob("trials/*"):
        (directory / "go").touch()


def finished(process: Process) -> str:
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    return output


def test_a_second_launcher_of_the_same_sweep_waits_says_for_whom_and_trains_nothing_twice(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    first = launcher(LOCAL, runs, "gate", "ok")
    until(lambda: (runs / "sweeps" / "demo.json").exists())
    second = launcher(LOCAL, runs, "gate", "ok")
    assert f"sweep demo is being run by process {first.pid} on " in second.stdout.readline()
    open_gate(runs)
    assert "done done" in finished(first)
    assert "2 trials, 2 already done" in finished(second)
    assert [starts(r) for r in Store(runs).sweep("demo").records] == [[0], [0]]


def test_two_sweeps_that_share_a_trial_train_it_once(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    first = launcher(LOCAL.replace("demo", "one"), runs, "gate")
    until(lambda: list(runs.glob("trials/*/metrics.jsonl")))
    second = launcher(LOCAL.replace("demo", "two"), runs, "gate", "ok")
    until(lambda: (runs / "sweeps" / "two.json").exists() and "done" in {r.status.value for r in Store(runs).sweep("two").records})
    open_gate(runs)
    assert "done" in finished(first)
    output = finished(second)
    assert "done done" in output and f"is being run by process {first.pid} on " in output and "for sweep one; waiting for it" in output
    assert [starts(r) for r in Store(runs).sweep("two").records] == [[0], [0]]


def test_planning_never_writes_the_record_of_a_trial_that_another_launcher_holds(tmp_path: Path) -> None:
    first = launcher(LOCAL.replace("demo", "one"), tmp_path, "gate")
    directory = until(lambda: list(tmp_path.glob("trials/*/metrics.jsonl")))[0].parent
    until(lambda: trial_json(directory).get("status") == "running")
    before = (directory / "trial.json").stat().st_ino  # every write makes a new file
    second = launcher(LOCAL.replace("demo", "two"), tmp_path, "gate")
    until((tmp_path / "sweeps" / "two.json").exists)
    assert (directory / "trial.json").stat().st_ino == before
    open_gate(tmp_path)
    finished(first)
    finished(second)


def test_a_lock_is_free_when_its_holder_is_killed(tmp_path: Path) -> None:
    script = """
from launcher.trials.lock import Locks
import time
locks = Locks(Path(sys.argv[1]))
print(locks.take("a"), flush=True)
time.sleep(1000)
"""
    from launcher.trials.lock import Locks

    holder = launcher(script, tmp_path / "locks")
    assert holder.stdout.readline() == "True\n"
    locks = Locks(tmp_path / "locks")
    assert (locks.take("a"), locks.held("a"), locks.take("b"), locks.held("c")) == (False, True, True, False)
    holder.kill()
    holder.wait()
    assert locks.take("a")
    locks.close()


def test_a_record_is_never_half_written_for_a_reader(tmp_path: Path) -> None:
    """Read a record as fast as possible while another thread writes it."""
    store = Store(tmp_path)
    record = store.load("0" * 12)
    record.detail = "x" * 100_000
    store.save(record)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            store.save(record, durable=False)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            assert json.loads((record.directory / "trial.json").read_text())["detail"] == record.detail
    finally:
        stop.set()
        writer.join()
