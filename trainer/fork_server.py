"""A process that has imported torch and the trainer once and forks ranks on request: ``python -m trainer.fork_server``.

Importing torch costs a second or more in every rank; a fork costs milliseconds. The protocol is one JSON document a
line, requests on standard input and replies on standard output:

    {"start": key, "config": path, "out": dir, "attempt": 0, "ranks": [0, 1], "world_size": 2, "master_port": 29500,
     "env": {}, "log": "dir/rank{rank}.log"}
      -> {"started": key, "pids": {"0": 123, "1": 124}}, then for each rank as it ends {"exited": key, "rank": 0, "code": 0}
    {"kill": key}   SIGTERM to all ranks of that key, SIGKILL after a grace
    end of input    everything is killed and the server ends

A request that cannot be served is answered with {"error": text, "start": key}. When one rank fails, its peers are
killed after a short grace, since they can only wait for it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import selectors
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.spec.records import EXIT_STOPPED

GRACE_S = 3.0  # after a peer's failure, and between SIGTERM and SIGKILL
STOP_GRACE_S = 30.0  # after a request to kill: a running step and a checkpoint may be finished
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


@dataclass
class RunningRanks:
    """The live ranks of one key."""

    key: str
    alive: dict[int, int] = field(default_factory=dict)  # pid -> rank
    kill_at: float | None = None

    def signal(self, number: int) -> None:
        for pid in self.alive:
            os.kill(pid, number)


class ForkServer:
    """Forks ranks, reports their exits, and leaves none behind."""

    def __init__(self, entry: Any):
        self.entry = entry  # main(argv) -> exit code, run in the forked rank
        self.groups: dict[str, RunningRanks] = {}
        self.buffer = b""
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_read, False)
        os.set_blocking(self.wake_write, False)

    def serve(self) -> None:
        """Serve requests until standard input ends."""
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(self.wake_read, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select(self._patience())}
                if self.wake_read in ready:
                    os.read(self.wake_read, 4096)
                if 0 in ready and not self._read():
                    break
                self._reap()
                self._kill_overdue()
        for group in self.groups.values():
            group.signal(signal.SIGKILL)
        while self.groups:
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
        for rank in request["ranks"]:
            Path(request["log"].format(rank=rank)).parent.mkdir(parents=True, exist_ok=True)
        group = self.groups.setdefault(key, RunningRanks(key))
        pids = {}
        for local, rank in enumerate(request["ranks"]):
            pid = os.fork()
            if pid == 0:
                self._become_rank(request, rank, local)
            group.alive[pid] = rank
            pids[str(rank)] = pid
        reply({"started": key, "pids": pids})

    def _kill(self, key: str) -> None:
        group = self.groups.get(key)
        if group is not None:
            group.signal(signal.SIGTERM)
            group.kill_at = time.monotonic() + STOP_GRACE_S

    def _reap(self, wait: bool = False) -> None:
        while self.groups:
            pid, status = os.waitpid(-1, 0 if wait else os.WNOHANG)
            if pid == 0:
                return
            group = next(g for g in self.groups.values() if pid in g.alive)
            rank, code = group.alive.pop(pid), os.waitstatus_to_exitcode(status)
            if not group.alive:
                del self.groups[group.key]
            elif code not in (0, EXIT_STOPPED):
                group.kill_at = min(group.kill_at or float("inf"), time.monotonic() + GRACE_S)
            reply({"exited": group.key, "rank": rank, "code": code})

    def _kill_overdue(self) -> None:
        for group in self.groups.values():
            if group.kill_at is not None and time.monotonic() >= group.kill_at:
                group.signal(signal.SIGKILL)
                group.kill_at = None

    def _become_rank(self, request: dict[str, Any], rank: int, local: int) -> None:
        """In the forked child: never returns."""
        code = 1
        try:
            die_with_parent()
            redirect(Path(request["log"].format(rank=rank)))
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(self.wake_read)
            os.close(self.wake_write)
            os.environ.update({k: str(v) for k, v in request.get("env", {}).items()})
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


def main() -> int:
    """Import everything a rank needs, then serve."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported; forking after a threaded OpenMP region hangs
    from trainer.__main__ import main as entry
    from trainer.__main__ import preload

    preload()
    gc.freeze()  # a rank's garbage collections do not touch the pages that it shares with the fork server
    reply({"ready": True})
    ForkServer(entry).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
