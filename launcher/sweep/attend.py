"""Trials that no launcher follows: bring their records up to date, and stop them. For ``trireme status`` and ``cancel``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from launcher.backends import backend_for
from launcher.backends.base import Backend
from launcher.config.clusters import cluster_from_dict
from launcher.config.schema import ClusterConfig, SweepConfig
from launcher.sweep.lock import Locks
from launcher.sweep.loop import Flight, Loop
from launcher.sweep.run import launcher_name
from launcher.sweep.store import Record, Store
from trainer.config import Status

BackendFor = Callable[[ClusterConfig], Backend]


def catch_up(store: Store, records: Sequence[Record], backends: BackendFor = backend_for) -> None:
    """Ask the backends once about trials that are under way although their launcher has gone, and record what became of them.

    Those that a launcher follows are left to it. Nothing is submitted.
    """
    under_way = [record for record in records if record.status in (Status.SUBMITTED, Status.RUNNING)]
    with _attending(store, under_way, backends) as (loop, flights):
        loop.catch_up(flights)


def stop(store: Store, records: Sequence[Record], backends: BackendFor = backend_for) -> list[Record]:
    """Stop the trials that have not ended. Those that a launcher runs are left to it, with a mark, and returned."""
    unended = [record for record in records if not record.status.final]
    for record in unended:
        store.ask_to_stop(record)
    with _attending(store, unended, backends) as (loop, flights):
        return loop.end(flights)


@contextmanager
def _attending(store: Store, records: Sequence[Record], backends: BackendFor) -> Iterator[tuple[Loop, list[Flight]]]:
    """A loop, and ``records`` as its flights."""
    locks = Locks(store.root / "locks")
    places: dict[str, Backend] = {}
    try:
        flights = []
        for record in records:
            cluster = cluster_from_dict(record.cluster)
            backend = places.get(cluster.backend) or places.setdefault(cluster.backend, backends(cluster))
            flights.append(Flight(record, cluster, backend))
        yield Loop(store, locks, SweepConfig(), "attend", launcher_name()), flights
    finally:
        for backend in places.values():
            backend.close()
        locks.close()
