"""Reconcile records with the clusters, for trials that no launcher follows; and stop them. For ``trireme status`` and ``cancel``."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from launcher.backends.pool import Backends
from launcher.config.schema import SweepConfig
from launcher.sweep.active_trial import ActiveTrial
from launcher.sweep.loop import Loop
from launcher.sweep.run import launcher_name
from launcher.tracking import unmirrored
from launcher.tracking.process import resume
from launcher.trials.lock import Locks
from launcher.trials.store import Record, Store, recorded_cluster
from trainer.shared.records.outcome import Status


def catch_up(store: Store, records: Sequence[Record], backends: Backends) -> None:
    """Polls once for trials whose launcher is gone, and records their state. Submits, ends and removes nothing: the next command that runs
    or cancels the trial removes ended objects."""
    under_way = [record for record in records if record.status in (Status.SUBMITTED, Status.RUNNING)]
    if not under_way:  # nothing to lock: the folder may be one that can only be read
        return resume(store.root)
    with _reconciling(store, under_way, backends, reading=True) as (loop, active):
        loop.catch_up(active)


FORGOTTEN = "given up by 'trireme cancel --forget'; what may still run was left alone"


def stop(store: Store, records: Sequence[Record], backends: Backends, patience_s: float = 60.0, forget: bool = False) -> list[Record]:
    """Stops the trials that have not ended, and removes objects of ended ones; with ``forget``, without asking backends. Leaves a stop
    request for, and returns, trials of running launchers. Raises ``BackendError`` after ``patience_s`` of silence."""
    impatience = threading.Timer(patience_s, backends.hurry)
    impatience.daemon = True
    impatience.start()
    try:
        return _stop(store, records, backends, patience_s, forget)
    finally:
        impatience.cancel()


def _stop(store: Store, records: Sequence[Record], backends: Backends, patience_s: float, forget: bool) -> list[Record]:
    for record in records:
        if not record.status.final:
            store.ask_to_stop(record)
    with _reconciling(store, [record for record in records if not record.status.final or record.left], backends) as (loop, active):
        return loop.forget(active, FORGOTTEN) if forget else loop.end(active, patience_s)


@contextmanager
def _reconciling(
    store: Store, records: Sequence[Record], backends: Backends, reading: bool = False
) -> Iterator[tuple[Loop, list[ActiveTrial]]]:
    """A loop, and ``records`` as its trials."""
    locks = Locks(store.root / "locks")
    try:
        clusters = [recorded_cluster(record) for record in records]
        active = [ActiveTrial(record, cluster, backends.of(cluster)) for record, cluster in zip(records, clusters)]
        yield Loop(store, locks, SweepConfig(), "reconcile", launcher_name(), [_News(store)], reading=reading), active
    finally:
        locks.close()
        resume(store.root)


class _News:
    """Marks sweeps whose trials have changed, so that MLflow is told."""

    def __init__(self, store: Store):
        self._store = store

    def begin(self) -> None:
        """Nothing to do."""

    def on_trial(self, record: Record) -> None:
        unmirrored.add(self._store.root, record.sweep)

    def on_poll(self, records: Sequence[Record]) -> None:
        """Nothing: nobody stays to follow steps."""

    def close(self) -> None:
        """Nothing is held."""
