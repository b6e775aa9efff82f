"""Trials as processes of this machine. The embedded default: needs no service and nothing installed.

Ranks are forked from a process that has imported torch and the trainer already (``fork_server.py``), so that start-up is paid once
per launcher and not once per rank and trial. Measured on two busy cores with 8 ranks: 1.7 to 2.7 s until the first trial's ranks
run, 0.2 to 0.6 s for each further trial; the same ranks started as processes of their own took 29 to 45 s to the end of 2 steps,
which take 1.5 s.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from launcher.backends.contract import Backend, Request
from launcher.backends.local.fork_server import COMMAND, ForkServerClient, ForkServerError, RankGroup
from launcher.backends.variables import RANKS, check_names
from launcher.config.schema import ClusterConfig, LocalCluster
from launcher.own_python import finding_ours, module
from launcher.ports import PORTS, free_port
from launcher.trials.job import Handle, Job, JobState
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.records.trial_files import EXIT_STOPPED
from trainer.shared.run import steady
from trainer.shared.run.errors import ConfigError

_CLOCK_SECONDS = 0.1  # the kernel counts in hundredths when a process began
_RANKS_PER_CORE = 32
_OWN = {*RANKS, "OMP_NUM_THREADS"}  # variables that ranks get whatever cluster.env says; forking needs a single thread
_EXPLAINED = (1, 2)  # exit codes of ranks that wrote down why


@dataclass
class _Running:
    """A job that this launcher started."""

    job: Job
    group: RankGroup
    port: int
    slots: list[int]  # a number for each rank that no other rank alive has: its GPU, where there are some
    started: float  # unix seconds
    clock: str  # likewise, as ``steady`` marks it; all ranks existed by then
    oom_kills: int  # the kernel's counter when the job began
    lost: str = ""  # how the worker process was lost, if it was

    @property
    def ended(self) -> bool:
        return bool(self.lost) or len(self.group.codes) == len(self.group.pids)


class LocalBackend(Backend):
    """Runs processes of this machine, which end with the launcher. Handles hold their ids and start times, so that others can find them."""

    poll_seconds = 0.1
    outlives_launcher = False

    def __init__(self, cluster: ClusterConfig, command: Sequence[str] = COMMAND):
        super().__init__(cluster)
        self._command = command
        self._fork_server = ForkServerClient(command)
        self._running: dict[str, _Running] = {}

    def check(self) -> None:
        if self.cluster.container.image is not None:
            raise ConfigError(
                f"cluster.container.image={self.cluster.container.image!r} cannot be used with cluster.backend=local, whose ranks are "
                "plain processes; set cluster.container.image=null, or choose cluster=slurm or cluster=kubernetes"
            )
        if self.cluster.nodes > 1:
            raise ConfigError(
                f"cluster.nodes={self.cluster.nodes} with cluster.backend=local, which is this one machine; use cluster.nodes=1, or choose "
                "cluster=slurm or cluster=kubernetes"
            )
        _environment(self.cluster)
        most = _RANKS_PER_CORE * (os.cpu_count() or 1)
        if self.cluster.world_size > most:
            raise ConfigError(
                f"cluster.gpus_per_node={self.cluster.gpus_per_node} ranks on this machine's {os.cpu_count()} cores would only "
                f"wait for each other; "
                f"use {most} or fewer"
            )

    def capacity(self) -> int:
        limit = self.cluster.max_processes if isinstance(self.cluster, LocalCluster) else None
        return limit or self.cluster.world_size

    def render(self, job: Job) -> Request:
        """The commands that run the same ranks by hand, without the worker process. ``submit`` takes another port if this one is in use."""
        command = shlex.join(module("trainer", str(job.config_path), "--out", str(job.directory), "--attempt", str(job.attempt)))
        environment = finding_ours() | _environment(job.cluster) | {"MASTER_PORT": str(_first_port(job)), "WORLD_SIZE": str(job.world_size)}
        lines = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
        for rank in range(job.world_size):
            lines.append(f"RANK={rank} LOCAL_RANK={rank} {command} >> {shlex.quote(str(job.log_path(rank)))} 2>&1 &")
        return Request(job, "\n".join([f"mkdir -p {shlex.quote(str(job.directory / 'logs'))}", *lines, "wait"]) + "\n")

    def submit(self, requests: Sequence[Request]) -> list[Handle]:
        return [self._start(request.job) for request in requests]

    def find(self, jobs: Sequence[Job]) -> dict[str, Handle]:
        """Finds only ranks of this launcher; those of another end with it."""
        return {job.name: _handle(self._running[job.name]) for job in jobs if job.name in self._running}

    def poll(self, handles: Sequence[Handle]) -> list[JobState]:
        self._listen()
        return [self._state(handle) for handle in handles]

    def cancel(self, handles: Sequence[Handle]) -> None:
        for handle in handles:
            running = self._running.get(handle["job"])
            if running is None:
                _terminate(handle)
            elif not running.ended:
                try:
                    self._fork_server.kill(handle["job"])
                except ForkServerError as error:
                    self._replace(error)

    def close(self) -> None:
        self._fork_server.close()

    def _start(self, job: Job) -> Handle:
        if job.name in self._running:
            return _handle(self._running[job.name])
        self._listen()
        job.log_path(0).parent.mkdir(parents=True, exist_ok=True)
        beside = [running for running in self._running.values() if not running.ended]
        port = _free_port(job, {running.port for running in beside})
        taken = {slot for running in beside for slot in running.slots}
        slots = [slot for slot in range(job.world_size + len(taken)) if slot not in taken][: job.world_size]
        kills = oom_kills()
        request = {
            "config": str(job.config_path),
            "out": str(job.directory),
            "attempt": job.attempt,
            "ranks": list(range(job.world_size)),
            "world_size": job.world_size,
            "master_port": port,
            "env": {
                "PYTHONPATH": os.environ.get("PYTHONPATH", ""),  # what another trainer's command gets
                **_environment(job.cluster),
                **(_devices(slots, job.cluster.env) if job.max_parallel != 1 else {}),
            },
            "log": _log_pattern(job),
        }
        group = self._fork_server.start(job.name, request)
        self._running[job.name] = _Running(job, group, port, slots, time.time(), steady.mark(), kills)
        return _handle(self._running[job.name])

    def _listen(self) -> None:
        """Hear of ranks that ended, or that the fork server did."""
        try:
            self._fork_server.listen()
        except ForkServerError as error:
            self._replace(error)

    def _replace(self, error: ForkServerError) -> None:
        """A new fork server for one that is lost, which takes its trials with it."""
        for running in self._running.values():
            if not running.ended:
                _terminate(_handle(running))
                running.lost = str(error)
        self._fork_server.close()
        self._fork_server = ForkServerClient(self._command)

    def _state(self, handle: Handle) -> JobState:
        running = self._running.get(handle["job"])
        nodes = (str(handle.get("host", "")),)
        if running is None:
            if _ranks(handle):
                return JobState(Status.RUNNING, started=handle.get("since"), nodes=nodes)
            return JobState(Status.FAILED, Reason.NODE, "its launcher ended, and its ranks with it", nodes=nodes)
        if running.lost:
            return JobState(Status.FAILED, Reason.NODE, running.lost, running.started, nodes)
        if not running.ended:
            return JobState(Status.RUNNING, started=running.started, nodes=nodes)
        status, reason, detail = _judge(running)
        return JobState(status, reason, detail, running.started, nodes)


def _judge(running: _Running) -> tuple[Status, Reason | None, str]:
    """Status, reason and plain words for exit codes. The first rank that failed explains the others: the fork server ends its peers."""
    failed = [(rank, code) for rank, code in running.group.codes.items() if code != 0]  # in the order in which they ended
    if not failed:
        return Status.DONE, None, ""
    rank, code = failed[0]
    if code == EXIT_STOPPED:
        return Status.STOPPED, None, "stopped on request, after a checkpoint"
    if code >= 0:
        return Status.FAILED, None if code in _EXPLAINED else Reason.ERROR, f"rank {rank} exited with code {code}"
    name = signal.Signals(-code).name
    if code == -signal.SIGKILL and oom_kills() > running.oom_kills:
        return Status.FAILED, Reason.HOST_MEMORY, f"rank {rank} was killed by the kernel, which was out of memory"
    if code in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP):
        return Status.FAILED, Reason.NODE, f"rank {rank} was killed from outside ({name})"
    return Status.FAILED, Reason.ERROR, f"rank {rank} crashed ({name})"


def oom_kills() -> int:
    """Counts processes that the kernel has killed for lack of memory, control groups included; only differences are meaningful."""
    with suppress(OSError):
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def _environment(cluster: ClusterConfig) -> dict[str, str]:
    check_names("cluster.env", cluster.env, _OWN)
    return cluster.env | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}


def _devices(slots: list[int], given: Mapping[str, str]) -> dict[str, str]:
    """Gives concurrent trials different GPUs, among those that ``cluster.env`` has ``given``, else the launcher's."""
    visible = given.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    names = [name for name in visible.split(",") if name] or [str(slot) for slot in range(max(slots) + 1)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[slot] for slot in slots if slot < len(names))}


def _log_pattern(job: Job) -> str:
    """``log_path`` with ``{rank}`` in place of the rank; braces in the folder's name are doubled, as for ``str.format``."""
    path = job.log_path(0)
    return str(path.parent).replace("{", "{{").replace("}", "}}") + "/" + path.name.replace("rank0", "rank{rank}")


def _handle(running: _Running) -> Handle:
    return {
        "job": running.job.name,
        "host": socket.gethostname(),
        "pids": list(running.group.pids.values()),
        "since": running.started,
        "clock": running.clock,
    }


def _ranks(handle: Handle) -> list[psutil.Process]:
    """The processes of a handle that are alive on this machine; a process id that was given to another process since is not one."""
    age, found = steady.age(handle.get("clock")), list[psutil.Process]()
    if handle.get("host") != socket.gethostname() or age is None:
        return found
    for pid in handle.get("pids", []):
        try:
            process = psutil.Process(pid)
            if _age(pid) > age - _CLOCK_SECONDS and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, OSError):
            continue
    return found


def _age(pid: int) -> float:
    """Seconds since a process began, by the steady clock, of which the kernel notes the ticks (proc_pid_stat(5), field 22)."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return steady.seconds() - int(ticks) / os.sysconf("SC_CLK_TCK")


def _terminate(handle: Handle) -> None:
    for process in _ranks(handle):
        process.terminate()


def _first_port(job: Job) -> int:
    return PORTS[zlib.crc32(job.name.encode()) % len(PORTS)]


def _free_port(job: Job, taken: set[int]) -> int:
    start = PORTS.index(_first_port(job))
    port = free_port(port for port in (*PORTS[start:], *PORTS[:start]) if port not in taken)
    if port is None:
        raise ForkServerError(f"no free port from {PORTS.start} to {PORTS.stop - 1}")
    return port
