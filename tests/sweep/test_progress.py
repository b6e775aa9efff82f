"""What a person sees: plain lines in a log, a live table on a terminal, and never more than what happened."""

from __future__ import annotations

import os
import pty
from pathlib import Path
from typing import Any

import pytest

from launcher.trials.labels import duration
from tests.sweep.support import PROJECT, sweep, trial
from tests.warm import DEVNULL, Process

pytestmark = pytest.mark.slow


def test_a_log_gets_one_line_for_each_end_and_says_what_was_done_already(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    configs = [trial("ok"), trial("fail 0 out_of_memory", seed=2), trial("once node", seed=3)]
    sweep(tmp_path, *configs[:1])
    assert capfd.readouterr().err.splitlines()[0] == "sweep demo: 1 trial"
    records = sweep(tmp_path, *configs)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "sweep demo: 3 trials, 1 already done"
    names = [f"{records[1].id}  data.pattern=fail 0 out_of_memory run.seed=2", f"{records[2].id}  data.pattern=once node run.seed=3"]
    told = [line for line in lines[1:] if not line.endswith("  running")]  # a rank may have ended before it was seen to run
    assert told[0] == f"[1/2] {names[0]}  failed: out of memory (rank 0: played failure)"
    assert told[1] == f"{records[2].id}  attempt 1 follows: rank 0: played failure"
    assert told[2] == f"[2/2] {names[1]}  done  10.0 ms a step" and len(told) == 3
    assert {line for line in lines[1:] if line not in told} <= {f"{name}  running" for name in names}
    sweep(tmp_path, *configs)
    assert capfd.readouterr().err.splitlines() == ["sweep demo: 3 trials, 2 already done, 1 known to fail"]


def on_a_terminal(script: str, *arguments: object, **streams: Any) -> str:
    """What a terminal shows of Python code that runs in a process of its own; ``streams`` of it that are not the terminal."""
    leader, follower = pty.openpty()
    code = f"import sys\nfrom tests.sweep.support import *\n{script}"
    environment = os.environ | {"COLUMNS": "140", "TERM": "xterm"}
    with Process("-c", code, *arguments, cwd=PROJECT, **{"stdout": follower, "stderr": follower} | streams, env=environment) as process:
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


def test_a_terminal_shows_steps_loss_and_time_of_each_trial_and_keeps_a_line_of_its_end(tmp_path: Path) -> None:
    shown = on_a_terminal("sweep(Path(sys.argv[1]), trial('sleep 0.6'), trial('ok', seed=2))", tmp_path)
    assert "1 running, 1 planned" in shown and "/4" in shown and "loss" in shown and "━" in shown and " so far" in shown
    assert "sweep demo: 2 trials" in shown and shown.count("done  10.0 ms a step") >= 2
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is hidden for ever"


def test_output_into_a_pipe_has_no_escape_codes_though_errors_go_to_a_terminal(tmp_path: Path) -> None:
    shown = on_a_terminal("sweep(Path(sys.argv[1]), trial('ok'))", tmp_path, stdout=DEVNULL)
    assert "[1/1]" in shown and "done  10.0 ms a step" in shown and "\x1b" not in shown


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (0.4, "0:00"), (75, "1:15"), (3700, "1:01:40"), (59.6, "1:00")])
def test_lengths_of_time_are_read_as_clocks_show_them(value: float | None, text: str) -> None:
    assert duration(value) == text
