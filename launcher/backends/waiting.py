"""Waiting for a place that does not answer, in a way that ends at once when nobody waits any more. Flags are plain values that are looked
at, no events: a signal handler sets them, and must take no lock."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from launcher.backends.contract import BackendError

T = TypeVar("T")
R = TypeVar("R")

_LOOK_SECONDS = 0.1
"""Seconds between looks at a flag."""
_GRACE_SECONDS = 5.0
"""Seconds for unfinished work after it has been given up."""


def pause_unless(given_up: Callable[[], bool], seconds: float) -> None:
    """Waits for ``seconds``, or until ``given_up``."""
    deadline = time.monotonic() + seconds
    while not given_up() and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, _LOOK_SECONDS))


def concurrently(do: Callable[[T], R], items: Sequence[T], threads: int, given_up: Callable[[], bool]) -> list[R]:
    """Returns ``[do(item) for item in items]``, ``threads`` at a time, or raises the first error. Once ``given_up``, nothing more is begun
    and slow items are abandoned: ``BackendError``."""
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(items)):
        left.put(number)
    done: dict[int, R] = {}
    errors: list[Exception] = []

    def work() -> None:
        while not given_up():
            try:
                number = left.get_nowait()
                done[number] = do(items[number])
            except queue.Empty:
                return
            except Exception as error:
                errors.append(error)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(threads, len(items)))]
    for worker in workers:
        worker.start()
    _await_all(workers, given_up)
    if errors:
        raise errors[0]
    if len(done) < len(items):
        raise BackendError("interrupted while jobs were being submitted; submitted jobs continue")
    return [done[number] for number in range(len(items))]


def _await_all(workers: Sequence[threading.Thread], given_up: Callable[[], bool]) -> None:
    """Returns when all have ended, or a while after they were given up."""
    deadline: float | None = None
    for worker in workers:
        while worker.is_alive() and (deadline is None or time.monotonic() < deadline):
            worker.join(_LOOK_SECONDS)
            if deadline is None and given_up():
                deadline = time.monotonic() + _GRACE_SECONDS
