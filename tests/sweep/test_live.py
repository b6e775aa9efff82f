"""The live table of a sweep: it fits every terminal, hides no trial, and says when the sweep ends."""

from __future__ import annotations

import os
import pty
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from launcher.sweep.live import LiveView
from launcher.sweep.remaining import Pace, pace, remaining_s, sweep_left_s
from launcher.trials.store import Record, Store
from tests.results.trial_files import STEPS, SweepOnDisk, point, seeded
from tests.sweep.support import PROJECT, until
from tests.warm import PIPE, Process
from trainer.shared.records.outcome import Reason, Status

REASONS = ["", "waits: Priority", "0/4 nodes are available: " + "insufficient gpu, " * 9, "等待" * 30, "a\nb\x1b[2J"]


def drawn(random: random.Random, count: int) -> list[Record]:
    """Trials in every state, with words that are long, wide, and not for terminals."""
    records = []
    for number in range(count):
        status = random.choice(list(Status))
        record = Record(f"{number:012x}", Path("nowhere"), status, detail=random.choice(REASONS))
        record.overrides = (f"run.seed={'9' * random.choice([1, 60])}{number}",)
        record.reason = Reason.NODE if status in (Status.FAILED, Status.STOPPED) else None
        record.config = {"run": {"steps": 10 ** random.randrange(1, 8), "task": "train"}} if random.random() < 0.8 else {}
        record.submitted = None if status is Status.PLANNED else time.time() - random.choice([1, 1e5, 1e8])
        record.predicted = random.choice([None, {"step_time_s": 1e-3}, {"step_time_s": 1e5}])
        records.append(record)
    return records


@pytest.mark.parametrize("seed", range(40))
def test_every_terminal_is_fitted_and_every_trial_has_a_row_or_is_counted(seed: int) -> None:
    draw = random.Random(seed)
    records = drawn(draw, draw.choice([0, 1, 3, 40, 200]))
    width, height = draw.choice([20, 40, 80, 160, 300]), draw.choice([8, 24, 60])
    lines = LiveView("demo", records, time.time() - 100).lines(width, height)
    words = [line.plain for line in lines]
    assert len(words) < height and all(cell_len(line) <= width for line in words), words
    assert not any(not character.isprintable() for line in words for character in line)
    trials = [record for record in records if record.status is not Status.PRUNED]
    titles = next((place for place, line in enumerate(words) if line.split()[:1] == ["trial"]), None)
    if height == 60 and width >= 40 and trials and titles is not None:
        left_out = next((place for place, line in enumerate(words) if line.startswith("and ")), None)
        more = int(words[left_out].split()[1]) if left_out is not None else 0
        rows = words[titles + 1 : left_out if left_out is not None else titles + 1 + len(trials)]
        assert len(rows) + more == len(trials)
        assert len(rows) >= min(len(trials), 30)


def test_trials_that_run_or_failed_stand_above_those_that_wait() -> None:
    records = drawn(random.Random(1), 300)
    rows = [line.plain for line in LiveView("demo", records).lines(80, 60)]
    running = sum(record.status is Status.RUNNING for record in records)
    first = next(place for place, row in enumerate(rows) if row.startswith("trial")) + 1
    assert running > 30 and all("starting" in row or " running" in row for row in rows[first : first + 30])


def test_reasons_of_a_queue_are_counted_below_the_rows() -> None:
    records = [record for record in drawn(random.Random(2), 150) if record.status is Status.SUBMITTED]
    for place, record in enumerate(records):
        record.detail = "waits: Priority" if place else "waits: Resources"
    for height in (12, 60):
        words = [line.plain for line in LiveView("demo", records).lines(80, height)]
        assert words[-2:] == [f"{len(records) - 1} waiting: Priority", "1 waiting: Resources"]


def test_a_reason_says_when_the_first_of_its_trials_is_expected_to_start() -> None:
    records = [record for record in drawn(random.Random(2), 150) if record.status is Status.SUBMITTED]
    at = time.time() // 60 * 60 + 300
    for place, record in enumerate(records):
        record.detail, record.expected = "waits: Priority", [at + 600, at, None, 17.0][min(place, 3)]
    del records[3:]
    clock = f"{time.localtime(at).tm_hour:02}:{time.localtime(at).tm_min:02}"
    (line,) = [line.plain for line in LiveView("demo", records).lines(120, 40) if "waiting: " in line.plain]
    assert line.startswith("3 waiting: Priority; the first expected to start") and line.endswith(f"at {clock}")
    records[1].expected = 17.0  # a time that has passed says nothing
    assert not any("expected" in line.plain for line in LiveView("demo", records[1:]).lines(120, 40))


def planned(number: int, status: Status, per_step: float | None, gone: float = 0.0) -> Record:
    record = Record(f"{number:012x}", Path("nowhere"), status, config={"run": {"steps": 10, "task": "train"}})
    record.predicted = None if per_step is None else {"step_time_s": per_step}
    record.started = time.time() - gone if status is Status.RUNNING else None
    return record


def test_the_end_is_that_of_the_last_trial_with_as_many_at_a_time_as_now() -> None:
    running = [planned(1, Status.RUNNING, 1.0, gone=4.0), planned(2, Status.RUNNING, 2.0)]  # 6 s and 20 s are left
    waiting = [planned(number, Status.PLANNED, 0.5) for number in range(3, 7)]  # 5 s each
    assert sweep_left_s([*running, *waiting], Pace()) == pytest.approx(25, abs=0.1)  # 6 + 5 + 5 + 5, and 20 + 5
    assert sweep_left_s([*running, *waiting], Pace(ratio=2.0, beside_s=1.0)) == pytest.approx(52, abs=0.1)  # 17 + 11 + 11 + 11, and 41 + 11
    assert sweep_left_s(waiting, Pace()) == pytest.approx(20)  # none runs, and none is in a queue: one after the other
    assert sweep_left_s([*waiting, planned(9, Status.SUBMITTED, 1.0)], Pace()) is None  # a queue decides
    assert sweep_left_s([*running, planned(9, Status.PLANNED, None)], Pace()) is None
    assert sweep_left_s([*running, planned(9, Status.PLANNED, None)], Pace(step_s=3.0)) == pytest.approx(36, abs=0.1)


def test_measured_trials_correct_what_predictions_say_of_the_others(tmp_path: Path) -> None:
    sweep = SweepOnDisk(tmp_path)
    for seed, predicted, measured in ((1, 0.1, 0.2), (2, 0.1, 0.3), (3, 0.2, 0.4)):
        sweep.done(seeded(seed), measured, spread=0.0).predicted = {"step_time_s": predicted}
    known = pace(sweep.records)
    assert known.ratio == pytest.approx(2.0) and known.step_s == pytest.approx(0.3)
    assert known.beside_s == pytest.approx(61 - STEPS * 0.3, abs=2.0)  # of a minute and a second each
    assert remaining_s(planned(1, Status.PLANNED, 0.5), known) == pytest.approx(10 * 1.0 + known.beside_s)
    assert remaining_s(sweep.add(point(4, 1), Status.RUNNING), known) is not None


SCREEN = """
import sys, time
from pathlib import Path
from launcher.trials.store import Status, Store
from launcher.sweep.progress import Watching
store = Store(sys.argv[1])
watching = Watching("planted", store.sweep().records)
for line in sys.stdin:
    records = store.sweep().records
    for record in records[: int(line)]:
        record.status, record.ended = Status.DONE, time.time()
    watching.update(records)
watching.close()
"""


class Screen:
    """A terminal of tmux, full of what was there before, of which what it shows can be read."""

    def __init__(self, width: int, height: int):
        self._socket = f"trireme-{os.getpid()}-{time.monotonic_ns()}"
        self.tmux("-f", os.devnull, "new-session", "-d", "-x", str(width), "-y", str(height), f"yes earlier | head -{height}; sleep 600")
        self.tty = self.tmux("display-message", "-p", "#{pane_tty}").strip()

    def tmux(self, *words: str) -> str:
        return subprocess.run(["tmux", "-L", self._socket, *words], check=True, capture_output=True, text=True).stdout

    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.tmux("capture-pane", "-p").splitlines()]

    def close(self) -> None:
        self.tmux("kill-server")


@pytest.fixture
def screen() -> Iterator[Screen]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed (tests/system-packages installs it)")
    made = Screen(160, 30)
    yield made
    made.close()


@pytest.mark.slow
def test_a_terminal_of_any_width_shows_the_table_once_after_every_change_of_its_size(tmp_path: Path, screen: Screen) -> None:
    sweep = SweepOnDisk(tmp_path)
    for seed in range(8):  # with lines that a terminal of 50 columns breaks in three
        more = f"optimizer.learning_rate=0.00{seed}", f"optimizer.weight_decay=0.{seed}"
        sweep.add(seeded(seed, *more), Status.RUNNING if seed < 2 else Status.PLANNED)

    def shown(*words: str) -> Any:
        """The lines, once each of ``words`` stands on the screen, and the table once."""
        lines = screen.lines()
        once = sum("sweep planted:" in line for line in lines) == 1
        return lines if once and all(any(word in line for line in lines) for word in words) else None

    with (
        open(screen.tty, "w") as tty,
        Process("-c", SCREEN, tmp_path, cwd=PROJECT, stdin=PIPE, stdout=tty, stderr=tty, text=True) as process,
    ):
        wide = until(lambda: shown("2 running, 6 planned", sweep.records[0].id))
        assert sum(line.startswith("run.seed=") for line in wide) == 8
        assert process.stdin is not None
        for width, height in ((50, 40), (160, 30), (80, 24), (40, 12), (160, 30)):
            screen.tmux("resize-window", "-x", str(width), "-y", str(height))
            title = {160: "id      step", 80: "elapsed", 50: "step  left", 40: "step  left"}[width]
            lines = until(lambda title=title: shown("run.seed=0", title))  # type: ignore[misc]
            assert sum(line.startswith("run.seed=0 ") for line in lines) == 1 and ("elapsed" in "".join(lines)) == (width > 50)
        process.stdin.write("1\n")
        process.stdin.flush()
        said = f"{sweep.records[0].id}  run.seed=0 optimizer.learning_rate=0.000 optimizer.weight_decay=0.0  done"
        ended = until(lambda: shown("1 running, 6 planned, 1 done", said))
        assert said in ended[:-2]
        process.stdin.close()
        assert process.wait(600) == 0
    left = [line for line in screen.lines() if line]
    assert left == [said]  # the table is gone, what was said stays


@pytest.mark.campaign("launchers")
def test_a_sweep_into_tee_is_a_line_for_each_change_and_the_same_in_the_file(tmp_path: Path) -> None:
    """Keyboard and errors stay with a terminal, as when a person types it."""
    what = [
        "model.layers=1",
        "model.hidden=32",
        "model.heads=2",
        "model.vocab=64",
        "model.seq=16",
        "data=synthetic",
        "cluster.gpus_per_node=1",
    ]
    words = shlex.join([sys.executable, "-m", "launcher", "train", "-m", *what, "run.steps=3", "run.global_batch=2", "run.seed=1,2"])
    keyboard, screen = pty.openpty()
    command = ["bash", "-o", "pipefail", "-c", f"{words} 2>&1 | tee {tmp_path}/log"]
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "TERM": "xterm"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdin=screen, stdout=subprocess.PIPE, text=True)
    os.close(keyboard)
    os.close(screen)
    assert done.returncode == 0 and done.stdout == (tmp_path / "log").read_text()
    assert all(character.isprintable() or character == "\n" for character in done.stdout)
    lines = done.stdout.splitlines()
    for record in Store(tmp_path / "runs").sweep().records:
        assert [line.split()[-1] for line in lines if line.startswith(record.id)][:1] == ["running"], lines
        assert sum("done" in line.split() and record.id in line for line in lines) == 1, lines
