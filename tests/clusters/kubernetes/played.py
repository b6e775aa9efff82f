"""Nodes without machines: the API server, the scheduler and the controllers are real, and only the kubelet is played.

A pod bound to a played node goes Pending -> Running -> Succeeded, and its log can be read and followed. Annotations of the pod say
what becomes of it; a value may differ by the pod's index, ``0=3,1=137``:

    played/run        seconds that it runs (default 0.3; -1: until it is deleted)
    played/exit       exit code (default 0)
    played/reason     reason of the container's end, such as OOMKilled
    played/waiting    it never starts, for this reason, such as ImagePullBackOff
    played/message    its termination message
    played/evict      it fails with reason Evicted and this message
    played/log        its log, with {index} replaced; written as the container starts
    played/answers    what its node answers, before that, to those who read the log, one word each: 404, mute (it begins, and says no more),
                      empty, or words (of its own)

While a node has the annotation ``played/silent`` it does not answer: it renews no lease and confirms nothing.
"""

from __future__ import annotations

import re
import ssl
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.clusters.kubernetes.control_plane import Settings, connect

TAINT = {"key": "played", "value": "true", "effect": "NoSchedule"}
"""Nothing lands on a played node by accident."""
_BEAT_SECONDS = 3.0


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _precisely() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class PlayedNodes:
    """``count`` nodes, each of 1000 CPUs and ``gpus`` GPUs."""

    def __init__(self, settings: Settings, kubeconfig: Path, count: int, gpus: int = 8):
        self.names = [f"played-{number}" for number in range(count)]
        self._gpus, self._kubeconfig, self._pki = gpus, kubeconfig, settings.pki
        self._silent: set[str] = set()
        self._begun: dict[str, threading.Event] = {}  # by uid of the pod; set when it is to end
        self._confirmed: set[str] = set()  # uids of pods whose end has been confirmed
        self._logs: dict[str, list[str]] = {}  # by name of the pod
        self._answers: dict[str, list[str]] = {}  # by name of the pod
        self._over: set[str] = set()  # names of pods whose log is complete
        self._addresses = 0
        self._closed = threading.Event()
        self.started = False

    def start(self) -> None:
        from kubernetes import client

        api = connect(self._kubeconfig)
        self._core, self._leases = client.CoreV1Api(api), client.CoordinationV1Api(api)
        self._server = _log_server(self._pki, self._log, self._answer)
        self.started = True
        for work in (self._server.serve_forever, self._beat, self._watch):
            threading.Thread(target=work, daemon=True).start()
        for name in self.names:
            labels = {"kubernetes.io/hostname": name, "played": "true", "rack": f"rack-{int(name[7:]) // 2}"}
            self._core.create_node({"metadata": {"name": name, "labels": labels}, "spec": {"taints": [TAINT]}})
            self._report(name)

    def stop(self) -> None:
        self._closed.set()
        for event in list(self._begun.values()):
            event.set()
        self._server.shutdown()

    # -- nodes --------------------------------------------------------------------------------------------------------------

    def _report(self, name: str) -> None:
        room = {"cpu": "1000", "memory": "4000Gi", "pods": "500", "nvidia.com/gpu": str(self._gpus)}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "played", "lastHeartbeatTime": _now()}
        ports = {"kubeletEndpoint": {"Port": self._server.server_port}}
        status = {"capacity": room, "allocatable": room, "conditions": [ready | {"lastTransitionTime": _now()}]}
        places = {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}], "daemonEndpoints": ports}
        self._core.patch_node_status(name, {"status": status | places})

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT_SECONDS):
            self._patiently(self._renew_all)

    def _renew_all(self) -> None:
        """Renews the lease of every node, and tells again that it is ready where that is no longer known: it was silent, or on a busy machine
        this thread came late."""
        for node in self._core.list_node(label_selector="played=true").items:
            name, conditions = node.metadata.name, node.status.conditions or []
            if "played/silent" in (node.metadata.annotations or {}):
                self._silent.add(name)
                continue
            self._silent.discard(name)
            self._renew(name)
            if not any(condition.type == "Ready" and condition.status == "True" for condition in conditions):
                self._report(name)

    def _renew(self, name: str) -> None:
        from kubernetes.client.exceptions import ApiException

        spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": _precisely()}
        try:
            self._leases.patch_namespaced_lease(name, "kube-node-lease", {"spec": spec})
        except ApiException as error:
            if error.status != 404:
                raise
            self._leases.create_namespaced_lease("kube-node-lease", {"metadata": {"name": name}, "spec": spec})

    # -- pods ---------------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """List, then watch, and again from the start whenever that breaks off."""
        from kubernetes import watch

        while not self._closed.is_set():
            self._patiently(lambda: self._pass(watch.Watch()))

    def _pass(self, watch: Any) -> None:
        there = self._core.list_pod_for_all_namespaces()
        for pod in there.items:
            self._see(pod)
        version = there.metadata.resource_version
        for change in watch.stream(self._core.list_pod_for_all_namespaces, resource_version=version, timeout_seconds=60):
            pod = change["object"]
            if change["type"] != "DELETED":
                self._see(pod)
            elif pod.metadata.uid in self._begun:
                self._begun[pod.metadata.uid].set()

    def _see(self, pod: Any) -> None:
        uid, node = pod.metadata.uid, pod.spec.node_name
        if node not in self.names or node in self._silent:
            return
        if uid not in self._begun and pod.status.phase == "Pending":
            self._begun[uid] = threading.Event()
            threading.Thread(target=lambda: self._patiently(lambda: self._live(pod)), daemon=True).start()
        if pod.metadata.deletion_timestamp and uid in self._begun and uid not in self._confirmed:
            self._confirmed.add(uid)  # once: a pod with a finalizer stays, and each confirmation is a change that would be seen here
            self._begun[uid].set()
            body = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
            self._patiently(lambda: self._core.delete_namespaced_pod(pod.metadata.name, pod.metadata.namespace, body=body))

    def _live(self, pod: Any) -> None:
        """One pod's life."""
        told = _told(pod)
        if word := told("waiting"):
            self._put(pod, "Pending", {"waiting": {"reason": word, "message": f"{word}, as played"}})
            return
        self._addresses += 1
        address = f"10.245.{self._addresses // 250}.{self._addresses % 250 + 2}"
        place = {"hostIP": "127.0.0.1", "podIP": address, "podIPs": [{"ip": address}]}
        begun, name = _now(), pod.metadata.name
        self._logs[name] = [f"{_precisely()} {line}" for line in told("log").splitlines()]
        self._answers[name] = told("answers").split()
        self._put(pod, "Running", {"running": {"startedAt": begun}}, ready=True, **place)
        seconds = float(told("run") or 0.3)
        deleted = self._begun[pod.metadata.uid].wait(None if seconds < 0 else seconds)
        self._over.add(name)
        if deleted or pod.spec.node_name in self._silent:
            return
        if message := told("evict"):
            self._put(pod, "Failed", None, reason="Evicted", message=message)
            return
        code = int(told("exit") or 0)
        end = {"exitCode": code, "reason": told("reason") or ("Error" if code else "Completed"), "startedAt": begun, "finishedAt": _now()}
        end["message"] = told("message")
        self._put(pod, "Failed" if code else "Succeeded", {"terminated": end}, **place)

    def _put(self, pod: Any, phase: str, state: dict[str, Any] | None, ready: bool = False, **more: Any) -> None:
        container = pod.spec.containers[0]
        said = {"name": container.name, "image": container.image, "imageID": "", "ready": ready, "started": ready, "restartCount": 0}
        words = {"Initialized": True, "Ready": ready, "ContainersReady": ready}
        conditions = [{"type": k, "status": str(v), "lastTransitionTime": _now()} for k, v in words.items()]
        status = {"phase": phase, "startTime": _now(), "conditions": conditions, **more}
        status["containerStatuses"] = [said | {"state": state}] if state else []
        self._core.patch_namespaced_pod_status(pod.metadata.name, pod.metadata.namespace, {"status": status})

    def _patiently(self, act: Callable[[], object]) -> None:
        """Do ``act``, again while the API server is away; give up when the object is not there any more."""
        from urllib3.exceptions import HTTPError

        from kubernetes.client.exceptions import ApiException

        while not self._closed.is_set():
            try:
                act()
                return
            except ApiException as error:
                if error.status in (404, 409, 410, 422):
                    return
            except (HTTPError, OSError):
                pass
            time.sleep(0.5)

    def _log(self, name: str, sent: int) -> tuple[list[str], bool]:
        """Lines after the first ``sent``, and whether there will be no more."""
        return self._logs.get(name, [])[sent:], name in self._over

    def _answer(self, name: str) -> str:
        """The word for who reads the log now; empty for all that it holds."""
        answers = self._answers.get(name)
        return answers.pop(0) if answers else ""


def _told(pod: Any) -> Callable[[str], str]:
    """What the pod's annotations say, for this pod's index."""
    match = re.search(r"-(\d+)$", pod.spec.hostname or "")
    index = match[1] if match else "0"

    def told(word: str) -> str:
        text = (pod.metadata.annotations or {}).get(f"played/{word}", "")
        if re.fullmatch(r"(\d+=[^,]*)(,\d+=[^,]*)*", text):
            return dict(part.split("=", 1) for part in text.split(",")).get(index, "")
        return text.replace("{index}", index)

    return told


def _log_server(pki: Path, lines: Callable[[str, int], tuple[list[str], bool]], answer: Callable[[str], str]) -> ThreadingHTTPServer:
    """What the API server asks for ``pods/log``: /containerLogs/NAMESPACE/POD/CONTAINER?follow=true&timestamps=true."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            address = urlsplit(self.path)
            follow = parse_qs(address.query).get("follow") == ["true"]
            stamped = parse_qs(address.query).get("timestamps") == ["true"]
            name, sent = address.path.split("/")[3], 0
            word = answer(name)
            self.send_response(404 if word == "404" else 200)
            self.send_header("Content-Type", "text/plain")
            self.end_headers()
            if word:
                self.wfile.write(b"unable to retrieve container logs for containerd://0123" * (word == "words") + b"\n" * (word != "empty"))
                self.wfile.flush()
                time.sleep(3600 if word == "mute" else 0)
                return
            while True:
                more, over = lines(name, sent)
                sent += len(more)
                for line in more:
                    self.wfile.write((line if stamped else line.partition(" ")[2]).encode() + b"\n")
                self.wfile.flush()
                if over or not follow:
                    return
                time.sleep(0.1)

        def log_message(self, *_: object) -> None:
            """Silence."""

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pki / "kubelet.crt", pki / "kubelet.key")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return server
