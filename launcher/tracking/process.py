"""The launcher's side of the MLflow mirror: marks changes, starts the copier, waits for it a moment. The sweep never waits for MLflow."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from launcher.config.packages import install_command, missing
from launcher.console import say
from launcher.own_python import finding_ours, module
from launcher.tracking import unmirrored
from launcher.tracking.database import environment
from launcher.trials.store import Record

PATIENCE_S = 5.0
"""Seconds for which a command that has measured something waits for MLflow before it leaves the rest to the background."""
_OF_MACHINE = 0xEFFFFFFC
"""Number of a machine's own PID namespace (PROC_PID_INIT_INO in Linux's include/linux/proc_ns.h)."""
PERIOD_S = 5.0
"""Between looks at the steps of trials that run."""


class MlflowMirror:
    """Has an observed sweep copied into MLflow by a process (``copier.py``) that outlives the launcher. It only hears of news; its messages
    go to ``mlflow.log`` in the folder of trials."""

    def __init__(self, root: str | Path, sweep: str, wait_s: float | None = None, loggers: Sequence[str] = ()):
        """``wait_s``: ``sweep.mlflow_wait_s``; ``loggers``: ``tracking.loggers``, which the same process fills."""
        self._root, self._sweep, self._wait_s = Path(root).absolute(), sweep, wait_s
        self._process: subprocess.Popen[bytes] | None = None
        self._told = float("-inf")
        self._mlflow = missing("mlflow") is None
        self._here = self._mlflow or bool(loggers)
        self.begun = False

    def begin(self) -> None:
        """From here on word is left of the sweep, if this process is killed too: the next command has it copied."""
        self.begun = True
        unmirrored.add(self._root, self._sweep)

    def on_trial(self, record: Record) -> None:
        """A trial has changed."""
        self.close()
        if self._here:
            self._start()

    def on_poll(self, records: Sequence[Record]) -> None:
        """Trials that run make steps."""
        if records and time.monotonic() - self._told > PERIOD_S:
            self.on_trial(records[0])

    def close(self) -> None:
        """The sweep has ended; this command may not have."""
        unmirrored.add(self._root, self._sweep)
        self._told = time.monotonic()

    def finish(self, patience_s: float | None = None) -> None:
        """Lets the copier finish, for at most ``patience_s``; None: as configured, or to the end where it would end with this command."""
        if patience_s is None:
            patience_s = self._wait_s if self._wait_s is not None else math.inf if nothing_outlives_us() else PATIENCE_S
        if not self._mlflow:
            say(f"not copied to MLflow, which is not installed ({install_command('mlflow')}); 'trireme rank' and 'report' do without")
        if not self._here:
            return
        process = self._start()
        assert process.stdin is not None
        process.stdin.close()  # the launcher's life, as the copier sees it
        with suppress(KeyboardInterrupt):
            self._wait(process, patience_s)
        if not patience_s or self._sweep not in unmirrored.names(self._root):
            return
        trouble = unmirrored.trouble(self._root, self._sweep) or f"its copier ended with code {process.returncode}" * bool(
            process.returncode
        )
        if trouble:
            say(
                f"MLflow does not have all of sweep {self._sweep} yet: {trouble}; any later command tries again, see "
                f"{self._root / 'mlflow.log'}"
            )
        elif nothing_outlives_us():
            say(f"MLflow does not have all of sweep {self._sweep} yet: any later command copies the rest")
        else:
            say(f"sweep {self._sweep} is being copied to MLflow in the background; 'trireme ui' waits for it")

    def _wait(self, process: subprocess.Popen[bytes], patience_s: float) -> None:
        start, told = time.monotonic(), False
        while (waited := time.monotonic() - start) < patience_s and self._sweep in unmirrored.names(self._root) and not process.poll():
            if process.poll() is not None and waited > PATIENCE_S:
                return  # another copier is at work, which is not ours to wait for
            if not told and waited > 1:
                say(f"copying to MLflow; Ctrl-C leaves it to {'a later command' if nothing_outlives_us() else 'the background'}")
                told = True
            time.sleep(0.05)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = start_copier(self._root, subprocess.PIPE)
        return self._process


def nothing_outlives_us() -> bool:
    """Returns whether this command is a container's main process, or its child: all other processes end with it."""
    try:
        contained = os.stat("/proc/self/ns/pid").st_ino != _OF_MACHINE
    except OSError:
        contained = False
    return os.getpid() == 1 or (contained and os.getppid() <= 1)


def start_copier(root: Path, life: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """A copier that stands back while somebody holds the other end of ``life``. Ctrl-C and a closed terminal are not for it."""
    command = module("launcher.tracking.copier", "--dir", str(root))
    with _output(root / "mlflow.log") as output:
        return subprocess.Popen(
            command, stdin=life, stdout=output, stderr=output, env=environment() | finding_ours(), start_new_session=True
        )


def _output(path: Path) -> BinaryIO:
    """Opens the log of copiers; falls back to nowhere, since logging must not end a measurement."""
    try:
        return path.open("ab")
    except OSError as error:
        say(f"what copying to MLflow has to say is lost: {path} cannot be written ({error.strerror}); move it away")
        return open(os.devnull, "ab")


def resume(root: Path) -> None:
    """Copies in the background the sweeps of a killed copier, except in folders of other users or without write permission."""
    with suppress(OSError):
        if unmirrored.names(root) and root.stat().st_uid == os.getuid() and os.access(root, os.W_OK):
            start_copier(root)
