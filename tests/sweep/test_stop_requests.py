"""A request to stop ends a trial wherever it stands, also one that waits for its turn."""

from __future__ import annotations

from tests.sweep.support import Place, starts, until
from trainer.shared.records.outcome import Reason, Status


def test_a_trial_that_waits_for_its_turn_is_stopped_when_asked(place: Place) -> None:
    thread, records = place.begin(1, 2, 3, max_parallel=1)
    until(lambda: len(place.queue.queued()) == 1)
    waiting = place.store.sweep("demo").records[1]
    place.store.ask_to_stop(waiting)
    until(lambda: place.store.load(waiting.id).status is Status.STOPPED)
    while thread.is_alive():
        place.queue.play()
        thread.join(0.05)
    told = [(record.status, record.reason, len(starts(record))) for record in records]
    assert told == [(Status.DONE, None, 1), (Status.STOPPED, Reason.CANCELLED, 0), (Status.DONE, None, 1)]
