"""Trials that need others: each starts when what it needs is done, and never when that failed."""

from __future__ import annotations

import dataclasses
import threading
import time

from launcher.backends.pool import Backends
from launcher.config.schema import SweepConfig
from launcher.sweep.run import run_sweep
from launcher.trials.job import JobState
from launcher.trials.store import Record
from tests.sweep.support import Place, points, starts, trial, until
from trainer.spec import Reason, Status


def chain(place: Place, chains: bool) -> tuple[threading.Thread, list[Record], list[str]]:
    """Two trials, the second after the first: the launcher's thread, what it will return, and the names of their first jobs."""
    place.queue.chains = chains
    first, second = points(trial(seed=1), trial(seed=2))
    line, records = [first, dataclasses.replace(second, needs=(first.trial,))], list[Record]()

    def launcher() -> None:
        with Backends(place.backend) as backends:
            records.extend(run_sweep("demo", line, SweepConfig(dir=str(place.runs)), backends))

    thread = threading.Thread(target=launcher)
    thread.start()
    return thread, records, [f"trireme-{point.trial}-0" for point in line]


def test_a_trial_waits_for_what_it_needs_where_no_queue_does(place: Place) -> None:
    thread, records, names = chain(place, chains=False)
    until(lambda: list(place.queue.queued()) == names[:1])
    time.sleep(0.3)
    assert list(place.queue.queued()) == names[:1]
    place.queue.play()
    until(lambda: list(place.queue.queued()) == names[1:])
    place.queue.play()
    thread.join()
    assert [(r.status, starts(r)) for r in records] == [(Status.DONE, [0]), (Status.DONE, [0])]


def test_what_waits_in_a_queue_for_a_trial_that_is_tried_again_is_submitted_again(place: Place) -> None:
    thread, records, names = chain(place, chains=True)
    until(lambda: set(place.queue.queued()) == set(names))
    place.queue.end(names[1], JobState(Status.FAILED, Reason.UPSTREAM))
    place.queue.end(names[0], JobState(Status.FAILED, Reason.NODE, "n1 is gone"))
    until(lambda: len(place.queue.queued()) == 2)
    place.queue.play()
    thread.join()
    assert [(r.status, r.attempt, starts(r)) for r in records] == [(Status.DONE, 1, [1]), (Status.DONE, 1, [1])]


def test_what_needs_a_trial_that_failed_is_never_started(place: Place) -> None:
    thread, records, names = chain(place, chains=True)
    until(lambda: set(place.queue.queued()) == set(names))
    place.queue.end(names[0], JobState(Status.FAILED, Reason.ERROR, "it crashed"))
    thread.join()
    assert [(r.status, r.reason, starts(r)) for r in records] == [
        (Status.FAILED, Reason.ERROR, []),
        (Status.FAILED, Reason.UPSTREAM, []),
    ]
