"""One Kubernetes for all tests of a run: the one that KUBECONFIG names, else one of our own, else the tests are skipped and say why."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.config.kubernetes import KubernetesCluster
from launcher.config.schema import ContainerConfig
from tests.clusters.kubernetes import Cluster, Host, node, obstacle, packages
from tests.clusters.kubernetes.control_plane import connect
from tests.clusters.kubernetes.played import TAINT
from tests.clusters.slurm.process import wait_for

PROJECT = Path(__file__).resolve().parents[3]


@dataclass
class Kubernetes:
    """What tests see of it. ``own`` is None when it was given to us: then nothing of it is killed, and nothing is played."""

    kubeconfig: Path
    own: Cluster | None
    image: str

    def core(self) -> Any:
        """The core API, for what a test does by hand."""
        from kubernetes import client

        return client.CoreV1Api(connect(self.kubeconfig))

    def api(self, kind: str) -> Any:
        """Another API of the official client, such as ``BatchV1Api``."""
        from kubernetes import client

        return getattr(client, kind)(connect(self.kubeconfig))

    @contextmanager
    def namespace(self) -> Iterator[str]:
        """A namespace of its own, removed afterwards."""
        name = f"test-{uuid.uuid4().hex[:8]}"
        core = self.core()
        core.create_namespace({"metadata": {"name": name}})
        wait_for(lambda: core.list_namespaced_service_account(name).items, f"the service account of namespace {name}")
        try:
            yield name
        finally:
            core.delete_namespace(name, grace_period_seconds=0)

    def cluster(self, namespace: str, **settings: Any) -> KubernetesCluster:
        """Pods that really run the trainer of this checkout."""
        host = Host(PROJECT)
        container = ContainerConfig(image=self.image, mounts=host.mounts, workdir=str(PROJECT))
        common = {
            "workload": "pods",
            "gpu_resource": None,
            "shared_memory": "256Mi",
            "grace_seconds": 5,
            "python": f"{sys.prefix}/bin/python",
        }
        real: dict[str, Any] = {"node_selector": {"real": "true"}} if self.own else {}
        if not host.readable:
            real |= {"user": 0, "restricted": False}  # this checkout can be read by its owner only
        return _settings(self.kubeconfig, namespace, common | real | {"container": container} | settings)

    def played(self, namespace: str, **settings: Any) -> KubernetesCluster:
        """Pods that only look as if they ran; ``annotations`` say what becomes of them."""
        toleration = {"key": TAINT["key"], "operator": "Exists"}
        common = {
            "workload": "pods",
            "node_selector": {"played": "true"},
            "tolerations": [toleration],
            "shared_memory": None,
            "grace_seconds": 1,
        }
        return _settings(self.kubeconfig, namespace, common | {"container": ContainerConfig(image="played:1")} | settings)


def _settings(kubeconfig: Path, namespace: str, values: dict[str, Any]) -> KubernetesCluster:
    return KubernetesCluster(backend="kubernetes", kubeconfig=str(kubeconfig), namespace=namespace, **values)


@pytest.fixture(scope="session")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    """An API server with nodes of either sort, or a given one. Needs the control plane's programs; a real node only if there can be one."""
    given = os.environ.get("KUBECONFIG")
    if given:
        yield Kubernetes(Path(given), None, os.environ.get("TRIREME_TEST_IMAGE", "lab.local/busybox:1"))
        return
    try:
        packages.install()
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"no Kubernetes to test with: its packages cannot be installed ({error})")
    reason = obstacle()
    if reason:
        pytest.skip(f"no Kubernetes to test with: {reason}")
    cluster = Cluster(tmp_path_factory.mktemp("kubernetes"), real=node.obstacle() is None)
    try:
        cluster.start()
        yield Kubernetes(cluster.control.kubeconfig, cluster, Host(PROJECT).image)
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def real_node(kubernetes: Kubernetes) -> Kubernetes:
    """A Kubernetes whose pods really run."""
    if kubernetes.own is not None and kubernetes.own.node is None:
        pytest.skip(f"no Kubernetes node to test with: {node.obstacle()}")
    return kubernetes


@pytest.fixture(scope="session")
def played_nodes(kubernetes: Kubernetes) -> Kubernetes:
    """A Kubernetes with played nodes, which may be broken."""
    if kubernetes.own is None:
        pytest.skip("the cluster of KUBECONFIG has no played nodes, and is not ours to break")
    return kubernetes


@pytest.fixture
def namespace(kubernetes: Kubernetes) -> Iterator[str]:
    """A namespace for one test."""
    with kubernetes.namespace() as name:
        yield name
