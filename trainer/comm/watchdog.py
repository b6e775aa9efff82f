"""Reports the collective on which a job is stuck.

A collective of NCCL that cannot complete raises nothing: the host goes on, and waits forever at the next value that it reads. So a thread
of every rank checks the started collectives. When one exceeds the run's time limit, the rank announces it in the shared store. Each rank
then writes its position before anything is torn down: a rank that waits in a collective names it; one that waits in none is the cause; a
silent one is named by the others.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from trainer.launch.failure import RECORDING, CommunicationError, Hung

PERIOD_S = 1.0
"""Between two looks of a rank, each of which costs the store three requests."""
SILENCE_S = 15.0
"""A rank whose watchdog has said nothing for so long is dead: the thread needs a moment of one core per second."""
LEAVING_S = 10.0
"""Ranks wait so long for each other before they leave."""
STORE_S = 30.0
"""Seconds for one request to the store."""


@dataclass(frozen=True)
class InFlightCollective:
    """A collective that was started. ``over()`` never waits."""

    collective: str
    ranks: tuple[int, ...]
    since: float
    over: Callable[[], bool]


class InFlightCollectives:
    """The collectives of a rank that may not be complete. One thread adds, another one looks."""

    def __init__(self) -> None:
        self._started: deque[InFlightCollective] = deque()

    def add(self, collective: str, ranks: tuple[int, ...], over: Callable[[], bool]) -> None:
        self._started.append(InFlightCollective(collective, ranks, time.monotonic(), over))

    def oldest(self) -> InFlightCollective | None:
        """The first of them that is not complete; complete ones before it are forgotten."""
        while self._started and self._started[0].over():
            self._started.popleft()
        return self._started[0] if self._started else None


class Watchdog:
    """Watches rank ``rank`` of ``size`` until ``close``. ``record`` writes the final error and gives the exit code. ``hears_death``: a lost
    peer makes collectives raise, as with gloo; otherwise (NCCL) only its silence tells."""

    def __init__(
        self,
        rank: int,
        size: int,
        store: tuple[str, int],
        limit_s: float,
        hears_death: bool,
        in_flight: InFlightCollectives,
        record: Callable[[Exception], int],
    ):
        self.rank, self.size, self.address, self.limit_s, self.hears_death = rank, size, store, limit_s, hears_death
        self.in_flight, self.record = in_flight, record
        self.main, self.closed = threading.main_thread().ident, threading.Event()
        self.beats, self.heard, self.heard_at = 0, "", time.monotonic()
        self.thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """The rank needs no one any more. Later silence of this rank means nothing."""
        self.closed.set()
        self.thread.join(2 * PERIOD_S)

    def _run(self) -> None:
        try:
            address, port = self.address
            store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=STORE_S))
            while not self.closed.wait(PERIOD_S):
                self.beats += 1
                store.set(f"beat {self.rank}", str(self.beats))
                if trouble := self._trouble(store):
                    with RECORDING:  # from here on an error of the main thread is a consequence
                        self._end(store, self._told(store, trouble))
            store.set(f"beat {self.rank}", "closed")
        except (dist.DistError, RuntimeError) as error:
            self._store_is_gone(error)

    def _trouble(self, store: dist.TCPStore) -> str:
        late, found = self.in_flight.oldest(), ""
        if late is not None and time.monotonic() - late.since > self.limit_s:
            found = f"{late.collective} (ranks {', '.join(map(str, late.ranks))}) has not completed within {self.limit_s:g} s"
        elif not self.hears_death and self._silent(store):
            found = f"rank {self._next} has said nothing for {SILENCE_S:g} s"
        if found:
            store.set("trouble", found)
        return store.get("trouble").decode() if found or store.check(["trouble"]) else ""

    @property
    def _next(self) -> int:
        return (self.rank + 1) % self.size

    def _silent(self, store: dist.TCPStore) -> bool:
        """Returns whether the next rank's watchdog stopped in silence, or never began: all begin when all ranks have met."""
        said = self._beats(store, (self._next,))[self._next]
        if said != self.heard:
            self.heard, self.heard_at = said, time.monotonic()
        return said != "closed" and time.monotonic() - self.heard_at > SILENCE_S

    def _told(self, store: dist.TCPStore, trouble: str) -> Exception:
        late = self.in_flight.oldest()
        silent = self._silent_ranks(store, late.ranks if late else ())  # all ranks take the same time for it, and so leave together
        if late is None:
            return Hung(f"{trouble}; rank {self.rank} waits in no collective: it was at {self._place()}")
        message = trouble if not silent else f"{trouble}; no answer from rank {', '.join(map(str, silent))}"
        return CommunicationError(f"rank {self.rank}: in {late.collective}: {message}", late.collective)

    def _end(self, store: dist.TCPStore, error: Exception) -> None:
        """Lets rank 0 leave last, when all have written their positions: it derives the cause from them, and the store ends with it."""
        until = time.monotonic() + LEAVING_S
        if self.rank != 0:
            self._leave(error, lambda: self._say(store, "told") and time.monotonic() < until)
        while time.monotonic() < until and not all(store.check([f"told {rank}"]) for rank in range(1, self.size)):
            time.sleep(PERIOD_S / 4)
        self._leave(error)

    def _say(self, store: dist.TCPStore, what: str) -> bool:
        """Tells the other ranks; an error if rank 0 is gone."""
        store.set(f"{what} {self.rank}", "")
        return True

    def _leave(self, error: Exception, stay: Callable[[], bool] = lambda: False) -> None:
        """Writes why, and ends the process: the main thread waits in vain."""
        code = self.record(error)
        with contextlib.suppress(dist.DistError, RuntimeError):
            while stay():
                time.sleep(PERIOD_S / 4)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _silent_ranks(self, store: dist.TCPStore, ranks: tuple[int, ...]) -> list[int]:
        """Returns those of ``ranks`` whose watchdogs are idle for a while. Ranks that know of the trouble say "closed" first."""
        store.set(f"beat {self.rank}", "closed")
        before = self._beats(store, ranks)
        time.sleep(3 * PERIOD_S)
        return [rank for rank, said in self._beats(store, ranks).items() if said == before[rank] != "closed"]

    @staticmethod
    def _beats(store: dist.TCPStore, ranks: tuple[int, ...]) -> dict[int, str]:
        return {rank: store.get(f"beat {rank}").decode() if store.check([f"beat {rank}"]) else "" for rank in ranks}

    def _place(self) -> str:
        """Returns the main thread's position: the innermost line of this program, and the innermost of all."""
        frame = sys._current_frames().get(self.main or 0)
        lines = traceback.extract_stack(frame) if frame else []
        own = [line for line in lines if f"{os.sep}trainer{os.sep}" in line.filename]
        told = lines[-1:] + [line for line in own[-1:] if line is not lines[-1]]
        return " in ".join(f"{line.name} ({os.path.basename(line.filename)}:{line.lineno})" for line in told)

    def _store_is_gone(self, error: Exception) -> None:
        """The store ends with rank 0. At the end of a run that does no harm: this rank is about to close, too."""
        if self.closed.wait(SILENCE_S) or self.hears_death:
            return
        late = self.in_flight.oldest()
        what = "rendezvous" if late is None else late.collective
        self._leave(CommunicationError(f"rank {self.rank}: in {what}: rank 0 does not answer: {str(error).splitlines()[0]}", what))
