"""Trials that no launcher follows: bring their records up to date, and stop them. For ``trireme status`` and ``cancel``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from launcher.backends.pool import Backends
from launcher.config.clusters import cluster_from_dict
from launcher.config.schema import SweepConfig
from launcher.sweep.lock import Locks
from launcher.sweep.loop import Flight, Loop
from launcher.sweep.run import launcher_name
from launcher.sweep.store import Record, Store
from trainer.config import Status


def catch_up(store: Store, records: Sequence[Record], backends: Backends) -> None:
    """Ask the backends once about trials that are under way although their launcher has gone, and record what became of them.

    Those that a launcher follows are left to it. Nothing is submitted.
    """
    under_way = [record for record in records if record.status in (Status.SUBMITTED, Status.RUNNING)]
    with _attending(store, under_way, backends) as (loop, flights):
        loop.catch_up(flights)


def stop(store: Store, records: Sequence[Record], backends: Backends) -> list[Record]:
    """Stop the trials that have not ended. Those that a launcher runs are left to it, with a mark, and returned."""
    unended = [record for record in records if not record.status.final]
    for record in unended:
        store.ask_to_stop(record)
    with _attending(store, unended, backends) as (loop, flights):
        return loop.end(flights)


@contextmanager
def _attending(store: Store, records: Sequence[Record], backends: Backends) -> Iterator[tuple[Loop, list[Flight]]]:
    """A loop, and ``records`` as its flights."""
    locks = Locks(store.root / "locks")
    try:
        clusters = [cluster_from_dict(record.cluster) for record in records]
        flights = [Flight(record, cluster, backends.of(cluster)) for record, cluster in zip(records, clusters)]
        yield Loop(store, locks, SweepConfig(), "attend", launcher_name()), flights
    finally:
        locks.close()
