"""A whole test cluster: a real control plane, a real node where this machine allows one, and played nodes."""

from __future__ import annotations

import fcntl
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clusters.kubernetes import build
from tests.clusters.kubernetes.control_plane import LAUNCHER_NAMESPACE, POD_NETWORK, ControlPlane, Settings, connect
from tests.clusters.kubernetes.image import IMAGE
from tests.clusters.kubernetes.names import Names, Relay
from tests.clusters.kubernetes.node import NAME, Node
from tests.clusters.kubernetes.played import PlayedNodes
from tests.clusters.slurm.process import wait_for


def obstacle() -> str | None:
    """Why not even a control plane can run here; None if it can."""
    missing = [] if shutil.which("etcd") else ["etcd (apt-get install etcd-server)"]
    reasons = [reason for reason in [build.obstacle(), *missing] if reason]
    return "; ".join(reasons) or None


class Cluster:
    """Started and stopped as a whole. ``real``: with a kubelet; ``played``: so many nodes without machines."""

    def __init__(self, directory: Path, real: bool = True, played: int = 4, with_parent: bool = True):
        self.directory = directory
        settings = Settings(directory, build.build(), with_parent)
        self.control = ControlPlane(settings)
        self.node = Node(settings) if real else None
        self.played = PlayedNodes(settings, self.control.kubeconfig, played)
        self._helpers: list[Names | Relay] = []
        if real:
            gateway = f"{POD_NETWORK}.1"
            self._helpers = [Names(gateway, self.control.kubeconfig), Relay(gateway, settings.ports[0])]
        self._lock: Any = None

    def start(self) -> None:
        """Until all nodes are ready. One cluster at a time on a machine: another start waits for the first one's end."""
        self._lock = open(build.cache().parent / "cluster.lock", "w")  # noqa: SIM115 - held while the cluster is
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.control.start()
        if self.node is not None:
            self.node.start()
        for helper in self._helpers:
            helper.start()
        self.played.start()
        for name in [*self.played.names, *([NAME] if self.node else [])]:
            wait_for(lambda name=name: self.ready(name), f"node {name} to be ready")
        self.create_namespace(LAUNCHER_NAMESPACE)

    def stop(self) -> None:
        """Everything, also after a start that failed half-way."""
        if self.played.started:
            self.played.stop()
        for helper in self._helpers:
            helper.stop()
        if self.node is not None:
            self.node.stop()
        self.control.stop()
        if self._lock is not None:
            self._lock.close()

    @property
    def core(self) -> Any:
        """The administrator's core API."""
        from kubernetes import client

        return client.CoreV1Api(connect(self.control.kubeconfig))

    def ready(self, name: str) -> bool:
        from kubernetes.client.exceptions import ApiException

        try:
            conditions = self.core.read_node(name).status.conditions or []
        except ApiException:
            return False
        return any(condition.type == "Ready" and condition.status == "True" for condition in conditions)

    def create_namespace(self, name: str) -> str:
        """A namespace in which pods can be created: its default service account is there."""
        from kubernetes.client.exceptions import ApiException

        core = self.core
        core.create_namespace({"metadata": {"name": name}})

        def account() -> bool:
            try:
                return bool(core.read_namespaced_service_account("default", name).secrets)
            except ApiException:
                return False

        wait_for(account, f"the service account of namespace {name}")
        return name


@dataclass(frozen=True)
class Host:
    """What a pod needs of this machine to run the trainer of this checkout in an image that holds nothing."""

    project: Path

    @property
    def image(self) -> str:
        return IMAGE

    @property
    def mounts(self) -> list[str]:
        """``container.mounts``: the system's libraries, Python, and the checkout with its virtual environment."""
        roots = dict.fromkeys(["/usr", str(Path(sys.base_prefix).resolve()), sys.prefix, str(self.project)])
        kept = [root for root in roots if not any(Path(root).is_relative_to(other) for other in roots if other != root)]
        return [f"{root}:{root}:ro" for root in kept]
