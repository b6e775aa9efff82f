"""The fork server forks what it is asked for, reports every end, and leaves nobody behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.farm import Farm, free_port
from tests.processes import alive
from tests.small_runs import small

pytestmark = pytest.mark.slow

LINE = r"it (?P<step>\d+) took (?P<milliseconds>[\d.]+) ms"
LEAVES = """
import os, subprocess, sys, time
worker = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, start_new_session=True)
parentless = subprocess.run(["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True).stdout.strip()
for step in range(9): print(f"it {step} took {step}.5 ms", flush=True)
print("left", worker.pid, parentless, flush=True)
"""
"""Another trainer's program, which starts a process in a session of its own, as torchrun does its workers, and one without a parent."""


class Conversation:
    """A fork server of its own, spoken to line by line."""

    def __init__(self, process: Any) -> None:
        self.process = process
        resource.prlimit(self.process.pid, resource.RLIMIT_CORE, (0, 0))  # ranks that crash here leave no image of themselves
        assert self.hear() == {"ready": True}

    def say(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        return json.loads(self.process.stdout.readline())

    def start(self, out: Path, ranks: int, steps: int = 100000, key: str = "trial", command: str = "", **layout: Any) -> list[int]:
        """``command``: the Python program of another trainer."""
        out.mkdir(exist_ok=True)
        other = {"command": {"trainer": "fake", "words": [sys.executable, "-c", command], "log": [LINE]}} if command else {}
        Farm.write(out / "config.yaml", small(steps=steps, **layout) | other)
        self.say(
            json.dumps(
                {
                    "start": key,
                    "config": str(out / "config.yaml"),
                    "out": str(out),
                    "attempt": 0,
                    "ranks": list(range(ranks)),
                    "world_size": ranks,
                    "master_port": free_port(),
                    "env": {"GREETING": "hello"},
                    "log": str(out / "logs" / "rank{rank}.log"),
                }
            )
        )
        reply = self.hear()
        assert reply["started"] == key
        return [reply["pids"][str(rank)] for rank in range(ranks)]


def ended(conversation: Conversation) -> None:
    conversation.process.kill()
    conversation.process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Conversation]:
    """One for all tests that leave it alive."""
    command = [sys.executable, "-m", "trainer.fork_server"]
    conversation = Conversation(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    yield conversation
    ended(conversation)


@pytest.fixture
def mortal() -> Iterator[Conversation]:
    """One for a test that kills it."""
    conversation = Conversation(warm.Process("-m", "trainer.fork_server", stdin=warm.PIPE, stdout=warm.PIPE, text=True))
    yield conversation
    ended(conversation)


def until(condition: Any, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_every_rank_is_reported_with_its_exit_code_and_has_its_log(server: Conversation, tmp_path: Path) -> None:
    server.start(tmp_path, 2, steps=2, data=2)
    ends = sorted((server.hear() for _ in range(2)), key=lambda end: end["rank"])
    assert ends == [{"exited": "trial", "rank": rank, "code": 0} for rank in range(2)]
    assert "step 2/2" in (tmp_path / "logs" / "rank0.log").read_text()
    assert (tmp_path / "logs" / "rank1.log").read_text() == ""


def test_a_killed_fork_server_leaves_no_rank(mortal: Conversation, tmp_path: Path) -> None:
    pids = mortal.start(tmp_path, 2, data=2)
    until((tmp_path / "metrics.jsonl").exists)
    mortal.process.kill()
    until(lambda: not any(alive(pid) for pid in pids))


def test_a_kill_request_stops_ranks_that_can_stop(server: Conversation, tmp_path: Path) -> None:
    server.start(tmp_path, 2, data=2)
    until((tmp_path / "metrics.jsonl").exists)
    server.say('{"kill": "trial"}')
    assert {server.hear()["code"], server.hear()["code"]} == {75}


def test_peers_of_a_failed_rank_are_killed(server: Conversation, tmp_path: Path) -> None:
    """Rank 0 is frozen, so it cannot notice by itself that rank 1 is gone."""
    pids = server.start(tmp_path, 2, data=2)
    until((tmp_path / "metrics.jsonl").exists)
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    assert {server.hear()["rank"], server.hear()["rank"]} == {0, 1}


@pytest.mark.parametrize(("number", "name"), [(signal.SIGSEGV, "Segmentation fault"), (signal.SIGABRT, "Aborted")])
def test_a_rank_that_crashes_says_in_its_log_where_it_was(server: Conversation, tmp_path: Path, number: int, name: str) -> None:
    (pid,) = server.start(tmp_path, 1)
    until((tmp_path / "metrics.jsonl").exists)
    os.kill(pid, number)
    assert server.hear() == {"exited": "trial", "rank": 0, "code": -number}
    said = (tmp_path / "logs" / "rank0.log").read_text()
    assert f"Fatal Python error: {name}" in said and f"{os.sep}trainer{os.sep}loop.py" in said


@pytest.mark.parametrize("line", ["no json", "[]", "{}", '{"start": "a"}', '{"start": "b", "ranks": 3}'])
def test_a_request_that_cannot_be_served_is_answered_and_harms_nothing(server: Conversation, tmp_path: Path, line: str) -> None:
    server.say(line)
    assert "error" in server.hear()
    server.start(tmp_path, 1, steps=1 + 1)
    assert server.hear()["code"] == 0


def test_a_key_cannot_run_twice_at_once(server: Conversation, tmp_path: Path) -> None:
    pids = server.start(tmp_path, 1)
    server.say(json.dumps({"start": "trial", "config": "", "out": "", "ranks": [0], "world_size": 1, "master_port": 1, "log": ""}))
    assert "running already" in server.hear()["error"]
    os.kill(pids[0], signal.SIGKILL)
    assert server.hear() == {"exited": "trial", "rank": 0, "code": -signal.SIGKILL}


def left(out: Path, rank: int = 0) -> list[int]:
    """The processes that a rank's command has started."""
    log = out / "logs" / f"rank{rank}.log"
    until(lambda: log.exists() and "left" in log.read_text())
    pids = [int(word) for line in log.read_text().splitlines() if line.startswith("left") for word in line.split()[1:]]
    assert len(pids) == 2
    return pids


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to the fork server")
@pytest.mark.parametrize("end", ["done", "one fails", "killed", "end of input"])
def test_nothing_that_a_command_started_outlives_its_trial(request: pytest.FixtureRequest, tmp_path: Path, end: str) -> None:
    conversation: Conversation = request.getfixturevalue("mortal" if end == "end of input" else "server")
    last = {
        "done": "time.sleep(1)",
        "one fails": "time.sleep(1000 if os.environ['RANK'] == '0' else 1); sys.exit(3)",
    }
    pids = conversation.start(tmp_path, 2, command=LEAVES + last.get(end, "time.sleep(1000)"), data=2)
    started = left(tmp_path, 0) + left(tmp_path, 1)
    if end == "end of input":
        assert all(alive(pid) for pid in started)
        conversation.process.stdin.close()
        assert conversation.process.wait(300) == 0
        assert not any(alive(pid) for pid in pids + started)
        return
    for pid in pids if end == "killed" else []:
        os.kill(pid, signal.SIGKILL)
    assert {conversation.hear()["rank"], conversation.hear()["rank"]} == {0, 1}
    until(lambda: not any(alive(pid) for pid in started), 60)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to the fork server")
def test_the_end_of_a_trial_ends_nothing_of_another(server: Conversation, tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    pids = [server.start(folder, 1, key=folder.name, command=LEAVES + "time.sleep(1000)")[0] for folder in folders]
    first, second = map(left, folders)
    os.kill(pids[1], signal.SIGKILL)
    assert server.hear()["exited"] == "second"
    until(lambda: not any(alive(pid) for pid in second), 60)
    server.start(tmp_path / "third", 1, steps=2, key="third")
    assert server.hear()["exited"] == "third"
    assert all(alive(pid) for pid in [pids[0], *first])
    os.kill(pids[0], signal.SIGKILL)
    assert server.hear()["exited"] == "first"
    until(lambda: not any(alive(pid) for pid in first), 60)
