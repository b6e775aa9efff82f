"""Detached processes that are recognised for certain and ended for certain, by any later process that knows their directory."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

MARK = "TRIREME_TEST_CLUSTER"


def wait_for(condition: Callable[[], object], what: str, seconds: float = 300.0) -> None:
    """Until ``condition`` holds; ``TimeoutError`` that names ``what`` after ``seconds``, far more than it takes on a busy machine."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() > begin + seconds:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        rest(begin)


def rest(begin: float) -> None:
    """Between two looks at what has been waited for since ``begin``: a look may cost a process or a handshake, so they become rarer."""
    time.sleep(min(0.5, max(0.05, (time.monotonic() - begin) / 20)))


def free_number(pattern: str, count: int = 100) -> tuple[int, IO[str]]:
    """A number that no other cluster of this kind on this machine has, and the file whose lock keeps it so. ``pattern`` names such files."""
    for number in range(count):
        lock = open(Path(tempfile.gettempdir()) / pattern.format(number), "w")  # noqa: SIM115 - held while the cluster is
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return number, lock
    raise RuntimeError(f"{count} test clusters of this kind run on this machine already")


def succeeds(command: Sequence[str], env: dict[str, str]) -> bool:
    return subprocess.run(command, env=env, capture_output=True, stdin=subprocess.DEVNULL).returncode == 0


@dataclass(frozen=True)
class Daemon:
    """One process in the foreground of a session of its own; its pid is kept in a file."""

    name: str
    command: Sequence[str]
    directory: Path  # the cluster's; marks the process in its environment
    ready: Callable[[], bool] = lambda: True
    environment: dict[str, str] = field(default_factory=dict)
    log: str = "output"  # file under log/ that takes its output

    @property
    def pid_file(self) -> Path:
        return self.directory / "run" / f"{self.name}.pid"

    def pid(self) -> int | None:
        """Its process id while it lives. A zombie is dead, and a stranger that got the same number is not ours."""
        try:
            pid = int(self.pid_file.read_text())
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            marks = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            return None
        return pid if state != "Z" and f"{MARK}={self.directory}".encode() in marks else None

    def start(self, env: dict[str, str], with_parent: bool) -> None:
        """Start it unless it runs, and wait until it is ready. ``with_parent``: it dies when the calling thread does."""
        if self.pid() is not None:
            return
        command = ["setpriv", "--pdeathsig", "KILL", *self.command] if with_parent else self.command
        with (self.directory / "log" / f"{self.log}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                env=env | self.environment | {MARK: str(self.directory)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.pid_file.write_text(str(process.pid))
        _children.append(process)
        wait_for(lambda: self.ready() or process.poll() is not None, f"{self.name} to be ready")
        if process.poll() is not None:
            raise RuntimeError(f"{self.name} ended at once with code {process.returncode}: see {self.directory / 'log'}")

    def send(self, how: signal.Signals) -> None:
        pid = self.pid()
        if pid is not None:
            os.kill(pid, how)

    def kill(self, how: signal.Signals = signal.SIGKILL, patience: float = 20.0) -> None:
        """Send ``how`` and wait for the end; what does not end in ``patience`` seconds is killed."""
        pid = self.pid()
        if pid is None:
            return
        os.kill(pid, how)
        try:
            wait_for(lambda: self._gone(pid), f"{self.name} to end", patience)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: self._gone(pid), f"{self.name} to be killed")

    def _gone(self, pid: int) -> bool:
        """Not before it has really ended: a process that is ending has no environment any more, and its ports still."""
        _children[:] = [child for child in _children if child.poll() is None]  # reap ours
        return all(child.pid != pid for child in _children) and _dead(pid)


def _dead(pid: int) -> bool:
    """Also of a process that another one has to reap; while any of its threads ends, it keeps its ports."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return state in "ZX" and int(rest[16]) <= 1


_children: list[subprocess.Popen[bytes]] = []
"""Daemons that this process started: it has to reap them."""
