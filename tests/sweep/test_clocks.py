"""Clocks are set back and forward while a sweep runs: they date what is written down, and decide nothing."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from email.utils import formatdate
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.backends.contract import Request
from launcher.backends.kubernetes import client
from launcher.backends.kubernetes.cluster import KubernetesCluster
from launcher.backends.local.backend import LocalBackend
from launcher.backends.pool import Backends
from launcher.config.schema import LocalCluster, SweepConfig
from launcher.sweep.active_trial import ActiveTrial
from launcher.sweep.reconcile import catch_up
from launcher.sweep.run import run_sweep
from launcher.sweep.search import measurement
from launcher.trials.job import Handle, JobState
from launcher.trials.store import Record, Store
from tests.sweep.support import FORK_SERVER, Place, PlayedQueue, points, starts, trial, until
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run import steady

pytestmark = pytest.mark.slow
HOUR = 3600.0


class Clock:
    """What ``time.time`` says, here and in every thread."""

    def __init__(self) -> None:
        self.ahead, self._real = 0.0, time.time

    def __call__(self) -> float:
        return self._real() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "time", found)
    return found


class Late(PlayedQueue):
    """A queue on a file system that shows files late."""

    visibility_s = 60.0


def ago(seconds: float) -> str:
    boot, _, now = steady.mark().partition(" ")
    return f"{boot} {float(now) - seconds:.3f}"


@pytest.mark.parametrize("chains", [False, True])
def test_what_ended_after_the_clock_was_set_back_has_ended(place: Place, clock: Clock, chains: bool) -> None:
    class Back(PlayedQueue):
        def submit(self, requests: Sequence[Request]) -> list[Handle]:
            clock.ahead -= HOUR
            return super().submit(requests)

    place.queue = Back(place.queue.folder)
    place.queue.chains = chains
    first, second = points(trial(seed=1), trial(seed=2))
    line = [first, dataclasses.replace(second, needs=(first.trial,))]
    config = SweepConfig(dir=str(place.runs), rerun=True)
    with Backends(place.backend) as backends:
        threading.Thread(target=place.serve, daemon=True).start()
        records = run_sweep("demo", line, config, backends)
    assert [(record.status, starts(record)) for record in records] == [(Status.DONE, [0])] * 2


def test_a_clock_set_forward_ends_no_patience(place: Place, clock: Clock) -> None:
    place.queue = Late(place.queue.folder)
    config = dataclasses.replace(trial(), cluster=LocalCluster(gpus_per_node=4, start_timeout=60.0))
    records: list[Record] = []

    def launcher() -> None:
        with Backends(place.backend) as backends:
            records.extend(run_sweep("demo", points(config), SweepConfig(dir=str(place.runs)), backends))

    thread = threading.Thread(target=launcher)
    thread.start()
    (name,) = until(place.queue.queued)
    clock.ahead += HOUR
    place.look()
    assert list(place.queue.queued()) == [name], "start_timeout has not passed"
    directory = Path(place.queue.queued()[name]["directory"])
    place.queue.end(name, JobState(Status.FAILED, Reason.NODE, "played", nodes=("n1",)))
    until(lambda: place.store.load(directory.name).end_clock)
    clock.ahead += HOUR
    place.look()
    assert not place.store.load(directory.name).status.final, "nor visibility_s"
    (directory / "metrics.jsonl").write_text('{"step": 9, "attempt": 0}\n')
    (directory / "result.json").write_text('{"status": "done", "attempt": 0, "step_time_s": 0.01}')
    thread.join()
    assert records[0].status is Status.DONE


def test_commands_that_only_look_share_one_patience_and_that_of_another_machine_counts_anew(place: Place) -> None:
    place.queue = Late(place.queue.folder)
    (record,) = place.run(1, follow=False)
    place.queue.end(f"trireme-{record.id}-0", JobState(Status.FAILED, Reason.ERROR, "played", nodes=("n1",)))

    def look(end_clock: str | None) -> Status:
        found = place.store.load(record.id)
        found.end_clock = end_clock
        place.store.save(found)
        catch_up(place.store, [found], Backends(place.backend))
        return place.store.load(record.id).status

    assert look(None) is Status.SUBMITTED and look("another-machine 12.0") is Status.SUBMITTED and look("damaged") is Status.SUBMITTED
    assert steady.age(place.store.load(record.id).end_clock) is not None
    assert look(ago(61.0)) is Status.FAILED


def test_a_bad_node_is_left_out_as_long_as_was_asked_for(clock: Clock, tmp_path: Path) -> None:
    record = Record("0" * 12, tmp_path)
    cluster = LocalCluster(avoid_s=100.0)
    entry = {"attempt": 0, "ended": time.time(), "bad_nodes": ["n1"]}

    def left_out(**more: object) -> list[str]:
        record.history = [entry | more]
        return [each.node for each in ActiveTrial(record, cluster, PlayedQueue(tmp_path)).exclusions()]

    clock.ahead = HOUR
    assert left_out(clock=steady.mark()) == ["n1"]
    clock.ahead = -HOUR
    assert left_out(clock=ago(101.0)) == []


def test_ranks_are_known_by_when_the_kernel_began_them_whatever_the_clock_says(clock: Clock) -> None:
    backend = LocalBackend(LocalCluster(), FORK_SERVER)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rank:
        handle = {"job": "x", "host": socket.gethostname(), "pids": [rank.pid], "since": time.time() - 9 * HOUR, "clock": steady.mark()}
        assert backend.poll([handle])[0].status is Status.RUNNING
        assert backend.poll([handle | {"clock": ago(HOUR)}])[0].status is Status.FAILED, "it has begun since"
        rank.communicate()


def test_the_sweep_touched_last_is_the_newest_also_after_the_clock_was_set_back(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name in ("old", "older"):
        store.write_sweep(name, [], "")
    os.utime(tmp_path / "sweeps" / "old.json", (time.time() + HOUR,) * 2)
    store.write_sweep("new", [], "")
    assert store.names() == ["new", "old", "older"]


def test_what_a_trial_cost_is_what_passed_whatever_the_dates_say(tmp_path: Path) -> None:
    record = Record("0" * 12, tmp_path, Status.DONE, started=1000.0, ended=1000.0 + HOUR, queue_clock=ago(50.0))
    record.config = {"run": {"steps": 4, "warmup_steps": 1}}
    record.history = [{"attempt": 0, "ended": record.ended, "clock": ago(10.0)}]
    assert measurement(record, 0.0).gpu_hours == pytest.approx(40 / 3600, rel=1e-3), "set forward meanwhile"
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "attempt": 0, "step_time_s": 5.0}}\n' for step in range(1, 5)))
    record.ended = 1000.0 - HOUR
    assert measurement(record, 0.0).gpu_hours == pytest.approx(20 / 3600), "set back"


def test_the_time_of_an_api_server_is_kept_between_its_answers(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_connect", lambda cluster: SimpleNamespace(configuration=SimpleNamespace(host="there")))
    asked, real = client.Client(KubernetesCluster()), time.time()
    asked._note_time(formatdate(real + HOUR))
    for clock.ahead in (HOUR, -HOUR):
        assert asked.now() == pytest.approx(real + HOUR, abs=60.0)
