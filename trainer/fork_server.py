"""A process that has imported torch and the trainer once and forks ranks on request: ``python -m trainer.fork_server``.

Importing torch costs a second or more in every rank; a fork costs milliseconds. It does so for the first ranks that need it, which those of
another trainer's command do not. The protocol is one JSON document a
line, requests on standard input and replies on standard output:

    {"start": key, "config": path, "out": dir, "attempt": 0, "ranks": [0, 1], "world_size": 2, "master_port": 29500,
     "env": {}, "log": "dir/rank{rank}.log"}
      -> {"started": key, "pids": {"0": 123, "1": 124}}, then for each rank as it ends {"exited": key, "rank": 0, "code": 0}
    {"kill": key}   SIGTERM to all ranks of that key, SIGKILL after a grace
    end of input    everything is killed and the server ends

A request that cannot be served is answered with {"error": text, "start": key}. When one rank fails, its peers are
killed after a short grace, since they can only wait for it. What the ranks of a key have started (another trainer's command, its
workers) is killed when the last of them has ended; Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import itertools
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.shared.records.trial_files import EXIT_STOPPED

GRACE_S = 3.0  # after a peer's failure, and between SIGTERM and SIGKILL
STOP_GRACE_S = 30.0  # after a request to kill: a running step and a checkpoint may be finished
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


@dataclass
class RunningRanks:
    """The live ranks of one key."""

    key: str
    mark: str  # what the environment of all that these ranks start says
    alive: dict[int, int] = field(default_factory=dict)  # pid -> rank
    kill_at: float | None = None

    def signal(self, number: int) -> None:
        for pid in self.alive:
            os.kill(pid, number)


class ForkServer:
    """Forks ranks, reports their exits, and leaves none behind."""

    def __init__(self, entry: Any, prepare: Callable[[Path], None] = lambda config: None):
        self.entry = entry  # main(argv) -> exit code, run in the forked rank
        self.prepare = prepare  # imports before a fork what the ranks of a configuration need
        self.groups: dict[str, RunningRanks] = {}
        self.buffer = b""
        self.marker = f"TRIREME_RANKS_OF_{os.getpid()}"  # the variable that holds a group's mark
        self.marks = map(str, itertools.count())
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_read, False)
        os.set_blocking(self.wake_write, False)

    def serve(self) -> None:
        """Serve requests until standard input ends."""
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        adopt_orphans()
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(self.wake_read, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select(self._patience())}
                if self.wake_read in ready:
                    os.read(self.wake_read, 4096)
                if 0 in ready and not self._read():
                    break
                if self._reap():
                    self._kill_orphans()
                self._kill_overdue()
        for group in self.groups.values():
            group.signal(signal.SIGKILL)
        while self.groups or self._kill_orphans():
            self._reap(wait=True)

    def _patience(self) -> float | None:
        times = [g.kill_at for g in self.groups.values() if g.kill_at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _read(self) -> bool:
        data = os.read(0, 1 << 16)
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            if line.strip():
                self._answer(line)
        return bool(data)

    def _answer(self, line: bytes) -> None:
        key = None
        try:
            request = json.loads(line)
            key = request.get("start")
            if key is not None:
                self._start(request)
            else:
                self._kill(request["kill"])
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            reply({"error": f"{type(error).__name__}: {error}", "start": key})

    def _start(self, request: dict[str, Any]) -> None:
        key = request["start"]
        if key in self.groups:
            raise ValueError(f"{key} is running already")
        self.prepare(Path(request["config"]))
        for rank in request["ranks"]:
            Path(request["log"].format(rank=rank)).parent.mkdir(parents=True, exist_ok=True)
        group = self.groups.setdefault(key, RunningRanks(key, next(self.marks)))
        pids = {}
        for local, rank in enumerate(request["ranks"]):
            pid = os.fork()
            if pid == 0:
                self._become_rank(request, rank, local, group.mark)
            group.alive[pid] = rank
            pids[str(rank)] = pid
        reply({"started": key, "pids": pids})

    def _kill(self, key: str) -> None:
        group = self.groups.get(key)
        if group is not None:
            group.signal(signal.SIGTERM)
            group.kill_at = time.monotonic() + STOP_GRACE_S

    def _reap(self, wait: bool = False) -> bool:
        """Report the ranks that have ended; whether a child has, rank or orphan. ``wait`` for one that does."""
        any_ended = False
        while (child := ended_child(wait and not any_ended)) is not None:
            any_ended, (pid, status) = True, child
            group = next((g for g in self.groups.values() if pid in g.alive), None)
            if group is None:
                continue  # an orphan
            rank, code = group.alive.pop(pid), os.waitstatus_to_exitcode(status)
            if not group.alive:
                del self.groups[group.key]
            elif code not in (0, EXIT_STOPPED):
                group.kill_at = min(group.kill_at or float("inf"), time.monotonic() + GRACE_S)
            reply({"exited": group.key, "rank": rank, "code": code})
        return any_ended

    def _kill_orphans(self) -> bool:
        """Kill what ranks that are gone have left; whether there was any. Its parents are gone, so it has become this process's child; its
        own children become that when it has ended, which calls for another look. What bears no mark may be of any group, and stays while
        one runs."""
        running = {group.mark for group in self.groups.values()}
        ranks = {pid for group in self.groups.values() for pid in group.alive}
        killed = False
        for pid in children() - ranks:
            mark = variable(pid, self.marker)
            if not running or (mark is not None and mark not in running):
                with contextlib.suppress(PermissionError):
                    os.kill(pid, signal.SIGKILL)
                    killed = True
        return killed

    def _kill_overdue(self) -> None:
        for group in self.groups.values():
            if group.kill_at is not None and time.monotonic() >= group.kill_at:
                group.signal(signal.SIGKILL)
                group.kill_at = None

    def _become_rank(self, request: dict[str, Any], rank: int, local: int, mark: str) -> None:
        """In the forked child: never returns."""
        code = 1
        try:
            die_with_parent()
            redirect(Path(request["log"].format(rank=rank)))
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(self.wake_read)
            os.close(self.wake_write)
            os.environ.update({k: str(v) for k, v in request.get("env", {}).items()} | {self.marker: mark})
            place = {"RANK": rank, "WORLD_SIZE": request["world_size"], "LOCAL_RANK": local, "MASTER_PORT": request["master_port"]}
            os.environ.update({k: str(v) for k, v in place.items()} | {"MASTER_ADDR": request.get("master_addr", "127.0.0.1")})
            code = self.entry([request["config"], "--out", request["out"], "--attempt", str(request.get("attempt", 0))])
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def reply(document: dict[str, Any]) -> None:
    """One line on standard output; if the reader is gone, the closed input ends the fork server."""
    try:
        os.write(1, json.dumps(document).encode() + b"\n")
    except BrokenPipeError:
        return


def redirect(log: Path) -> None:
    """Standard input from nothing, output and errors to ``log``, line by line; a crash (SIGSEGV, SIGABRT) says there where it was."""
    null, file = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((null, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(2)


def die_with_parent() -> None:
    """Linux: a rank whose fork server is killed is killed as well."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def adopt_orphans() -> None:
    """Linux: a process below this one whose parent ends becomes this one's child."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(CHILD_SUBREAPER, 1, 0, 0, 0)


def ended_child(wait: bool) -> tuple[int, int] | None:
    """Process id and status of a child that has ended, which is then forgotten; None if there is none (now)."""
    try:
        pid, status = os.waitpid(-1, 0 if wait else os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def children() -> set[int]:
    """Process ids of this process's children, those that have ended included; none where there is no ``/proc``."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_bytes().rpartition(b")")[2].split()[1]) == os.getpid():
                found.add(int(path.parent.name))
    return found


def variable(pid: int, name: str) -> str | None:
    """A variable of the environment that a process was started with; None if it has none, has ended or is another user's."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((entry.decode().partition("=")[2] for entry in entries if entry.startswith(f"{name}=".encode())), None)


def main() -> int:
    """Serve; with the first ranks that train themselves import everything that they need."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported; forking after a threaded OpenMP region hangs
    from trainer.__main__ import main as entry
    from trainer.__main__ import preload
    from trainer.shared.run.errors import ConfigError
    from trainer.shared.run.read import load

    def prepare(config: Path) -> None:
        with contextlib.suppress(ConfigError, OSError):  # of which the rank speaks
            if "torch" not in sys.modules and load(config).command is None:
                preload()
                gc.freeze()  # a rank's garbage collections do not touch the pages that it shares with the fork server

    gc.freeze()
    reply({"ready": True})
    ForkServer(entry, prepare).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
