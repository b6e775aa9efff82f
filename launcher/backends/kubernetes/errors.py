"""Turns an API server's refusal, or the fields that it drops, into one sentence with cause and remedy. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from launcher.backends.contract import BackendError

RBAC = "deploy/kubernetes/rbac.yaml grants what a launcher needs"
_RIGHTS = re.compile(r'User "([^"]*)" cannot (\w+) resource "([^"]*)"(?: in API group "([^"]*)")?')


@dataclass
class ApiError(BackendError):
    """An answer other than 2xx. ``status`` is the HTTP status, the rest is its ``Status`` object."""

    status: int
    reason: str = ""
    message: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    retry_after: float | None = None  # seconds

    def __str__(self) -> str:
        return f"{self.status} {self.reason}: {self.message}"

    @property
    def exists(self) -> bool:
        return self.status == 409 and self.reason == "AlreadyExists"

    @property
    def absent(self) -> bool:
        """Returns whether the object does not exist: not found, or another one of the same name."""
        return self.status == 404 or (self.status == 409 and "UID in the precondition" in self.message)

    @property
    def expired(self) -> bool:
        """The resource version of a watch is too old: list again."""
        return self.status == 410

    @property
    def busy(self) -> bool:
        """The server cannot tell now: the same request may be granted in a moment."""
        return (
            self.status >= 500
            or self.status == 429
            or self.reason in ("ServerTimeout", "Timeout", "TooManyRequests")
            or self.retry_after is not None
            or (self.reason == "Conflict" and not self.absent)  # two writers met, at a quota say
        )

    @property
    def unauthorized(self) -> bool:
        """Returns whether credentials or rights are missing: permanently, or until a restarted server knows them again."""
        return self.status == 401 or (self.status == 403 and _RIGHTS.search(self.message) is not None)

    @property
    def unknown(self) -> set[str]:
        """Paths of fields that a server which was asked to be strict does not know."""
        strict = self.status == 400 and "strict decoding error" in self.message
        return set(re.findall(r'unknown field "([^"]*)"', self.message)) if strict else set()

    @property
    def over_quota(self) -> bool:
        """Room may be made by others: their objects end, or the quota is raised."""
        return self.status == 403 and "exceeded quota" in self.message


def from_answer(status: int, body: bytes | str, retry_after: str | None = None) -> ApiError:
    """Returns the error in an answer; a body that is not a ``Status`` (a proxy's page) keeps its first line."""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
    delay = float(retry_after) if retry_after and retry_after.isdigit() else None
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        return ApiError(status, "", (text.strip().splitlines() or [""])[0][:300], {}, delay)
    return ApiError(status, data.get("reason") or "", data.get("message") or "", data.get("details") or {}, delay)


def explain(error: ApiError, doing: str, namespace: str) -> str:
    """Returns one sentence: the failed action, the cause, the remedy. ``doing`` reads like "create the Job trireme-0123"."""
    cause, remedy = _cause(error, namespace)
    return f"cannot {doing}: {cause}; {remedy}"


def explain_refusal(message: str, namespace: str) -> str:
    """Explains a controller's complaint: quotas and Pod Security refuse the pods, not the workload that makes them."""
    return "; ".join(_forbidden(message.removeprefix("Error creating: "), namespace))


def dropped(sent: Any, stored: Any, where: str = "") -> list[str]:
    """Returns sent paths that the stored object lacks: an old server drops unknown fields and answers 201. Ignores values and empty
    fields."""
    if isinstance(sent, dict):
        if not isinstance(stored, dict):
            return [where] if sent else []
        missing = [
            f"{where}.{name}".lstrip(".")
            for name, value in sent.items()
            if name not in stored and value not in (None, "", 0, False, [], {})
        ]
        return missing + [
            path for name, value in sent.items() if name in stored for path in dropped(value, stored[name], f"{where}.{name}")
        ]
    if isinstance(sent, list) and isinstance(stored, list):
        if len(stored) < len(sent):
            return [where.lstrip(".")]
        names = {item["name"]: item for item in stored if isinstance(item, dict) and "name" in item}
        pairs = [
            (item, names.get(item["name"]) if isinstance(item, dict) and "name" in item else other) for item, other in zip(sent, stored)
        ]
        return [path for number, (item, other) in enumerate(pairs) for path in dropped(item, other, f"{where}.{number}")]
    return []


def _cause(error: ApiError, namespace: str) -> tuple[str, str]:
    message = error.message
    if error.status == 401:
        return "the API server does not accept the credentials", "log in again, or choose another cluster.context or cluster.kubeconfig"
    if error.status == 403:
        return _forbidden(message, namespace)
    if error.status == 404:
        return _not_found(error, namespace)
    if error.status == 409:
        return message, "another object of this name is in the way; delete it, or choose another cluster.namespace"
    if error.status == 422:
        return _fields(error), "correct the cluster's settings that lead to these fields (cluster.patch, cpu, memory, labels, ...)"
    if error.status == 400:
        return _malformed(message), "correct the cluster's settings (quantities look like 4, 500m, 64Gi)"
    return f"the API server answers {error.status} {error.reason} {short(message)}".rstrip(), "see its log"


def _forbidden(message: str, namespace: str) -> tuple[str, str]:
    said = short(message)
    if "because it is being terminated" in message:
        return f"namespace {namespace} is being deleted", "wait until it is gone and create it again, or choose another cluster.namespace"
    if "exceeded quota" in message:
        return (
            f"the namespace's quota is used up ({said})",
            "wait, lower sweep.max_parallel or the pods' resources, or have the quota raised",
        )
    if "failed quota" in message:
        return f"the namespace's quota wants resources stated ({said})", "set cluster.cpu and cluster.memory"
    if "violates PodSecurity" in message:
        return (
            f"the namespace's Pod Security Standard forbids the pods ({said})",
            "set cluster.restricted=true and a non-zero cluster.user, or relax the standard",
        )
    if re.search(r"(maximum|minimum) (cpu|memory|\S+) usage per|limit to request ratio", message):
        return f"the namespace's limit range forbids the pods ({said})", "change cluster.cpu or cluster.memory"
    if match := re.search(r'serviceaccount "([^"]*)" not found', message):
        return f"there is no service account {match[1]} in namespace {namespace}", "create it, or correct cluster.service_account"
    if match := re.search(r"no PriorityClass with name (\S+) was found", message):
        return f"the cluster has no priority class {match[1]}", "create it, or correct cluster.priority_class"
    if match := _RIGHTS.search(message):
        user, verb, resource, group = match.groups()
        return f"user {user} may not {verb} {resource}{'.' + group if group else ''} in namespace {namespace}", f"have it granted: {RBAC}"
    return said, f"ask the cluster's administrator ({RBAC})"


def _not_found(error: ApiError, namespace: str) -> tuple[str, str]:
    if error.message.startswith("namespaces "):
        return (
            f"namespace {namespace} does not exist",
            f"create it with 'kubectl create namespace {namespace}', or choose another cluster.namespace",
        )
    if not error.details.get("name") and error.message in ("the server could not find the requested resource", "404 page not found"):
        return "the cluster does not know this kind of object", "install it, or choose another cluster.workload (job and pods need nothing)"
    return short(error.message), "it may have been deleted by somebody else"


def _fields(error: ApiError) -> str:
    """Field and complaint of every cause. The message itself can hold a whole template, kilobytes of it."""
    causes = error.details.get("causes") or []
    said = [f"{cause.get('field')}: {_without_value(str(cause.get('message', '')))}" for cause in causes]
    return " and ".join(dict.fromkeys(said)) or short(error.message)


def _without_value(text: str) -> str:
    """``Invalid value: {...}: field is immutable`` without a value that is longer than a line."""
    match = re.match(r'(Invalid value: )("(?:[^"\\]|\\.)*"|.*): (.*)$', text, re.DOTALL)
    return f"{match[1]}...: {match[3]}" if match and len(match[2]) > 80 else short(text)


def _malformed(message: str) -> str:
    """Keeps the last part of ``Pod in version "v1" cannot be handled as a Pod: ...``, which holds the reason."""
    reason = re.sub(r"^.*cannot be handled as an? \w+: ", "", message, flags=re.DOTALL)
    return short(re.sub(r"error found in #\d+ byte of .*$", "", reason, flags=re.DOTALL).strip(" ,"))


def short(text: str, limit: int = 240) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
