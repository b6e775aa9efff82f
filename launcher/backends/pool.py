"""The backends that one command uses: one per cluster configuration, however many trials, rounds of a search or verbs ask for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import TracebackType

from launcher.backends import backend_for
from launcher.backends.contract import Backend
from launcher.config.schema import ClusterConfig
from launcher.trials.job import Job
from trainer.shared.run.read import to_dict

_OF_A_TRIAL = ("nodes", "gpus_per_node", "hardware", "start_timeout", "avoid_s", "linger_s")
"""Keys that say how large a trial is and how patient the sweep is with it, not where it runs."""


class Backends:
    """Opens backends when first used, and closes all together. Clusters that differ only in a trial's size share one, which keeps the first
    configuration: ask for the largest first."""

    def __init__(self, make: Callable[[ClusterConfig], Backend] = backend_for):
        self._make = make
        self._open: dict[str, Backend] = {}
        self._checked: set[str] = set()
        self._remarked: set[str] = set()
        self._keys: dict[int, tuple[ClusterConfig, str]] = {}  # by identity: the jobs of a sweep share few objects

    def of(self, cluster: ClusterConfig) -> Backend:
        """The backend of ``cluster``. ``ConfigError`` when a package that it needs is not installed."""
        key = self._key(cluster)
        if key not in self._open:
            self._open[key] = self._make(cluster)
        return self._open[key]

    def checked(self, cluster: ClusterConfig) -> Backend:
        """Returns the backend, checked once before use. Raises ``ConfigError`` if the cluster cannot be used at all."""
        backend = self.of(cluster)
        if self._key(cluster) not in self._checked:
            backend.check()
            self._checked.add(self._key(cluster))
        return backend

    def remarks(self, cluster: ClusterConfig, jobs: Sequence[Job]) -> list[str]:
        """Returns advice on ``jobs`` that was not given before: a search submits its trials one by one."""
        fresh = [remark for remark in self.of(cluster).remarks(jobs) if remark not in self._remarked]
        self._remarked.update(fresh)
        return fresh

    def hurry(self) -> None:
        """Lets none of them wait for a place that does not answer."""
        for backend in list(self._open.values()):
            backend.hurry()

    def _key(self, cluster: ClusterConfig) -> str:
        known = self._keys.get(id(cluster))
        if known is None or known[0] is not cluster:
            content = {name: value for name, value in to_dict(cluster).items() if name not in _OF_A_TRIAL}
            known = self._keys[id(cluster)] = cluster, json.dumps(content, sort_keys=True)
        return known[1]

    def __enter__(self) -> Backends:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._open:
            self._open.popitem()[1].close()
