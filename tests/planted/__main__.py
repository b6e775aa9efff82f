"""Plant each defect in a copy of the sources, and see the gate's tests of its room fail.

    python -m tests.planted                          all of them: half an hour on two cores
    python -m tests.planted --room state --jobs 2
    python -m tests.planted --name "the norm counts replicas of a shard again"

caught.json beside this file remembers by which test each defect was caught: that one is asked first, and all the others where it passes.
A test that fails without a defect says nothing, so each that is asked runs once without any: those that are remembered before all else,
others when they have caught one. A defect that makes tests hang is caught when one of them fails for it: one that has to be ended from
here has escaped.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
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
from collections.abc import Iterable, Mapping, Sequence
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
    """What became of a defect, or of a test without one (``room`` is empty, ``name`` is the test's)."""

    room: str
    name: str
    caught: bool
    by: str  # the first test that failed, or why there is none
    seconds: float

    @property
    def word(self) -> str:
        """``sound`` and ``spoilt`` are tests without a defect."""
        words = ("caught", "ESCAPED") if self.room else ("spoilt", "sound")
        return words[not self.caught]


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

    def run(self, tests: Sequence[str], log: Path, words: Sequence[str] = ("-x", "-rfE")) -> tuple[int | None, list[str]]:
        """pytest's exit code (None: ended from here), and the tests that failed: the first, unless ``words`` ask for all."""
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--as-drawn", f"--timeout={TEST_SECONDS}", *words, *tests]
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
        return code, CAUGHT.findall(log.read_text(errors="replace"))

    def there(self, tests: Sequence[str], log: Path) -> list[str]:
        """Those of the tests that are collected, in their order: pytest runs none where one is gone."""
        files = dict.fromkeys(file for test in tests if (self.folder / (file := test.partition("::")[0])).exists())
        self.run([*files], log, ["--collect-only"])
        found = set(log.read_text(errors="replace").splitlines())
        return [test for test in tests if test in found]

    def sound(self, tests: Sequence[str], log: Path) -> list[Verdict]:
        """Run tests without a defect: ``caught`` are those that fail."""
        begin = time.monotonic()
        code, failed = self.run(tests, log, ["-rfE"]) if tests else (0, [])
        seconds = round((time.monotonic() - begin) / max(1, len(tests)), 1)
        told = code == 0 or (code == FAILED and bool(failed) and set(failed) <= set(tests))  # else it is not known which have passed
        return [Verdict("", test, not told or test in failed, _why(code), seconds) for test in tests]


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
        code, failed = copy.run([known], log) if known else (None, [])
        if code != FAILED:
            code, failed = copy.run(shlex.split(defect.tests), log)
    finally:
        copy.write(defect.file, source)
    return Verdict(room, defect.name, code == FAILED and bool(failed), (failed or [_why(code)])[0], round(time.monotonic() - begin, 1))


def shared_out(tests: Iterable[str], jobs: int) -> list[list[str]]:
    """Tests without double, in ``jobs`` parts; those of one file stay together: they share what is dear to start."""
    parts: list[list[str]] = [[] for _ in range(jobs)]
    for _, group in itertools.groupby(sorted(set(tests)), key=lambda test: test.partition("::")[0]):
        min(parts, key=len).extend(group)
    return parts


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
    """Every remembered test without a defect, then every defect, ``jobs`` at a time."""
    work: queue.SimpleQueue[tuple[str, Defect]] = queue.SimpleQueue()
    for planted in chosen:
        work.put(planted)
    remembered = shared_out((test for room, defect in chosen if (test := record.of(room, defect))), jobs)
    verdicts: list[Verdict] = []
    failures: list[BaseException] = []
    lock = threading.Lock()

    def tell(*found: Verdict) -> None:
        with lock:
            verdicts.extend(found)
            for verdict in found:
                print(_line(verdict), flush=True)

    def worker(number: int) -> None:
        def log() -> Path:
            return logs / f"{number}-{next(count):03}.log"

        count = itertools.count()
        try:
            with tempfile.TemporaryDirectory(prefix="planted-", ignore_cleanup_errors=True) as folder:
                copy = Copy(Path(folder).resolve())
                mine = copy.there(remembered[number], log())
                if not trust:
                    tell(*copy.sound(mine, log()))
                while not failures:
                    try:
                        room, defect = work.get_nowait()
                    except queue.Empty:
                        return
                    verdict = judge(copy, room, defect, log(), record.of(room, defect))
                    record.add(verdict)
                    tell(verdict)
                    if not trust and verdict.caught and verdict.by not in {one.name for one in [*verdicts]}:
                        tell(*copy.sound([verdict.by], log()))
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
    what = f"{verdict.room}: {verdict.name}  <- {verdict.by}" if verdict.room else verdict.name
    return f"{verdict.word:7}  {verdict.seconds:6.1f} s  {what}"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every chosen defect is caught by tests that pass without it."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description="See the gate's tests catch planted defects.")
    parser.add_argument("--room", action="append", help="only the defects of this room; may be repeated")
    parser.add_argument("--name", action="append", help="only defects whose name contains this; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="copies of the sources that are worked on at once")
    parser.add_argument("--list", action="store_true", help="only list what would be planted")
    parser.add_argument("--json", type=Path, help="write the verdicts to this file")
    parser.add_argument("--logs", type=Path, help="keep what pytest says in this folder")
    parser.add_argument("--trust", action="store_true", help="leave out the runs without a defect: tests passed a moment ago")
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
    print(f"{len(judged) - len(escaped)} of {len(judged)} caught" + (f"; {len(spoilt)} tests fail without any" if spoilt else ""))
    for verdict in [*spoilt, *escaped]:
        print(_line(verdict))
    if options.json:
        options.json.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))
    return int(bool(spoilt or escaped or not judged))


if __name__ == "__main__":
    sys.exit(main())
