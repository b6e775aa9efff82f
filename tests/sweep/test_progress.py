"""What a person sees: plain lines in a log, bars on a terminal, and never more than what happened."""

from __future__ import annotations

import os
import pty
from pathlib import Path

import pytest

from launcher.trials.labels import duration
from tests.sweep.support import PROJECT, sweep, trial
from tests.warm import Process

pytestmark = pytest.mark.slow


def test_a_log_gets_one_line_for_each_end_and_says_what_was_done_already(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    configs = [trial("ok"), trial("fail 0 out_of_memory", seed=2), trial("once node", seed=3)]
    sweep(tmp_path, *configs[:1])
    assert capfd.readouterr().err.splitlines()[0] == "sweep demo: 1 trial"
    records = sweep(tmp_path, *configs)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "sweep demo: 3 trials, 1 already done"
    assert (
        lines[1] == f"[1/2] {records[1].id}  data.pattern=fail 0 out_of_memory run.seed=2  failed: out of memory (rank 0: played failure)"
    )
    assert lines[2] == f"{records[2].id}  attempt 1 follows: rank 0: played failure"
    assert lines[3].startswith(f"[2/2] {records[2].id}  data.pattern=once node run.seed=3  done  10.0 ms a step")
    sweep(tmp_path, *configs)
    assert capfd.readouterr().err.splitlines() == ["sweep demo: 3 trials, 2 already done, 1 known to fail"]


def on_a_terminal(script: str, *arguments: object) -> str:
    """What a terminal shows of Python code that runs in a process of its own."""
    leader, follower = pty.openpty()
    code = f"import sys\nfrom tests.sweep.support import *\n{script}"
    environment = os.environ | {"COLUMNS": "140", "TERM": "xterm"}
    with Process("-c", code, *arguments, cwd=PROJECT, stderr=follower, env=environment) as process:
        os.close(follower)
        shown = b""
        try:
            while data := os.read(leader, 1 << 16):
                shown += data
        except OSError:  # the terminal's other end is closed
            pass
        os.close(leader)
        assert process.wait() == 0
    return shown.decode()


def test_a_terminal_shows_a_bar_of_steps_with_loss_and_step_time(tmp_path: Path) -> None:
    shown = on_a_terminal("sweep(Path(sys.argv[1]), trial('sleep 0.3'))", tmp_path)
    assert "/4" in shown and "loss" in shown and "10.0 ms" in shown
    assert "sweep demo: 1 trial" in shown and "done  10.0 ms a step" in shown
    assert "━" in shown


def test_a_terminal_shows_a_bar_for_the_sweep_above_those_of_its_trials(tmp_path: Path) -> None:
    shown = on_a_terminal("sweep(Path(sys.argv[1]), trial('sleep 0.2'), trial('ok', seed=2))", tmp_path)
    assert "0/2" in shown and "2/2" in shown


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0.4, "0:00"), (75, "1:15"), (3700, "1:01:40"), (59.6, "1:00")])
def test_lengths_of_time_are_read_as_clocks_show_them(value: float | None, text: str) -> None:
    assert duration(value) == text
