"""A whole test cluster: a real control plane, a real node where this machine allows one, and played nodes."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clusters.kubernetes import build
from tests.clusters.kubernetes.control_plane import CURRENT, LAUNCHER_NAMESPACE, ControlPlane, Settings, connect
from tests.clusters.kubernetes.guard import Guard
from tests.clusters.kubernetes.image import IMAGE
from tests.clusters.kubernetes.names import Names, Relay
from tests.clusters.kubernetes.node import NAME, Node
from tests.clusters.kubernetes.played import PlayedNodes
from tests.clusters.slurm.process import free_number, wait_for


def programs() -> Path:
    """The folder of kube-apiserver and the others: ``KUBERNETES_PROGRAMS``, else what is built of Debian's sources, now if need be."""
    return Path(os.environ["KUBERNETES_PROGRAMS"]).resolve() if CURRENT else build.build()


def obstacle() -> str | None:
    """Why not even a control plane can run here; None if it can."""
    missing = [] if shutil.which("etcd") else ["etcd (apt-get install etcd-server)"]
    reasons = [reason for reason in [None if CURRENT else build.obstacle(), *missing] if reason]
    return "; ".join(reasons) or None


class Cluster:
    """What there is of a cluster in files and processes, for any process: all of it can be killed, and started again."""

    def __init__(self, directory: Path, number: int, real: bool, with_parent: bool = False):
        self.directory = directory
        self.settings = Settings(directory, programs(), number, with_parent)
        self.control = ControlPlane(self.settings)
        self.node = Node(self.settings) if real else None


class OwnCluster(Cluster):
    """Started and stopped as a whole, by one process. ``real``: with a kubelet; ``played``: so many nodes without machines."""

    def __init__(self, directory: Path | None = None, real: bool = True, played: int = 4):
        number, self._lock = free_number("trireme-kubernetes-{}.lock")
        directory = directory or Path(tempfile.gettempdir()) / f"trireme-kubernetes-{number}"
        shutil.rmtree(directory, ignore_errors=True)  # what a killed run left
        directory.mkdir(parents=True)
        self._guard = Guard(directory, number, self._lock)
        super().__init__(directory, number, real, with_parent=True)
        settings = self.settings
        self.played = PlayedNodes(settings, self.control.kubeconfig, played)
        self._helpers: list[Names | Relay] = []
        if real:
            self._helpers = [Names(settings.gateway, self.control.kubeconfig), Relay(settings.gateway, settings.ports[0])]

    def start(self) -> None:
        """Until all nodes are ready."""
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
        self._guard.dismiss()
        shutil.rmtree(self.directory, ignore_errors=True)
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
                return bool(core.read_namespaced_service_account("default", name).secrets) or CURRENT
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
    def readable(self) -> bool:
        """By anybody, as pods that do not run as root need."""
        return all(os.stat(path).st_mode & 0o005 == 0o005 for path in (self.project, self.project / "trainer", sys.prefix, sys.base_prefix))

    @property
    def mounts(self) -> list[str]:
        """``container.mounts``: the system's libraries, Python, and the checkout with its virtual environment."""
        roots = dict.fromkeys(["/usr", str(Path(sys.base_prefix).resolve()), sys.prefix, str(self.project)])
        kept = [root for root in roots if not any(Path(root).is_relative_to(other) for other in roots if other != root)]
        return [f"{root}:{root}:ro" for root in kept]
