"""The process that copies the sweeps of a folder into MLflow: ``python -m launcher.tracking.copier --dir runs``.

It copies what ``unmirrored`` names, whoever changed it. Of all that run in one folder one works, the others wait in line. Standard
input is the life of the launcher that started it. While that lives, trials may be timed on this machine, and only processor time that
nobody else wants is taken; an ordinary user's process cannot come back from that, so a child does it. Once the input ends, the child
copies what is left, however long it takes: nobody waits for it. It has imported MLflow, and has read what is there; only where it hardly
gets a processor it is ended, and all that is done again at the usual priority.
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
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import psutil

from launcher.tracking import unmirrored
from launcher.tracking.mirror import MlflowSweep, attempt
from launcher.trials.lock import Locks
from launcher.trials.store import Store
from trainer.shared.records.outcome import Status

log = logging.getLogger("copier")

LOOK_S = 1.0
"""Between looks for news."""
LONGEST_PAUSE_S = 60.0
"""Between attempts while a tracking store fails."""
GIVE_UP_S = 1800.0
"""How long a store that fails is asked again after the launcher has ended. The next command starts another copier."""
TURN_S, SHARE = 0.5, 0.25
"""A child that wants to run and gets less than this share of that time hardly gets a processor."""


class Copier:
    """Copies what has news, as long as it holds the folder's lock."""

    def __init__(self, root: Path):
        self._root, self._store = root, Store(root)
        self._locks = Locks(root / "copier.lock")
        self._mirrors: dict[str, MlflowSweep] = {}
        self._pauses: dict[str, float] = {}  # of sweeps that could not be copied
        self._due: dict[str, float] = {}  # when they are tried again, monotonic

    def follow(self, life: int) -> bool:
        """Copy what comes until there is no more to read from ``life``, then the rest, as ``finish`` does."""
        parent = os.getppid()
        while os.getppid() == parent:
            if unmirrored.names(self._root) and self._locks.take("copier"):
                self.look()
            if ended(life, LOOK_S):
                return self.finish()
        return False

    def finish(self) -> bool:
        """Copy until nothing is left, or leave it to the copier that is at work. False when a store fails for ``GIVE_UP_S``; the process
        ends by itself in the middle of another attempt, which may last for as long again."""
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
        """Copy every sweep that has news and is due. False when there was trouble with one."""
        for name in unmirrored.names(self._root):
            if time.monotonic() >= self._due.get(name, 0.0):
                self._copy(name)
        return not self._due

    def _copy(self, name: str) -> None:
        unmirrored.take(self._root, name)
        mirror = self._mirrors.setdefault(name, MlflowSweep(self._root, name))
        # A command that was refused may have left a plan, or nothing: there is nothing to see of it.
        records = self._store.sweep(name).records if name in self._store.names() else []
        trouble = attempt(mirror) if any(record.status not in (Status.PLANNED, Status.PRUNED) for record in records) else ""
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


@contextmanager
def _ended_at(end: float) -> Iterator[None]:
    """This process ends with code 1 if it is still inside at ``end``, monotonic: what is copied by then is noted, and the next goes on."""
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
    """How the child ended. It is killed once it hardly gets a processor: it wanted to run at the beginning and at the end of a turn, and
    could not for most of it."""
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
    """Whether nobody holds the other end of ``life`` any more. Waits for that, for at most ``patience_s``, or until a word comes."""
    readable, _, _ = select.select([life], [], [], patience_s)
    return bool(readable) and not os.read(life, 65536)


def stand_back() -> None:
    """Run only when a processor would be idle: the trials that share the machine are being timed."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # taking MLflow's modules apart costs time and serves nobody
