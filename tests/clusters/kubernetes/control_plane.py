"""etcd, API server, controllers and scheduler of a test cluster, on 127.0.0.1 only."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clusters.kubernetes.pki import Authority, Users
from tests.clusters.slurm.process import Daemon, wait_for

SERVICE_NETWORK = "10.96.0"
LAUNCHER_NAMESPACE = "trireme"
CURRENT = "KUBERNETES_PROGRAMS" in os.environ
"""The programs are those of a current release, and not the ones that are built of Debian's sources."""
FORMER_FLAGS = {"insecure-port", "port", "flex-volume-plugin-dir", "container-runtime", "controllers", "enable-priority-and-fairness"}
"""Current releases do not have them any more, or call their values differently."""
IDLE_CONTROLLERS = (
    *("attachdetach", "clusterrole-aggregation", "cronjob", "daemonset", "deployment", "endpointslice", "endpointslicemirroring"),
    *("horizontalpodautoscaling", "persistentvolume-binder", "persistentvolume-expander", "pv-protection", "pvc-protection", "replicaset"),
    *("replicationcontroller", "statefulset"),
)
"""Of objects that no test makes."""


@dataclass
class Settings:
    """Where a test cluster lives and what it is made of."""

    directory: Path
    programs: Path  # folder of kube-apiserver and the others
    number: int = 0  # tells clusters apart that run at the same time
    with_parent: bool = True  # ends with the process that started it

    @property
    def ports(self) -> list[int]:
        """Below those that other tests, and the kernel, choose from."""
        return [16000 + 10 * self.number + offset for offset in range(7)]

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self.ports[0]}"

    @property
    def pod_network(self) -> str:
        """First three bytes of the pods' addresses."""
        return f"10.251.{self.number}"

    @property
    def gateway(self) -> str:
        """This machine, as pods see it."""
        return f"{self.pod_network}.1"

    @property
    def pki(self) -> Path:
        return self.directory / "pki"


class ControlPlane:
    """The processes that make an API; ``kubeconfig`` is its administrator's, ``launcher`` belongs to a user without any rights."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.kubeconfig = settings.directory / "admin.kubeconfig"
        self.launcher = settings.directory / "launcher.kubeconfig"
        self._daemons = [self._etcd(), self._api_server(), self._controllers(), self._scheduler()]

    @property
    def database(self) -> Daemon:
        return self._daemons[0]

    @property
    def api_server(self) -> Daemon:
        return self._daemons[1]

    def start(self) -> None:
        for folder in ("log", "run"):
            (self.settings.directory / folder).mkdir(parents=True, exist_ok=True)
        self._credentials()
        for daemon in self._daemons:
            daemon.start(environment(), self.settings.with_parent)
        wait_for(self._accounts, "the default service account")

    def start_again(self) -> None:
        """Whatever of it was killed."""
        for daemon in self._daemons:
            daemon.start(environment(), self.settings.with_parent)

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.kill()

    def _credentials(self) -> None:
        settings, authority = self.settings, Authority(self.settings.pki)
        names = ("127.0.0.1", settings.gateway, f"{SERVICE_NETWORK}.1", "localhost", "kubernetes", "kubernetes.default.svc")
        authority.sign("apiserver", "kube-apiserver", hosts=names)
        authority.sign("kubelet-client", "kubelet-client", "system:masters")
        authority.sign("kubelet", "system:node:127.0.0.1", "system:nodes", hosts=("127.0.0.1",))
        authority.signing_key("accounts")
        users = Users(settings.directory, settings.server, settings.pki / "ca.crt")
        users.add("admin", "admin", "system:masters")
        users.add("launcher", "launcher", namespace=LAUNCHER_NAMESPACE)
        users.add("controllers", "system:kube-controller-manager")
        users.add("scheduler", "system:kube-scheduler")
        users.add("kubelet", "system:node:127.0.0.1", "system:nodes")

    def _etcd(self) -> Daemon:
        port, peer = self.settings.ports[1], f"http://127.0.0.1:{self.settings.ports[2]}"
        url = f"http://127.0.0.1:{port}"
        flags = {
            "name": "test", "data-dir": self.settings.directory / "etcd", "log-level": "warn", "logger": "zap",
            "listen-client-urls": url, "advertise-client-urls": url, "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer, "initial-cluster": f"test={peer}",
        }  # fmt: skip
        return self._daemon("etcd", ["etcd", *flags_of(flags)], lambda: _listens(port))

    def _api_server(self) -> Daemon:
        """The advertised address may not be loopback; the reconciler that would reject it is off."""
        settings = self.settings
        flags = {
            "bind-address": "127.0.0.1", "secure-port": settings.ports[0], "insecure-port": 0,
            "advertise-address": settings.gateway, "endpoint-reconciler-type": "none",
            "etcd-servers": f"http://127.0.0.1:{settings.ports[1]}", "storage-media-type": "application/vnd.kubernetes.protobuf",
            "cert-dir": settings.pki, "tls-cert-file": settings.pki / "apiserver.crt", "tls-private-key-file": settings.pki / "apiserver.key",
            "client-ca-file": settings.pki / "ca.crt", "token-auth-file": settings.directory / "tokens.csv", "anonymous-auth": "false",
            "authorization-mode": "Node,RBAC", "allow-privileged": "true", "service-cluster-ip-range": f"{SERVICE_NETWORK}.0/16",
            "service-account-issuer": "https://kubernetes.default.svc", "service-account-key-file": settings.pki / "accounts.pub",
            "service-account-signing-key-file": settings.pki / "accounts.key",
            "kubelet-client-certificate": settings.pki / "kubelet-client.crt", "kubelet-client-key": settings.pki / "kubelet-client.key",
            "kubelet-certificate-authority": settings.pki / "ca.crt", "kubelet-preferred-address-types": "InternalIP",
            "enable-priority-and-fairness": "false",  # a fifth of its work
        }  # fmt: skip
        return self._daemon("kube-apiserver", [settings.programs / "kube-apiserver", *flags_of(flags)], self._ready)

    def _controllers(self) -> Daemon:
        settings = self.settings
        flags = {
            **self._common("controllers", settings.ports[3]), "use-service-account-credentials": "true",
            "flex-volume-plugin-dir": settings.directory / "plugins", "root-ca-file": settings.pki / "ca.crt",
            "service-account-private-key-file": settings.pki / "accounts.key", "node-monitor-grace-period": "12s",
            "controllers": ",".join(["*", *(f"-{name}" for name in IDLE_CONTROLLERS)]), "profiling": "false",
            "cluster-signing-cert-file": settings.pki / "ca.crt", "cluster-signing-key-file": settings.pki / "ca.key",
        }  # fmt: skip
        return self._daemon("kube-controller-manager", [settings.programs / "kube-controller-manager", *flags_of(flags)])

    def _scheduler(self) -> Daemon:
        flags = self._common("scheduler", self.settings.ports[4])
        return self._daemon("kube-scheduler", [self.settings.programs / "kube-scheduler", *flags_of(flags)])

    def _common(self, user: str, port: int) -> dict[str, object]:
        config = self.settings.directory / f"{user}.kubeconfig"
        kinds = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
        own = {"bind-address": "127.0.0.1", "secure-port": port, "port": 0, "cert-dir": self.settings.pki, "leader-elect": "false"}
        return {**own, **dict.fromkeys(kinds, config)}

    def _daemon(self, name: str, command: list[object], ready: Callable[[], bool] = lambda: True) -> Daemon:
        return Daemon(name, [str(word) for word in command], self.settings.directory, ready, log=name)

    def _ready(self) -> bool:
        return self.answers("/readyz")

    def _accounts(self) -> bool:
        """Without it, every pod of the namespace is refused."""
        return self.answers("/api/v1/namespaces/default/serviceaccounts/default")

    def answers(self, path: str) -> bool:
        """Whether the API server says 200 to the administrator."""
        from urllib3.exceptions import HTTPError

        from kubernetes.client.exceptions import ApiException

        api = connect(self.kubeconfig)
        _, url, headers, _, _ = api.param_serialize("GET", path, auth_settings=["BearerToken"])
        try:
            return bool(api.call_api("GET", url, headers, _request_timeout=10).status == 200)
        except (HTTPError, ApiException, OSError):
            return False


def connect(kubeconfig: Path) -> Any:
    """The official client, without retries."""
    from kubernetes import client, config

    settings = client.Configuration()
    config.load_kube_config(str(kubeconfig), client_configuration=settings)
    settings.retries = False
    return client.ApiClient(settings)


def environment() -> dict[str, str]:
    """Of all programs: an old kubelet asks a cloud's metadata address for credentials when it starts; no proxy on loopback; memory spares time."""
    local = {
        "GOGC": "400",
        "GOMAXPROCS": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
    return {**os.environ, **local}


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, below the range from which the kernel takes those of outgoing connections."""
    return [port for port in random.sample(range(20000, 32000), 50 * count) if not _listens(port)][:count]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def flags_of(flags: dict[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items() if not (CURRENT and name in FORMER_FLAGS)]
