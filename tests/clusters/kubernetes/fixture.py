"""One Kubernetes for all tests of a run: the one that KUBECONFIG names, else one of our own, else the tests are skipped and say why.

Launchers are given the credentials of the shipped service account, with the shipped role in the namespace of the test, and no more;
what a test does by hand it does as administrator.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.backends.kubernetes.cluster import KubernetesCluster
from launcher.config.schema import ContainerConfig
from tests import warm
from tests.clusters import shared
from tests.clusters.kubernetes import Cluster, Host, OwnCluster, node, obstacle, packages
from tests.clusters.kubernetes.control_plane import CURRENT, ControlPlane, connect
from tests.clusters.kubernetes.played import TAINT
from tests.clusters.slurm.process import wait_for

PROJECT = Path(__file__).resolve().parents[3]
PYTHON = f"{sys.prefix}/bin/python"
"""The interpreter of pods that nothing is forked for."""


@dataclass
class Kubernetes:
    """What tests see of it. ``own`` is None when it was given to us: then nothing of it is killed, and nothing is played."""

    kubeconfig: Path  # of the administrator
    own: Cluster | None
    image: str
    groups: list[str] = field(default_factory=list)  # API groups, beside those of the shipped role, of workloads that tests have added
    launchers: dict[str, Path] = field(default_factory=dict)  # by namespace: the kubeconfig of the shipped service account

    @property
    def indexes(self) -> bool:
        """Whether it knows Indexed Jobs; Debian's does not, and drops what it does not know."""
        return self.own is None or CURRENT

    def core(self) -> Any:
        """The core API, for what a test does by hand."""
        from kubernetes import client

        return client.CoreV1Api(connect(self.kubeconfig))

    def api(self, kind: str) -> Any:
        """Another API of the official client, such as ``BatchV1Api``."""
        from kubernetes import client

        return getattr(client, kind)(connect(self.kubeconfig))

    @contextmanager
    def namespace(self, remove: bool = False) -> Iterator[str]:
        """A namespace of its own with the shipped service account and role. Its pods are removed afterwards; it goes itself if it is to, or
        is not in a cluster of ours, which ends soon: to look for objects of every kind costs as much as most tests."""
        name = f"test-{uuid.uuid4().hex[:8]}"
        core = self.core()
        core.create_namespace({"metadata": {"name": name}})
        wait_for(lambda: core.list_namespaced_service_account(name).items, f"the service account of namespace {name}")
        with tempfile.TemporaryDirectory() as folder:
            self.launchers[name] = self.install_launcher(name, Path(folder) / "launcher.kubeconfig")
            try:
                yield name
            finally:
                if remove or self.own is None:
                    core.delete_namespace(name, grace_period_seconds=0)
                else:
                    core.delete_collection_namespaced_pod(name, grace_period_seconds=0)

    def install_launcher(self, namespace: str, path: Path) -> Path:
        """deploy/kubernetes/rbac.yaml in ``namespace``; the kubeconfig, written to ``path``, with a token of its launcher."""
        from kubernetes.client.exceptions import ApiException

        core, rights = self.core(), self.api("RbacAuthorizationV1Api")
        documents = shipped("rbac.yaml", namespace)
        for rule in documents["Role/launcher"]["rules"]:
            rule["apiGroups"] += self.groups if "batch" in rule["apiGroups"] else []
        core.create_namespaced_service_account(namespace, documents["ServiceAccount/launcher"])
        rights.create_namespaced_role(namespace, documents["Role/launcher"])
        rights.create_namespaced_role_binding(namespace, documents["RoleBinding/launcher"])
        wanted = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 86400}}
        token = core.create_namespaced_service_account_token("launcher", namespace, wanted).status.token
        document = yaml.safe_load(self.kubeconfig.read_text())
        used = next(context["context"] for context in document["contexts"] if context["name"] == document["current-context"])
        document["users"] = [{"name": used["user"], "user": {"token": token}}]
        path.write_text(yaml.safe_dump(document))

        def known() -> bool:
            try:
                launcher = connect(path)
                type(core)(launcher).list_namespaced_pod(namespace)
            except ApiException:
                return False
            return True

        wait_for(known, "the role to take effect")
        return path

    def cluster(self, namespace: str, **settings: Any) -> KubernetesCluster:
        """Pods that really run the trainer of this checkout, warm on our own node."""
        host = Host(PROJECT)
        python = warm.python() if self.own else PYTHON
        warmth = [f"{Path(python).parent}:{Path(python).parent}:ro"] if self.own else []
        container = ContainerConfig(image=self.image, mounts=[*host.mounts, *warmth], workdir=str(PROJECT))
        common = {
            "workload": "pods",
            "spread": False,  # there is one real node
            "gpu_resource": None,
            "shared_memory": "256Mi",
            "grace_seconds": 5,
            "python": python,
        }
        real: dict[str, Any] = {"node_selector": {"real": "true"}} if self.own else {}
        if not host.readable:
            real |= {"user": 0, "restricted": False}  # this checkout can be read by its owner only
        return self._settings(namespace, common | real | {"container": container} | settings)

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
        return self._settings(namespace, common | {"container": ContainerConfig(image="played:1")} | settings)

    def _settings(self, namespace: str, values: dict[str, Any]) -> KubernetesCluster:
        return KubernetesCluster(backend="kubernetes", kubeconfig=str(self.launchers[namespace]), namespace=namespace, **values)


def shipped(name: str, namespace: str) -> dict[str, Any]:
    """The documents of a file of deploy/kubernetes, by KIND/NAME, for another namespace."""
    text = (PROJECT / "deploy" / "kubernetes" / name).read_text()
    documents = {f"{document['kind']}/{document['metadata']['name']}": document for document in yaml.safe_load_all(text)}
    for document in documents.values():
        if "namespace" in document["metadata"]:
            document["metadata"]["namespace"] = namespace
        for subject in document.get("subjects", []):
            subject["namespace"] = namespace
    return documents


def run_inside(kubernetes: Kubernetes, namespace: str, job: dict[str, Any], words: list[str], folder: Path, seen: str) -> str:
    """Run a shipped Job of a launcher to its end, with our image, which needs this machine's folders; its log. ``words`` are its command
    line, ``folder`` of this machine is what it sees as ``seen``."""
    assert kubernetes.own is not None
    settings, name = kubernetes.cluster(namespace), job["metadata"]["name"]
    job["spec"]["backoffLimit"] = 0
    spec, (container,) = job["spec"]["template"]["spec"], job["spec"]["template"]["spec"]["containers"]
    if not settings.restricted:
        spec["securityContext"] = {}
    places = {"KUBERNETES_SERVICE_HOST": kubernetes.own.settings.gateway, "KUBERNETES_SERVICE_PORT": "443", "HOME": "/tmp"}
    mounts = [mount.split(":")[0] for mount in settings.container.mounts]
    container |= {
        "image": settings.container.image, "command": [PYTHON, "-m", "launcher"], "args": words, "workingDir": str(PROJECT),
        "env": [{"name": key, "value": value} for key, value in places.items()], "resources": {},
        "volumeMounts": [
            *({"name": f"host-{n}", "mountPath": path, "readOnly": True} for n, path in enumerate(mounts)),
            {"name": "tmp", "mountPath": "/tmp"}, {"name": "runs", "mountPath": seen},
        ],
    }  # fmt: skip
    spec["volumes"] = [{"name": f"host-{n}", "hostPath": {"path": path}} for n, path in enumerate(mounts)]
    spec["volumes"] += [{"name": "runs", "hostPath": {"path": str(folder)}}, {"name": "tmp", "emptyDir": {}}]
    spec["nodeSelector"] = settings.node_selector
    batch = kubernetes.api("BatchV1Api")
    batch.create_namespaced_job(namespace, job)

    def ended() -> bool:
        status = batch.read_namespaced_job(name, namespace).status
        return bool(status.succeeded or status.failed)

    wait_for(ended, "the launcher to end", 300)
    (pod,) = kubernetes.core().list_namespaced_pod(namespace, label_selector=f"job-name={name}").items
    log = str(kubernetes.core().read_namespaced_pod_log(pod.metadata.name, namespace))
    assert batch.read_namespaced_job(name, namespace).status.succeeded == 1, log
    return log


@contextmanager
def held() -> Iterator[dict[str, Any]]:
    """For the holder: start our own cluster, and end it. A control plane suffices; there is a real node only if there can be one."""
    reason: str | None = None
    try:
        packages.install()
    except (subprocess.CalledProcessError, OSError) as error:
        reason = f"its packages cannot be installed ({error})"
    reason = reason or obstacle()
    if reason:
        yield {"obstacle": f"no Kubernetes to test with: {reason}"}
        return
    real = node.obstacle() is None
    cluster = OwnCluster(real=real)
    try:
        cluster.start()
        yield {"directory": str(cluster.directory), "number": cluster.settings.number, "real": real}
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def kubernetes(request: pytest.FixtureRequest) -> Kubernetes:
    """An API server with nodes of either sort, shared by the processes of the run, or a given one."""
    if "kubernetes" in shared.GIVEN:
        return Kubernetes(Path(os.environ["KUBECONFIG"]), None, os.environ.get("TRIREME_TEST_IMAGE", "lab.local/busybox:1"))
    address = shared.address(request.config, "kubernetes")
    cluster = Cluster(Path(address["directory"]), address["number"], address["real"])
    return Kubernetes(cluster.control.kubeconfig, cluster, Host(PROJECT).image)


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
def control(played_nodes: Kubernetes) -> Iterator[ControlPlane]:
    """The control plane of our own cluster, to be killed; it is started again after the test."""
    assert played_nodes.own is not None
    yield played_nodes.own.control
    played_nodes.own.control.start_again()


@pytest.fixture
def forgetful(played_nodes: Kubernetes) -> None:
    """A server that is too old for Indexed Jobs."""
    if played_nodes.indexes:
        pytest.skip("the programs of KUBERNETES_PROGRAMS know all that is asked of them")


@pytest.fixture
def quiet() -> None:
    """Nobody else uses the cluster meanwhile: a node of it is broken or full, or a rule of it changed."""


@pytest.fixture
def namespace(kubernetes: Kubernetes) -> Iterator[str]:
    """A namespace for one test."""
    with kubernetes.namespace() as name:
        yield name
