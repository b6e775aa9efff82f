"""What pods of a test cluster need of the network besides each other: names, and the API server. Answers on the bridge's address."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from pathlib import Path

from tests.clusters.kubernetes.control_plane import connect

_DOMAIN = ["svc", "cluster", "local"]
_A, _NAME_ERROR = 1, 3


class Names:
    """Cluster DNS over UDP: SERVICE.NAMESPACE.svc.cluster.local and HOSTNAME.SERVICE... of headless Services, asked of the API each time."""

    def __init__(self, address: str, kubeconfig: Path):
        self._address, self._kubeconfig = address, kubeconfig
        self._socket: socket.socket | None = None

    def start(self) -> None:
        from kubernetes import client

        self._core = client.CoreV1Api(connect(self._kubeconfig))
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((self._address, 53))
        threading.Thread(target=self._serve, daemon=True).start()

    def stop(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                question, peer = self._socket.recvfrom(4096)
            except OSError:
                return
            with contextlib.suppress(OSError, IndexError, UnicodeDecodeError):
                self._socket.sendto(self._answer(question), peer)

    def _answer(self, question: bytes) -> bytes:
        labels, at = [], 12
        while question[at]:
            labels.append(question[at + 1 : at + 1 + question[at]].decode().lower())
            at += question[at] + 1
        (kind,) = struct.unpack("!H", question[at + 1 : at + 3])
        known = self._addresses(labels)
        found = known or [] if kind == _A else []
        head = struct.pack("!HHHHH", 0x8580 | (_NAME_ERROR if known is None else 0), 1, len(found), 0, 0)
        records = b"".join(b"\xc0\x0c" + struct.pack("!HHIH", _A, 1, 1, 4) + socket.inet_aton(a) for a in found)
        return question[:2] + head + question[12 : at + 5] + records

    def _addresses(self, labels: list[str]) -> list[str] | None:
        """None if there is no such name."""
        from urllib3.exceptions import HTTPError

        from kubernetes.client.exceptions import ApiException

        *host, service, namespace = labels[: -len(_DOMAIN)] if labels[-len(_DOMAIN) :] == _DOMAIN else ["", "", "", ""]
        if len(host) > 1 or not service:
            return None
        try:
            endpoints = self._core.read_namespaced_endpoints(service, namespace)
        except (ApiException, HTTPError):
            return None
        places = [place for subset in endpoints.subsets or [] for place in subset.addresses or []]
        chosen = [place.ip for place in places if not host or place.hostname == host[0]]
        return chosen or None


class Relay:
    """Passes connections to ``address``:443 on to a port of this machine, so that pods reach an API server that listens on loopback."""

    def __init__(self, address: str, port: int):
        self._address, self._port = address, port
        self._server: socket.socket | None = None

    def start(self) -> None:
        self._server = socket.create_server((self._address, 443))
        threading.Thread(target=self._serve, daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    def _serve(self) -> None:
        while True:
            try:
                near = self._server.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._pass, args=(near,), daemon=True).start()

    def _pass(self, near: socket.socket) -> None:
        with (
            near,
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self._port)) as far,
            selectors.DefaultSelector() as waiting,
        ):
            waiting.register(near, selectors.EVENT_READ, far)
            waiting.register(far, selectors.EVENT_READ, near)
            while True:
                for key, _ in waiting.select():
                    data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                    if not data:
                        return
                    key.data.sendall(data)
