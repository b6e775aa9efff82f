"""Plant each defect in a copy of the sources, and see the gate's tests of its room fail.

    python -m tests.planted                          all of them: hours
    python -m tests.planted --room state --jobs 2
    python -m tests.planted --name "the norm counts replicas of a shard again"

caught.json beside this file remembers by which test each defect was caught: that one is asked first, and all the others where it passes.
Tests that fail without a defect say nothing, so each set of them runs once without any. A defect that makes tests hang is caught when
one of them fails for it: one that has to be ended from here has escaped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.planted.defect import Defect
from tests.planted.defects import rooms

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("caught.json")
TEST_SECONDS, SET_SECONDS = 300, 1800
"""Patience with one test and with all tests of a defect."""
FAILED, CAUGHT = 1, re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)
"""pytest's exit code where tests ran and failed, and how its summary names them."""


@dataclass(frozen=True)
class Verdict:
    """What became of a defect, or of a set of tests without one (``room`` is empty)."""

    room: str
    name: str
    caught: bool
    by: str  # the first test that failed, or why there is none
    seconds: float


RUNNING: set[subprocess.Popen[bytes]] = set()
"""Tests under way: they end with this program."""


class Copy:
    """A copy of the working tree, in which defects come and go. Programs that its tests start import it, too."""

    def __init__(self, folder: Path):
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
        for path in (ROOT / name for name in listed.split("\0") if name):
            if path.is_symlink() or path.is_file():  # else it is deleted, and that not committed yet
                place = folder / path.relative_to(ROOT)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, place, follow_symlinks=False)
        self.environment = os.environ | {"PYTHONPATH": str(folder)}
        self._check()

    def _check(self) -> None:
        """An editable installation of the original must not be what tests import."""
        words = "import launcher, trainer, tests; print(launcher.__file__, trainer.__file__, tests.__path__[0])"
        found = subprocess.run(
            [sys.executable, "-c", words], cwd="/", env=self.environment, check=True, capture_output=True, text=True
        ).stdout
        assert all(Path(path).is_relative_to(self.folder) for path in found.split()), f"tests would import {found}"

    def write(self, file: str, text: str) -> None:
        """Replace a source. Its compiled form goes: it is told from another one by size and second alone."""
        path = self.folder / file
        path.write_text(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def run(self, tests: str, log: Path) -> tuple[int | None, str]:
        """pytest's exit code (None: ended from here), and the first test that failed."""
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-rfE",
            "-p",
            "no:cacheprovider",
            "--as-drawn",
            f"--timeout={TEST_SECONDS}",
            *shlex.split(tests),
        ]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            RUNNING.add(process)
            try:
                code: int | None = process.wait(SET_SECONDS)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
                RUNNING.discard(process)
        found = CAUGHT.search(log.read_text(errors="replace"))
        return code, found[1] if found else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a run: tests that fail may leave programs behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def judge(copy: Copy, room: str, defect: Defect, log: Path, known: str | None) -> Verdict:
    """Plant a defect, run the test that is known to catch it, all its tests if that one passes or is gone, and take it out again."""
    begin, source = time.monotonic(), (copy.folder / defect.file).read_text()
    copy.write(defect.file, defect.applied(source))
    try:
        code, first = copy.run(shlex.quote(known), log) if known else (None, "")
        if code != FAILED:
            code, first = copy.run(defect.tests, log)
    finally:
        copy.write(defect.file, source)
    return Verdict(room, defect.name, code == FAILED, first or _why(code), round(time.monotonic() - begin, 1))


def sound(copy: Copy, tests: str, log: Path) -> Verdict:
    """Run a set of tests without a defect: ``caught`` if one fails, which spoils the set."""
    begin = time.monotonic()
    code, first = copy.run(tests, log)
    return Verdict("", tests, code != 0, first or _why(code), round(time.monotonic() - begin, 1))


class Record:
    """The test that caught each defect last, by room and name."""

    def __init__(self, path: Path = RECORD):
        self.path = path
        self.known: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.exists() else {}
        self.lock = threading.Lock()

    def of(self, room: str, defect: Defect) -> str | None:
        return self.known.get(room, {}).get(defect.name)

    def add(self, verdict: Verdict) -> None:
        """Written at once: a run of hours may be ended."""
        with self.lock:
            if verdict.caught:
                self.known.setdefault(verdict.room, {})[verdict.name] = verdict.by
            else:
                self.known.get(verdict.room, {}).pop(verdict.name, None)
            self.path.write_text(json.dumps(self.known, indent=1, sort_keys=True) + "\n")

    def keep(self, every: Mapping[str, Sequence[Defect]]) -> None:
        """Forgets defects that are listed no more."""
        names = {room: {defect.name for defect in defects} for room, defects in every.items()}
        self.known = {
            room: {name: test for name, test in found.items() if name in names[room]} for room, found in self.known.items() if room in names
        }


def _why(code: int | None) -> str:
    return {None: f"tests were ended after {SET_SECONDS} s", 0: "all tests passed"}.get(code, f"pytest ended with code {code}")


def run_all(chosen: Sequence[tuple[str, Defect]], jobs: int, logs: Path, trust: bool, record: Record) -> list[Verdict]:
    """Every test set without a defect, then every defect, ``jobs`` at a time."""
    work: queue.SimpleQueue[tuple[str, Defect | None, str]] = queue.SimpleQueue()
    sets = [] if trust else dict.fromkeys(defect.tests for _, defect in chosen)
    for tests in sets:
        work.put(("", None, tests))
    for room, defect in chosen:
        work.put((room, defect, defect.tests))
    verdicts: list[Verdict] = []
    failures: list[BaseException] = []

    def worker(number: int) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="planted-", ignore_cleanup_errors=True) as folder:
                copy = Copy(Path(folder).resolve())
                while not failures:
                    try:
                        room, defect, tests = work.get_nowait()
                    except queue.Empty:
                        return
                    log = logs / f"{len(verdicts):03}-{number}.log"
                    if defect is None:
                        verdict = sound(copy, tests, log)
                    else:
                        verdict = judge(copy, room, defect, log, record.of(room, defect))
                        record.add(verdict)
                    verdicts.append(verdict)
                    print(_line(verdict), flush=True)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(jobs)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt as request:
        failures.append(request)
        for process in [*RUNNING]:
            _end(process)
        raise
    if failures:
        raise failures[0]
    return verdicts


def _line(verdict: Verdict) -> str:
    if not verdict.room:
        word = "FAILS " if verdict.caught else "sound "
        return f"{word}  {verdict.seconds:6.1f} s  {verdict.name}" + (f": {verdict.by}" if verdict.caught else "")
    return f"{'caught' if verdict.caught else 'ESCAPED'}  {verdict.seconds:6.1f} s  {verdict.room}: {verdict.name}  <- {verdict.by}"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every chosen defect is caught by tests that pass without it."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description="See the gate's tests catch planted defects.")
    parser.add_argument("--room", action="append", help="only the defects of this room; may be repeated")
    parser.add_argument("--name", action="append", help="only defects whose name contains this; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="copies of the sources that are worked on at once")
    parser.add_argument("--list", action="store_true", help="only list what would be planted")
    parser.add_argument("--json", type=Path, help="write the verdicts to this file")
    parser.add_argument("--logs", type=Path, help="keep what pytest says in this folder")
    parser.add_argument("--trust", action="store_true", help="leave out the runs without a defect: they passed a moment ago")
    options = parser.parse_args(arguments)
    chosen = [
        (room, defect)
        for room, defects in rooms().items()
        for defect in defects
        if (not options.room or room in options.room) and (not options.name or any(part in defect.name for part in options.name))
    ]
    if options.list:
        for room, defect in chosen:
            print(f"{room}: {defect.name}  ({defect.file}; {defect.tests})")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        try:
            record = Record()
            record.keep(rooms())
            verdicts = run_all(chosen, max(1, options.jobs), logs, options.trust, record)
        except KeyboardInterrupt:
            return 130
    spoilt = [verdict for verdict in verdicts if not verdict.room and verdict.caught]
    judged = [verdict for verdict in verdicts if verdict.room]
    escaped = [verdict for verdict in judged if not verdict.caught]
    print(f"{len(judged) - len(escaped)} of {len(judged)} caught" + (f"; {len(spoilt)} sets of tests fail without any" if spoilt else ""))
    for verdict in [*spoilt, *escaped]:
        print(_line(verdict))
    if options.json:
        options.json.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))
    return int(bool(spoilt or escaped or not judged))


if __name__ == "__main__":
    sys.exit(main())
