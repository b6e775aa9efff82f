"""What the tests of the sweep share: small resolved trials, backends whose ranks play, a launcher in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

from launcher.backends.contract import Backend, BackendError, Request
from launcher.backends.local.backend import LocalBackend
from launcher.backends.pool import Backends
from launcher.config import resolve
from launcher.config.schema import ClusterConfig, Config, LocalCluster, SweepConfig
from launcher.sweep.run import Point, run_sweep
from launcher.trials.job import Handle, Job, JobState
from launcher.trials.store import Record, Store
from tests.warm import Process
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.files import read_json, write_json
from trainer.shared.run.schema import DataConfig, LayoutConfig, ModelConfig, RunConfig

PROJECT = Path(__file__).parents[2]
FORK_SERVER = [sys.executable, "-m", "tests.sweep.played"]


def trial(behaviour: str = "ok", *, tensor: int = 1, steps: int = 4, seed: int = 1, cluster: ClusterConfig | None = None) -> Config:
    """A resolved trial of ``tensor`` ranks that behaves as ``played.py`` says."""
    return resolve(
        Config(
            model=ModelConfig(vocab=64),
            layout=LayoutConfig(tensor=tensor, data=1),
            data=DataConfig(kind="synthetic", pattern=behaviour),
            run=RunConfig(steps=steps, seed=seed),
            cluster=cluster or LocalCluster(gpus_per_node=4),
        )
    )


def points(*configs: Config) -> list[Point]:
    return [Point((f"data.pattern={config.data.pattern}", f"run.seed={config.run.seed}"), config) for config in configs]


def local(cluster: ClusterConfig) -> Backend:
    return LocalBackend(cluster, FORK_SERVER)


def sweep(
    runs: Path, *configs: Config, name: str = "demo", backends: Callable[[ClusterConfig], Backend] = local, **settings: Any
) -> list[Record]:
    with Backends(backends) as opened:
        return run_sweep(name, points(*configs), SweepConfig(dir=str(runs), **settings), opened)


def starts(record: Record) -> list[int]:
    """The attempt of each start of rank 0 of a trial, in order."""
    path = record.directory / "starts"
    lines = path.read_text().splitlines() if path.exists() else []
    return [int(attempt) for attempt, rank in map(str.split, lines) if rank == "0"]


def until(condition: Callable[[], Any], seconds: float = 300.0) -> Any:
    """Wait for something that is bound to happen; its value. The limit is far more than it takes on a busy machine."""
    begin = time.monotonic()
    while not (value := condition()):
        assert time.monotonic() < begin + seconds, "it never happened"
        time.sleep(min(0.5, max(0.02, (time.monotonic() - begin) / 20)))  # a look may cost a process
    return value


class PlayedQueue(Backend):
    """A queue whose jobs outlive the launcher: a folder with a file for each job and, once it has one, its state.

    ``play`` runs what is queued, as a cluster would. ``moment`` names a method after or before which the launcher's process is
    killed: ``"before submit"``, ``"after submit"``. While the folder holds a file ``down`` nobody answers; with one named ``full`` jobs
    are refused.
    """

    poll_seconds = 0.02

    def __init__(self, folder: Path, cluster: ClusterConfig | None = None, moment: str = ""):
        super().__init__(cluster or LocalCluster())
        self.folder, self.moment = folder, moment
        self.calls: list[str] = []
        self.spare = 99  # nodes that jobs can do without
        folder.mkdir(parents=True, exist_ok=True)

    def check(self) -> None:
        self.calls.append("check")

    def render(self, job: Job) -> Request:
        return Request(job, f"played {job.name}\n")

    def submit(self, requests: Sequence[Request]) -> list[Handle]:
        self.calls.append(f"submit {len(requests)}")
        if self.moment == "before submit":
            os.kill(os.getpid(), 9)
        for request in requests:
            if (self.folder / "full").exists():
                (self.folder / "refused").touch()
                raise BackendError("the queue takes no more jobs")
            path = self.folder / f"{request.job.name}.job"
            if not path.exists():
                write_json(path, {"directory": str(request.job.directory), "attempt": request.job.attempt, "avoid": request.job.avoid})
        if self.moment == "after submit":
            os.kill(os.getpid(), 9)
        return [{"name": request.job.name} for request in requests]

    def find(self, jobs: Sequence[Job]) -> dict[str, Handle]:
        return {job.name: {"name": job.name} for job in jobs if (self.folder / f"{job.name}.job").exists()}

    def poll(self, handles: Sequence[Handle]) -> list[JobState]:
        self.calls.append(f"poll {len(handles)}")
        self._answer()
        return [self._state(handle["name"]) for handle in handles]

    def can_place(self, job: Job) -> bool:
        return len(job.avoid) <= self.spare

    def readmit(self, job: Job, handle: Handle) -> bool:
        path = self.folder / f"{handle['name']}.job"
        write_json(path, {**(read_json(path) or {}), "avoid": job.avoid})
        return True

    def cancel(self, handles: Sequence[Handle]) -> None:
        self.calls.append(f"cancel {len(handles)}")
        self._answer()
        for handle in handles:
            if not self._state(handle["name"]).status.final:
                self.end(handle["name"], JobState(Status.STOPPED, Reason.CANCELLED))

    def collect(self, job: Job, handle: Handle, remove: bool = True) -> None:
        self._answer()

    def _answer(self) -> None:
        if (self.folder / "down").exists():
            raise BackendError("the queue does not answer")

    def end(self, name: str, state: JobState) -> None:
        write_json(self.folder / f"{name}.state", dataclasses.asdict(state))

    def queued(self) -> dict[str, dict[str, Any]]:
        """Jobs that have no state yet, by name."""
        jobs = {path.stem: read_json(path) or {} for path in sorted(self.folder.glob("*.job"))}
        return {name: job for name, job in jobs.items() if not (self.folder / f"{name}.state").exists()}

    def play(self) -> list[str]:
        """Run what is queued to its end; the names of the jobs."""
        ran = []
        for name, job in self.queued().items():
            finish(Path(job["directory"]), job["attempt"])
            self.end(name, JobState(Status.DONE))
            ran.append(name)
        return ran

    def _state(self, name: str) -> JobState:
        data = read_json(self.folder / f"{name}.state")
        if data is None:
            known = (self.folder / f"{name}.job").exists()
            return JobState(Status.SUBMITTED) if known else JobState(Status.FAILED, Reason.NODE, "nobody knows this job")
        reason = Reason(data["reason"]) if data["reason"] else None
        nodes, bad_nodes = tuple(data["nodes"]), tuple(data["bad_nodes"])
        told = {"attempt": data["attempt"], "bad_nodes": bad_nodes, "clearing_up": data["clearing_up"]}
        return JobState(Status(data["status"]), reason, data["detail"], nodes=nodes, **told)


def finish(directory: Path, attempt: int) -> None:
    """What a trainer leaves behind that ran to its end."""
    with (directory / "starts").open("a") as stream:
        stream.write(f"{attempt} 0\n")
    write_json(directory / "result.json", {"status": "done", "attempt": attempt, "step_time_s": 0.01})


def launcher(script: str, *arguments: object) -> Process:
    """Python code that may use everything in this module, in a process of its own."""
    code = f"import sys\nfrom pathlib import Path\nfrom tests.sweep.support import *\n{script}"
    return Process("-c", code, *arguments, cwd=PROJECT, stdout=PIPE, stderr=STDOUT, text=True)


def trial_json(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "trial.json").read_text()))


class Place:
    """A queue, and a thread that plays the cluster's part until the test ends."""

    def __init__(self, folder: Path):
        self.runs, self.queue = folder / "runs", PlayedQueue(folder / "queue")
        self.store = Store(self.runs)
        self.playing = True

    def backend(self, _cluster: ClusterConfig) -> PlayedQueue:
        return self.queue

    def run(self, *seeds: int, **settings: object) -> list[Record]:
        return sweep(self.runs, *(trial(seed=seed) for seed in seeds), backends=self.backend, **settings)

    def begin(self, *seeds: int, **settings: object) -> tuple[threading.Thread, list[Record]]:
        """``run`` in a thread; the list is filled when it ends."""
        records: list[Record] = []
        thread = threading.Thread(target=lambda: records.extend(self.run(*seeds, **settings)))
        thread.start()
        return thread, records

    def look(self, times: int = 3) -> None:
        """Waits until the loop has polled its queue that many times more."""
        seen = len(self.queue.calls)
        until(lambda: len(self.queue.calls) >= seen + times)

    def end(self, thread: threading.Thread) -> None:
        """Let everything run that waits, until the sweep of ``thread`` has ended."""
        self.queue.play()
        thread.join()

    def serve(self) -> None:
        while self.playing:
            self.queue.play()
            time.sleep(0.01)
