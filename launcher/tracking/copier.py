"""The process that copies the sweeps of a folder into MLflow: ``python -m launcher.tracking.copier --dir runs``.

It copies the sweeps in ``unmirrored``. One copier works per folder, the others wait. Its standard input closes with the launcher that
started it. Until then trials may be timed on this machine, so it uses idle processor time alone; an unprivileged process cannot raise its
priority again, so a child does this. Once the input closes, the child copies the rest, however long it takes: nobody waits. The child has
imported MLflow already; only if it is starved is it ended and replaced at normal priority.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import psutil

from launcher.config.packages import missing
from launcher.tracking import unmirrored
from launcher.tracking.loggers import SweepLogger, open_logger
from launcher.tracking.mirror import MlflowSweep, attempt, tracking_of
from launcher.trials.lock import Locks
from launcher.trials.store import Store, Sweep
from trainer.shared.records.outcome import Status

log = logging.getLogger("copier")

LOOK_S = 1.0
"""Between looks for news."""
LONGEST_PAUSE_S = 60.0
"""Between attempts while a tracking store fails."""
GIVE_UP_S = 1800.0
"""Seconds for which a failing store is retried after the launcher has ended. The next command starts another copier."""
TURN_S, SHARE = 0.5, 0.25
"""A child that wants to run and gets less than this share of that time hardly gets a processor."""


class Copier:
    """Copies changed sweeps, while it holds the folder's lock."""

    def __init__(self, root: Path):
        self._root, self._store = root, Store(root)
        self._locks = Locks(root / "copier.lock")
        self._mirrors: dict[str, MlflowSweep] = {}
        self._pauses: dict[str, float] = {}  # of sweeps that could not be copied
        self._loggers: dict[tuple[str, str], SweepLogger] = {}  # by sweep and name
        self._mlflow = missing("mlflow") is None
        self._due: dict[str, float] = {}  # when they are tried again, monotonic

    def follow(self, life: int) -> bool:
        """Copies changes until ``life`` closes, then the rest, as ``finish`` does."""
        parent = os.getppid()
        while os.getppid() == parent:
            if unmirrored.names(self._root) and self._locks.take("copier"):
                self.look()
            if ended(life, LOOK_S):
                return self.finish()
        return False

    def finish(self) -> bool:
        """Copies until nothing is left, or leaves it to the working copier. False if a store fails for ``GIVE_UP_S``; exits within twice
        that."""
        end = time.monotonic() + GIVE_UP_S
        while unmirrored.names(self._root):
            if not self._locks.take("copier"):
                return True
            while unmirrored.names(self._root):
                with _ended_at(end) if self._due else nullcontext():
                    copied = self.look()
                if not copied and time.monotonic() > end:
                    return False
                time.sleep(LOOK_S if self._due else 0)
            self._locks.free("copier")  # and look again: whoever found it locked has left its sweep to us
        return True

    def look(self) -> bool:
        """Copies every sweep that has news and is due. False when there was trouble with one."""
        for name in unmirrored.names(self._root):
            if time.monotonic() >= self._due.get(name, 0.0):
                self._copy(name)
        return not self._due

    def _copy(self, name: str) -> None:
        unmirrored.take(self._root, name)
        mirror = self._mirrors.setdefault(name, MlflowSweep(self._root, name))
        # A command that was refused may have left a plan, or nothing: there is nothing to see of it.
        sweep = self._store.sweep(name) if name in self._store.names() else None
        copies: list[Callable[[], None]] = []
        if sweep is not None and any(record.status not in (Status.PLANNED, Status.PRUNED) for record in sweep.records):
            copies += [mirror.update] if self._mlflow else []
            copies += [partial(self._log, sweep, logger) for logger in tracking_of(sweep).loggers]
        trouble = "; ".join(filter(None, [attempt(update) for update in copies]))
        if not gc.get_freeze_count():
            gc.freeze()  # MLflow's modules are not garbage, and are not looked through again
        if not trouble:
            self._due.pop(name, None)
            self._pauses.pop(name, None)
            unmirrored.forget(self._root, name)
            return
        if trouble != unmirrored.trouble(self._root, name):
            log.warning("%s is not copied: %s", name, trouble)
            unmirrored.complain(self._root, name, trouble)
        self._pauses[name] = min(2 * self._pauses.get(name, LOOK_S / 2), LONGEST_PAUSE_S)
        self._due[name] = time.monotonic() + self._pauses[name]

    def _log(self, sweep: Sweep, logger: str) -> None:
        """Brings a further logger of a sweep up to date."""
        if (sweep.name, logger) not in self._loggers:
            self._loggers[sweep.name, logger] = open_logger(logger, self._root, sweep.name)
        self._loggers[sweep.name, logger].update(sweep)


@contextmanager
def _ended_at(end: float) -> Iterator[None]:
    """Exits with code 1 if still inside at ``end``, monotonic: copied data is noted, and the next copier goes on."""
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    signal.setitimer(signal.ITIMER_REAL, max(LOOK_S, end - time.monotonic()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main(argv: list[str]) -> int:
    """0 when everything was copied, or another copier does it; 1 when a tracking store failed until the end."""
    parser = argparse.ArgumentParser("python -m launcher.tracking.copier", description="Copy the sweeps of a folder into MLflow.")
    parser.add_argument("--dir", default="runs")
    root = Path(parser.parse_args(argv).dir).absolute()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # each retry would be a page
    life = sys.stdin.fileno()
    if not ended(life, 0):
        child = follow_in_child(root, life)
        while not ended(life, None):
            continue
        if (code := finish_in_child(child)) in (0, 1):
            return code
    return 0 if not unmirrored.names(root) or Copier(root).finish() else 1


def follow_in_child(root: Path, life: int) -> int:
    """A process that copies at the lowest priority, and may be killed at any moment. It ends with 0 or 1, as ``main`` does."""
    child = os.fork()
    if child == 0:
        stand_back()
        os._exit(0 if Copier(root).follow(life) else 1)
    return child


def finish_in_child(child: int) -> int:
    """Returns how the child ended. A child that wanted to run at both ends of a turn, but was starved for most of it, is killed."""
    process, wanted, before = psutil.Process(child), False, 0.0
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0):
        used, wants = sum(process.cpu_times()[:2]), process.status() == psutil.STATUS_RUNNING
        if wanted and wants and used - before < SHARE * TURN_S:
            process.kill()
            found = os.waitpid(child, 0)
            break
        wanted, before = wants, used
        time.sleep(TURN_S)
    return os.waitstatus_to_exitcode(found[1])


def ended(life: int, patience_s: float | None) -> bool:
    """Returns whether the other end of ``life`` is closed. Waits up to ``patience_s``, or until a word comes."""
    readable, _, _ = select.select([life], [], [], patience_s)
    return bool(readable) and not os.read(life, 65536)


def stand_back() -> None:
    """Runs only when a processor would be idle: the trials that share the machine are being timed."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # taking MLflow's modules apart costs time and serves nobody
