"""Removes a test cluster when the process that started it is gone, however it went.

It waits for the end of its standard input, which the owner holds open and nobody else does; and it holds the lock of the cluster's
number, so that the next cluster of that number starts on clean ground.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

from tests.clusters.slurm.process import MARK, wait_for

_ROOT = Path(__file__).resolve().parents[3]


class Guard:
    """The owner's side: ``dismiss`` it when all has been removed, or leave it behind."""

    def __init__(self, directory: Path, number: int, lock: IO[str]):
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()", str(directory), str(number)],
            stdin=subprocess.PIPE,
            cwd=_ROOT,
            pass_fds=[lock.fileno()],
            start_new_session=True,  # Ctrl-C is not for it
        )

    def dismiss(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def kill_marked(directory: Path) -> bool:
    """Kill the cluster's daemons and shims, told by their environment. True when there is none."""
    mark, alive = f"{MARK}={directory}".encode(), 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                alive += 1
                os.kill(int(process.name), signal.SIGKILL)
    return not alive


def main() -> None:
    from tests.clusters.kubernetes.control_plane import Settings
    from tests.clusters.kubernetes.node import Node

    directory, number = Path(sys.argv[1]), int(sys.argv[2])
    for deaf in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(deaf, signal.SIG_IGN)
    sys.stdin.buffer.read()
    wait_for(lambda: kill_marked(directory), f"the processes of {directory} to end")
    node = Node(Settings(directory, directory, number))
    if node.folder.exists():
        node.remove()
        shutil.rmtree(node.folder, ignore_errors=True)
