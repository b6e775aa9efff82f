"""The requests that the launcher makes of an API server, over the official client's configuration, credentials and connections.

Objects are plain JSON both ways. ``ApiError`` is a definite answer; ``Unreachable`` means none: the server is down, too busy, or has
restarted and does not know yet what it allowed before. Such requests are repeated safely: names are deterministic, so a second creation
answers AlreadyExists.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from launcher.backends.contract import BackendError
from launcher.backends.kubernetes.cluster import KubernetesCluster
from launcher.backends.kubernetes.errors import RBAC, ApiError, explain, from_answer, short
from launcher.backends.kubernetes.manifests import Manifest
from launcher.backends.waiting import pause_unless
from trainer.shared.run.errors import ConfigError

_TIMEOUT = (5.0, 30.0)
"""Seconds to connect and to wait for an answer."""
_HURRIED_TIMEOUT = (2.0, 3.0)
"""Seconds to answer once nobody waits any more."""
_STREAM_TIMEOUT = (5.0, 330.0)
"""Seconds to answer for watches, which the server is asked to end after ``WATCH_SECONDS``."""
_LOG_TIMEOUT = (5.0, 60.0)
"""Seconds after which a silent followed log is requested again, since its connection may be dead."""
WATCH_SECONDS = 300
PATIENCE = 600.0
"""Seconds for which a request is repeated, by default, while nobody answers: an upgrade of the control plane takes minutes."""
REFUSED_SECONDS = 180.0
"""Seconds for which a server may refuse what it granted before: one that has restarted does not know all rights at first."""
_PAUSE_AT_MOST = 5.0
"""Seconds between two attempts, unless the server asks for more."""
_LONGEST_PAUSE = 30.0
"""The longest pause that a server may ask for, in seconds."""
_POOL = 64
_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


class Unreachable(BackendError):
    """No answer, or none that holds: to be asked again, after ``retry_after`` seconds if the server says so."""

    def __init__(self, message: str, retry_after: float = 0.0):
        super().__init__(message)
        self.retry_after = retry_after


class Client:
    """One API server and one namespace. Safe to use from several threads."""

    def __init__(self, cluster: KubernetesCluster, patience: float = PATIENCE):
        self.namespace = cluster.namespace
        self._patience = patience
        self._api = _connect(cluster)
        self.server: str = self._api.configuration.host
        self._ahead = time.time() - time.monotonic()  # of our steady clock: by how many seconds the server's is, in unix seconds
        self._complained = float("-inf")
        self._said: set[str] = set()
        self._allowed: set[str] = set()  # requests that were granted: a refusal of the same is not the last word
        self._refused: dict[str, float] = {}  # since when (monotonic) such requests have been refused
        self._streams: set[Any] = set()
        self._closed = False
        self.hurried = False  # every request is made once; a plain flag, which a signal handler may set

    def now(self) -> float:
        return time.monotonic() + self._ahead

    def request(
        self, method: str, path: str, query: dict[str, Any] | None = None, body: Any = None, patience: float | None = None
    ) -> Manifest:
        """The JSON of a 2xx answer. ``ApiError`` for another one; ``Unreachable`` when none comes within ``patience`` seconds."""
        deadline = time.monotonic() + (self._patience if patience is None else patience)
        pause = 0.2
        while True:
            try:
                with self._open(method, path, query, body, _HURRIED_TIMEOUT if self.hurried else _TIMEOUT) as answer:
                    return dict(json.loads(answer.data or b"{}"))
            except Unreachable as error:
                if self.hurried or time.monotonic() > deadline or self.refused_s() > REFUSED_SECONDS:
                    raise
                self.complain(str(error))
                pause_unless(lambda: self.hurried, max(pause, min(error.retry_after, _LONGEST_PAUSE)))
            pause = min(2 * pause, _PAUSE_AT_MOST)

    def reach(self, patience: float | None = None) -> None:
        """Returns when the server answers anything: the right to ask for its version may be missing. Raises ``Unreachable``."""
        with contextlib.suppress(ApiError):
            self.request("GET", "version", patience=patience)

    def create(self, path: str, manifest: Manifest, dry_run: bool = False, strict: bool = True) -> Manifest:
        """Returns the stored object. Current servers are told to refuse unknown fields, or to drop them silently as older ones do."""
        query = {"fieldValidation": "Strict" if strict else "Ignore", **({"dryRun": "All"} if dry_run else {})}
        return self.request("POST", self._in_namespace(path), query, manifest)

    def merge(self, path: str, name: str, changes: Manifest) -> None:
        self.request("PATCH", f"{self._in_namespace(path)}/{name}", body=changes)

    def get(self, path: str, name: str) -> Manifest | None:
        try:
            return self.request("GET", f"{self._in_namespace(path)}/{name}")
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def list(self, path: str, **query: Any) -> Manifest:
        """``{"items": [...], "metadata": {"resourceVersion": ...}}``."""
        return self.request("GET", self._in_namespace(path), query)

    def delete(self, path: str, name: str, uid: str | None = None, grace: int | None = None) -> None:
        """With everything it owns; absent objects, and others of the same name, are left alone."""
        options: Manifest = {"propagationPolicy": "Background"}  # the API's own default leaves a Job's pods behind
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        try:
            self.request("DELETE", f"{self._in_namespace(path)}/{name}", body=options)
        except ApiError as error:
            if not error.absent:
                raise

    def watch(self, path: str, **query: Any) -> Iterator[Manifest]:
        """Changes as they come, ``{"type", "object"}``, until the server ends the watch; ``ApiError`` (410) when it cannot go on."""
        query |= {"watch": "true", "timeoutSeconds": WATCH_SECONDS, "allowWatchBookmarks": "true"}
        for line in self._lines(self._in_namespace(path), query, _STREAM_TIMEOUT):
            try:
                change = json.loads(line)
            except ValueError as error:
                raise Unreachable(self._in_vain(str(error))) from None
            if change["type"] == "ERROR":
                status = change["object"]
                raise ApiError(status.get("code", 500), status.get("reason", ""), status.get("message", ""))
            yield change

    def log(self, pod: str, container: str, since: str | None, follow: bool) -> Iterator[bytes]:
        """Lines of a container's log, each with its time first. ``since``: RFC 3339, whole seconds. ``Unreachable`` if it breaks off."""
        query = {"container": container, "timestamps": "true", "follow": "true" if follow else "false"}
        if since is not None:
            query["sinceTime"] = since
        path = f"{self._in_namespace('api/v1/namespaces/{namespace}/pods')}/{pod}/log"
        yield from self._lines(path, query, _LOG_TIMEOUT if follow else _TIMEOUT)

    def refused_s(self) -> float:
        """Returns seconds since a formerly granted request was first refused; 0 if none is."""
        return time.monotonic() - min(list(self._refused.values()), default=time.monotonic())

    def forget_refusals(self) -> None:
        """The server has said that all of it is allowed."""
        self._refused.clear()

    def forget_grants(self) -> None:
        """Forgets which requests the server has allowed, so that its next refusal is an answer, not a server that has restarted."""
        self._allowed.clear()

    def may(self, verb: str, group: str, resource: str) -> bool:
        """Returns whether RBAC permits it; ``resource`` may name a subresource, as in ``pods/log``."""
        name, _, sub = resource.partition("/")
        wanted = {"namespace": self.namespace, "verb": verb, "group": group, "resource": name, "subresource": sub}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": {"resourceAttributes": wanted}}
        answer = self.request("POST", "apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=body)
        return bool((answer.get("status") or {}).get("allowed"))

    def refused(self, rights: Iterable[tuple[str, str, str]]) -> str:
        """One sentence that names those of ``rights``, (verb, group, resource), that are not allowed; empty if all are."""
        refused: dict[str, list[str]] = {}
        for verb, group, resource in rights:
            if not self.may(verb, group, resource):
                refused.setdefault(f"{resource}.{group}" if group else resource, []).append(verb)
        listed = "; ".join(f"{', '.join(verbs)} {resource}" for resource, verbs in refused.items())
        return f"in namespace {self.namespace} you may not: {listed}; have it granted: {RBAC}" if refused else ""

    def say_once(self, message: str) -> None:
        """Warns on standard error, once for each text."""
        if message not in self._said:
            self._said.add(message)
            sys.stderr.write(f"{message}\n")

    def complain(self, message: str) -> None:
        """Reports on standard error, once in a while, why the launcher waits."""
        if not self._closed and time.monotonic() - self._complained > 60.0:
            self._complained = time.monotonic()
            sys.stderr.write(f"{message}; trying on\n")

    def close(self) -> None:
        """Ends every stream that is being read, in whichever thread."""
        self._closed = True
        for answer in list(self._streams):
            with contextlib.suppress(OSError, AttributeError):  # it may have ended meanwhile
                answer.connection.sock.shutdown(socket.SHUT_RDWR)
        self._api.rest_client.pool_manager.clear()

    def _in_namespace(self, path: str) -> str:
        return path.format(namespace=self.namespace)

    def _lines(self, path: str, query: dict[str, Any], timeout: tuple[float, float]) -> Iterator[bytes]:
        """Whole lines of a streamed answer, until the server ends it; ``Unreachable`` if it breaks off."""
        with self._open("GET", path, query, None, timeout) as answer:
            rest = b""
            self._streams.add(answer)
            try:
                for chunk in answer.stream(65536, decode_content=True):
                    *lines, rest = (rest + chunk).split(b"\n")
                    yield from lines
            finally:
                self._streams.discard(answer)

    @contextlib.contextmanager
    def _open(self, method: str, path: str, query: dict[str, Any] | None, body: Any, timeout: tuple[float, float]) -> Iterator[Any]:
        """Yields the raw answer and closes it. Raises ``ApiError`` unless it is 2xx, ``Unreachable`` if the connection fails."""
        pairs = list((query or {}).items())
        parts = self._api.param_serialize(method, f"/{path}", query_params=pairs, body=body, auth_settings=["BearerToken"])
        _, url, headers, content, _ = parts
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers |= {"Accept": "application/json", "Content-Type": kind}
        try:
            answer = self._api.call_api(method, url, headers, content, None, timeout).response
            try:
                self._judge(answer, _right(method, path, query or {}))
                yield answer
            finally:
                answer.close()  # a stream's connection ends here; one that was read to its end went back to the pool
        except _network_errors() as error:
            raise Unreachable(self._in_vain(_root(error))) from None

    def _judge(self, answer: Any, right: str) -> None:
        if not 200 <= answer.status < 300:
            error = from_answer(answer.status, answer.data, answer.headers.get("Retry-After"))
            withdrawn = error.unauthorized and right in self._allowed
            if withdrawn:
                self._refused.setdefault(right, time.monotonic())
            if error.busy or withdrawn:
                raise Unreachable(self._in_vain(str(error)), error.retry_after or 0.0)
            raise error
        self._allowed.add(right)
        self._refused.pop(right, None)
        self._note_time(answer.headers.get("Date"))
        self._pass_on(answer.headers.get("Warning"))

    def _in_vain(self, why: str) -> str:
        return f"the Kubernetes API server at {self.server} does not answer ({short(why)}); submitted jobs continue"

    def _pass_on(self, header: str | None) -> None:
        """Repeats the server's warnings (e.g. Pod Security violations that it will refuse later), once each."""
        for quoted in re.findall(r'299 \S+ "((?:[^"\\]|\\.)*)"', header or ""):
            self.say_once("the Kubernetes API server warns: " + re.sub(r"\\(.)", r"\1", quoted))

    def _note_time(self, date: str | None) -> None:
        from email.utils import parsedate_to_datetime

        if date:
            skew = parsedate_to_datetime(date).timestamp() + 0.5 - time.time()
            self._ahead = time.time() - time.monotonic() + (skew if abs(skew) > 1.0 else 0.0)


def plainly(error: ApiError, doing: str, namespace: str) -> ConfigError:
    return ConfigError(explain(error, doing, namespace))


def _right(method: str, path: str, query: dict[str, Any]) -> str:
    """Returns the key on which RBAC decides: verb and kind, of any name."""
    kind = re.sub(r"(namespaces/[^/]+/[^/]+/)[^/]+", r"\1NAME", path)
    return f"{method} {kind}{' watch' if 'watch' in query else ''}"


def _connect(cluster: KubernetesCluster) -> Any:
    """The official client for the cluster that is named, else for the one whose pod we are."""
    from kubernetes import client, config

    settings = client.Configuration()
    try:
        named = cluster.kubeconfig or cluster.context or os.environ.get("KUBECONFIG")
        if not named and "KUBERNETES_SERVICE_HOST" in os.environ and _TOKEN.exists():
            config.load_incluster_config(client_configuration=settings)
        else:
            config.load_kube_config(cluster.kubeconfig, cluster.context, settings, persist_config=False)
    except (config.ConfigException, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        where = f"kubeconfig {cluster.kubeconfig or os.environ.get('KUBECONFIG') or '~/.kube/config'}"
        raise ConfigError(
            f"no Kubernetes cluster can be reached with {where}: {_root(error)}; set cluster.kubeconfig and cluster.context"
        ) from None
    settings.retries = False
    settings.connection_pool_maxsize = _POOL
    settings.keep_alive = True  # a server that vanished is noticed while we wait for its words
    return client.ApiClient(settings)


def _network_errors() -> tuple[type[BaseException], ...]:
    from kubernetes.client.exceptions import ApiException  # the client's wrapping of failed TLS handshakes
    from urllib3.exceptions import HTTPError

    return (HTTPError, ApiException, OSError, ValueError)  # the last of a proxy's page where JSON was expected


def _root(error: BaseException) -> str:
    """The innermost reason of a wrapped network error, in one line."""
    while (inner := getattr(error, "reason", None) or error.__cause__) is not None and isinstance(inner, BaseException):
        error = inner
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
