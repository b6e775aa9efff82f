"""One backend for each cluster configuration, wherever a command asks for it."""

from __future__ import annotations

from launcher.backends.contract import Backend
from launcher.backends.kubernetes.cluster import KubernetesCluster
from launcher.backends.pool import Backends
from launcher.config.schema import ClusterConfig, LocalCluster
from tests.sweep.support import PlayedQueue


class Made:
    """Backends that note what befalls them."""

    def __init__(self) -> None:
        self.made: list[ClusterConfig] = []
        self.checked: list[ClusterConfig] = []
        self.closed: list[ClusterConfig] = []

    def __call__(self, cluster: ClusterConfig) -> Backend:
        self.made.append(cluster)
        noted = self

        class Noting(PlayedQueue):
            def __init__(self) -> None:
                self.cluster = cluster

            def check(self) -> None:
                noted.checked.append(cluster)

            def close(self) -> None:
                noted.closed.append(cluster)

        return Noting()


def test_places_that_differ_have_a_backend_each_and_sizes_of_trials_share_one() -> None:
    made = Made()
    places = [
        KubernetesCluster(backend="kubernetes", context="one"),
        KubernetesCluster(backend="kubernetes", context="two"),
        KubernetesCluster(backend="kubernetes", context="two", namespace="other"),
        KubernetesCluster(backend="kubernetes", context="two", workload="pods"),
    ]
    with Backends(made) as backends:
        assert len({id(backends.of(place)) for place in places}) == 4
        assert backends.of(LocalCluster(nodes=2)) is backends.of(LocalCluster(nodes=1, gpus_per_node=2))
        for place in [places[0], *places]:
            backends.checked(place)
        assert made.checked == places
        assert not made.closed
    assert sorted(map(id, made.closed)) == sorted(map(id, made.made))
