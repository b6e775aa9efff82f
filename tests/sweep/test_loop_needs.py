"""Trials that need others: each starts when what it needs is done, and never when that failed."""

from __future__ import annotations

import dataclasses
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.backends.contract import Request
from launcher.backends.pool import Backends
from launcher.config.schema import SweepConfig
from launcher.sweep.run import run_sweep
from launcher.trials.job import Handle, JobState
from launcher.trials.store import Record
from tests.sweep.support import Place, PlayedQueue, points, starts, trial, until
from trainer.shared.records.outcome import Reason, Status

pytestmark = pytest.mark.slow


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
    place.look()
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


class AtOnce(PlayedQueue):
    """A queue whose jobs end when they are submitted."""

    poll_seconds = 0.0

    def submit(self, requests: Sequence[Request]) -> list[Handle]:
        handles = super().submit(requests)
        self.calls += self.play()
        return handles


@given(st.lists(st.sets(st.integers(0, 11)), min_size=1, max_size=12))
@settings(max_examples=20)
def test_graphs_run_in_the_order_of_their_edges_each_trial_once(edges: list[set[int]]) -> None:
    line = points(*(trial(seed=seed) for seed, _ in enumerate(edges, 1)))
    line = [
        dataclasses.replace(point, needs=tuple(line[n].trial for n in needs if n < at))
        for at, (point, needs) in enumerate(zip(line, edges))
    ]
    with tempfile.TemporaryDirectory() as folder:
        queue = AtOnce(Path(folder) / "queue")
        with Backends(lambda _: queue) as backends:
            records = run_sweep("demo", line, SweepConfig(dir=f"{folder}/runs"), backends)
        assert [(r.status, starts(r)) for r in records] == [(Status.DONE, [0])] * len(line)
    names = [call for call in queue.calls if call.startswith("trireme-")]
    assert sorted(names) == sorted(f"trireme-{point.trial}-0" for point in line)
    for point in line:
        for need in point.needs:
            assert names.index(f"trireme-{need}-0") < names.index(f"trireme-{point.trial}-0")
