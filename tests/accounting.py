"""Says at the end of a run of tests what it took: tests, seconds and processor seconds by room, and the worst figure of each kind.

A room is a folder of ``tests/``. Processor seconds of a test are those of its process and of all processes below it; clusters that all
tests share are told by themselves, and processes that have left their parent are in none of them. A test tells a figure whose largest value
is of interest by ``record_property("worst NAME", value)``. ``--summary FILE`` writes the same as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
WORST = "worst "
SHARED = set[int]()
"""Processes that this one has started for all tests."""
SHOWN = 40
"""Tests that are named for what they cost."""


class Account:
    """Sums of a run; in the process that prints its results."""

    def __init__(self) -> None:
        self.began, self.outcomes = time.monotonic(), Counter[str]()
        self.tests, self.cpu = Counter[str](), defaultdict[str, float](float)
        self.worst: dict[str, float] = {}
        self.costliest: list[tuple[float, str]] = []
        self.files = defaultdict[str, float](float)

    def add(self, report: pytest.TestReport) -> None:
        room = room_of(report.nodeid)
        if report.outcome != "passed" or report.when == "call":
            self.outcomes[report.outcome if report.when == "call" or report.outcome == "skipped" else "error"] += 1
        if report.when == "teardown":
            self.tests[room] += 1
            for name, value in report.user_properties:
                if name == "cpu seconds":
                    self.cpu[room] += float(str(value))
                    self.files[report.nodeid.partition("::")[0]] += float(str(value))
                    self.costliest = sorted([*self.costliest, (float(str(value)), report.nodeid)], reverse=True)[:SHOWN]
                elif name.startswith(WORST):
                    self.worst[name.removeprefix(WORST)] = max(float(str(value)), self.worst.get(name.removeprefix(WORST), float("-inf")))

    def document(self) -> dict[str, Any]:
        return {
            "tests": dict(self.outcomes),
            "seconds": round(time.monotonic() - self.began),
            "cpu_seconds": {room: round(seconds, 1) for room, seconds in sorted(self.cpu.items())},
            "worst": self.worst,
            "files": {name: round(seconds, 1) for name, seconds in sorted(self.files.items(), key=lambda item: -item[1])},
            "costliest": {test: round(seconds, 1) for seconds, test in self.costliest},
        }

    def lines(self) -> Iterator[str]:
        yield f"{'room':<16}{'tests':>7}{'CPU s':>8}"
        for room, seconds in sorted(self.cpu.items(), key=lambda item: -item[1]):
            yield f"{room:<16}{self.tests[room]:>7}{seconds:>8.1f}"
        yield f"{'all':<16}{sum(self.tests.values()):>7}{sum(self.cpu.values()):>8.1f}   in {time.monotonic() - self.began:.0f} s"
        yield from (f"{seconds:7.1f} s   {test}" for seconds, test in self.costliest)
        yield from (f"worst {name}: {value:.3g}" for name, value in sorted(self.worst.items()))


ACCOUNT = Account()


def room_of(nodeid: str) -> str:
    """The folder of ``tests/`` that a test stands in."""
    path = Path(nodeid.partition("::")[0])
    return path.parts[1] if len(path.parts) > 2 else "(top)"


def processor_seconds(pid: int | None = None) -> float:
    """Processor seconds of a process, by default this one, of its children that have ended, and of all that run below it. Linux; 0
    elsewhere."""
    if pid is None and sys.platform == "linux" and not _has_children():
        return sum(os.times()[:4])  # the same, without a look at each thread
    pid, total = pid or os.getpid(), 0.0
    with suppress(OSError):
        total = sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15])) / TICKS
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()):
                total += processor_seconds(child) if child not in SHARED else 0.0
    return total


def _has_children() -> bool:
    """Tells whether this process has children that run, or that have ended and nobody has waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[BEGAN] = processor_seconds()
    return (yield)


BEGAN = pytest.StashKey[float]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.when == "teardown":
        item.user_properties.append(("cpu seconds", max(0.0, processor_seconds() - item.stash[BEGAN])))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    ACCOUNT.add(report)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if sum(ACCOUNT.tests.values()) > 1:
        terminalreporter.section("processor seconds by room")
        for line in ACCOUNT.lines():
            terminalreporter.line(line)
    if path := config.getoption("--summary"):
        Path(path).write_text(json.dumps(ACCOUNT.document(), indent=1) + "\n")
