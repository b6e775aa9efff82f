"""Kubernetes: the conformance suite on real pods, and what only this backend promises."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launcher.backends import backend_for
from tests.backends.conformance import Conformance, Ground, closing
from tests.clusters.kubernetes.fixture import Kubernetes


@pytest.fixture(scope="module")
def ground(real_node: Kubernetes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """Two ranks in one pod, or one in each of two."""
    with real_node.namespace() as namespace:
        cluster = real_node.cluster(namespace, nodes=2, gpus_per_node=2)
        folder = tmp_path_factory.mktemp("trials")
        unknown = {"namespace": namespace, "name": "trireme-000000000000-0", "pods": 1, "attempt": 0, "directory": str(folder / "none")}
        yield from closing(Ground(lambda: backend_for(cluster), cluster, folder, unknown=unknown))


class TestKubernetes(Conformance):
    pass
