"""The launcher's side of the MLflow mirror: start it, nudge it, wait for it a little while. The sweep never waits for MLflow."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from launcher.results.database import environment
from launcher.sweep.progress import say

if TYPE_CHECKING:
    from launcher.sweep.store import Record

PATIENCE_S = 60.0
"""How long ``close`` waits for a mirror that still has something to write."""


class MlflowMirror:
    """An observer of the sweep loop that has the sweep copied into MLflow.

    The copying is done by a process of its own (``mirror.py``), begun with the first trial, that reads the trials' files: nothing
    is handed over here but the news that there is something to read. What it has to say is in ``mlflow.log`` in the sweep folder.
    """

    def __init__(self, root: str | Path, sweep: str):
        self._root, self._sweep = Path(root).absolute(), sweep
        self._process: subprocess.Popen[bytes] | None = None
        self._warned = False

    def on_trial(self, record: Record) -> None:
        """A trial has changed: have it looked at now."""
        if self._process is None:
            self._process = self._start()
        try:
            os.write(_input(self._process).fileno(), b"\n")
        except BlockingIOError:
            return  # it has unread nudges already
        except BrokenPipeError:
            self._warn()

    def on_poll(self, records: Sequence[Record]) -> None:
        """Say once if the mirror has died; what it has missed is on disk and can be mirrored at any time."""
        if self._process is not None and self._process.poll() is not None:
            self._warn()

    def close(self) -> None:
        """Let the mirror finish, for ``PATIENCE_S`` at most."""
        process = self._process or self._start()
        _input(process).close()
        try:
            if process.wait(PATIENCE_S) != 0:
                self._warn()
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self._warn()

    def _start(self) -> subprocess.Popen[bytes]:
        """Ctrl-C is for the launcher, so the mirror gets a process group of its own; it ends when its input does."""
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "launcher.results.mirror", "--dir", str(self._root), self._sweep]
        with (self._root / "mlflow.log").open("ab") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment() | {"PYTHONPATH": path}, process_group=0
            )
        os.set_blocking(_input(process).fileno(), False)
        return process

    def _warn(self) -> None:
        if not self._warned:
            say(f"MLflow does not have all of sweep {self._sweep} yet, 'trireme ui' copies the rest; see {self._root / 'mlflow.log'}")
        self._warned = True


def _input(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin
