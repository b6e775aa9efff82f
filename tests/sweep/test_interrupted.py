"""Ctrl-C, SIGTERM and a closed terminal, as a person's shell delivers them: what runs here ends, why is recorded, the exit code says it."""

from __future__ import annotations

import os
import pty
import signal
import threading
from pathlib import Path

import psutil
import pytest

from launcher.trials.store import Store
from tests.sweep.support import trial_json, until
from tests.warm import DEVNULL, Process
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.files import last_object

pytestmark = pytest.mark.slow

LONG = ["data=synthetic", "model.layers=2", "model.hidden=32", "model.heads=2", "model.vocab=64", "model.seq=16", "cluster.gpus_per_node=2",
        "run.global_batch=4", "run.steps=1000000"]  # fmt: skip


class Terminal:
    """A command in a terminal of its own, which can be typed into and closed."""

    def __init__(self, cwd: Path, *arguments: str):
        self._keyboard, screen = pty.openpty()
        self.process = Process("-m", "launcher", *arguments, cwd=cwd, stdin=screen, stdout=screen, stderr=screen, session=True)
        os.close(screen)
        self._screen = bytearray()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while data := os.read(self._keyboard, 65536):
                self._screen += data
        except OSError:  # nobody writes any more
            return

    @property
    def text(self) -> str:
        return self._screen.decode(errors="replace")

    def hang_up(self) -> None:
        """Closes the terminal."""
        os.close(self._keyboard)

    def end(self, how: str) -> int:
        """The exit code after ``how``."""
        if how == "Ctrl-C":
            os.write(self._keyboard, b"\x03")
        elif how == "SIGTERM":
            self.process.terminate()
        else:
            self.hang_up()
        return self.process.wait(600)


def running(runs: Path) -> Path:
    """The folder of the trial that runs, once it has made a step."""
    path: Path = until(lambda: list(runs.glob("trials/*/metrics.jsonl")))[0].parent
    until(lambda: trial_json(path).get("status") == "running")
    until(lambda: (last_object(path / "metrics.jsonl") or {}).get("step"))  # the file is there before its first line is
    return path


ENDINGS = {"Ctrl-C": (130, "interrupted"), "SIGTERM": (143, "SIGTERM"), "the terminal is closed": (129, "the terminal was closed (SIGHUP)")}


@pytest.mark.parametrize(("how", "verb"), [
    ("Ctrl-C", "train"), ("SIGTERM", "search"), ("the terminal is closed", "train"),
    *(pytest.param(*case, marks=pytest.mark.campaign("launchers")) for case in
      [("SIGTERM", "train"), ("Ctrl-C", "search"), ("the terminal is closed", "search")]),
])  # fmt: skip
def test_trials_end_and_say_why_and_the_exit_code_is_the_signals(how: str, verb: str, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, verb, *LONG, *(["hardware=v100_32", "layout.tensor=1,2"] if verb == "search" else []))
    folder = running(tmp_path / "runs")
    pids = trial_json(folder)["handle"]["pids"]
    code, words = ENDINGS[how]
    assert terminal.end(how) == code, terminal.text
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))  # an orphan is collected a moment after its end
    record = Store(tmp_path / "runs").load(folder.name)
    assert (record.status, record.reason) == (Status.STOPPED, Reason.CANCELLED)
    assert words in record.detail


def test_nohup_is_obeyed(tmp_path: Path) -> None:
    process = Process("-m", "launcher", "train", *LONG, cwd=tmp_path, ignored=[signal.SIGHUP])
    folder = running(tmp_path / "runs")
    process.send_signal(signal.SIGHUP)
    step = (Store(tmp_path / "runs").load(folder.name).read_last_step() or {})["step"]
    until(lambda: (Store(tmp_path / "runs").load(folder.name).read_last_step() or {})["step"] > step)
    process.terminate()
    assert process.wait(600) == 143


def test_verb_that_only_waits_ends_with_the_signals_code(tmp_path: Path) -> None:
    process = Process("-m", "launcher", "train", *LONG, cwd=tmp_path, stderr=DEVNULL)
    folder = running(tmp_path / "runs")
    try:
        for how in ENDINGS:
            waiting = Terminal(tmp_path, "logs", folder.name, "-f")
            until(lambda waiting=waiting: waiting.text)  # type: ignore[misc]
            assert waiting.end(how) == ENDINGS[how][0], waiting.text
    finally:
        process.terminate()
        process.wait(600)
