"""Trials that no launcher follows: bring their records up to date, and stop them. For ``trireme status`` and ``cancel``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from launcher.backends.pool import Backends
from launcher.config.clusters import cluster_from_dict
from launcher.config.schema import SweepConfig
from launcher.sweep.loop import Flight, Loop
from launcher.sweep.run import launcher_name
from launcher.tracking import unmirrored
from launcher.tracking.process import resume
from launcher.trials.lock import Locks
from launcher.trials.store import Record, Store
from trainer.spec import Status


def catch_up(store: Store, records: Sequence[Record], backends: Backends) -> None:
    """Ask the backends once about trials that are under way although their launcher has gone, and record what became of them.

    Those that a launcher follows are left to it. Nothing is submitted, ended or removed: what is left of ended jobs at their places
    is removed by the next command that runs or cancels the trial.
    """
    under_way = [record for record in records if record.status in (Status.SUBMITTED, Status.RUNNING)]
    with _attending(store, under_way, backends, reading=True) as (loop, flights):
        loop.catch_up(flights)


def stop(store: Store, records: Sequence[Record], backends: Backends) -> list[Record]:
    """Stop the trials that have not ended, and remove what is left of those that have at their places.

    Those that a launcher runs are left to it, with a mark, and returned.
    """
    for record in records:
        if not record.status.final:
            store.ask_to_stop(record)
    with _attending(store, [record for record in records if not record.status.final or record.left], backends) as (loop, flights):
        return loop.end(flights)


@contextmanager
def _attending(store: Store, records: Sequence[Record], backends: Backends, reading: bool = False) -> Iterator[tuple[Loop, list[Flight]]]:
    """A loop, and ``records`` as its flights."""
    locks = Locks(store.root / "locks")
    try:
        clusters = [cluster_from_dict(record.cluster) for record in records]
        flights = [Flight(record, cluster, backends.of(cluster)) for record, cluster in zip(records, clusters)]
        yield Loop(store, locks, SweepConfig(), "attend", launcher_name(), [_News(store)], reading=reading), flights
    finally:
        locks.close()
        resume(store.root)


class _News:
    """Has MLflow told of what became of trials that no launcher follows."""

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
