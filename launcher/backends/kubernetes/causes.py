"""Explains why a pod ended, will never start, or does not start yet, in the shared reasons and Kubernetes' own words. Pure.

The words were collected from real servers and kubelets, 1.20 and 1.36. A pod reports in five places: its status, its conditions, its
container's state, its deletion, and the events about it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from launcher.backends.kubernetes.manifests import CONTAINER
from trainer.shared.records.outcome import Reason
from trainer.shared.records.trial_files import EXIT_REFUSED, EXIT_STOPPED

Object = dict[str, Any]

_INDEX = "batch.kubernetes.io/job-completion-index"
"""Annotation of the pods of an Indexed Job."""

_CONFIRMATION = 30.0
"""Seconds past the end of its grace period after which a node is lost that has not confirmed the end of a pod."""

OWN, ENDED, DELETED = range(3)
"""Order of how well a cause explains a failed gang: an action on the pod, its own end, its deletion (mostly a consequence)."""

HOPELESS = {
    "InvalidImageName": "correct cluster.container.image",
    "ErrImageNeverPull": "load the image onto the nodes, or set cluster.pull_policy=IfNotPresent",
}
"""Waiting reasons that no time cures, with the remedy."""
FAULTS = {
    "ErrImagePull": "check cluster.container.image and cluster.pull_secrets",
    "ImagePullBackOff": "check cluster.container.image and cluster.pull_secrets",
    "CreateContainerConfigError": "create the missing object, or correct cluster.secrets and cluster.volumes",
    "CreateContainerError": "check the image and cluster.container",
    "RunContainerError": "check the image and cluster.python",
    "CrashLoopBackOff": "set restartPolicy back to Never",
    "FailedMount": "create the missing object, or correct cluster.volumes",
    "FailedAttachVolume": "check cluster.volumes",
    "FailedCreatePodSandBox": "look at the node's container runtime",
}
"""Waiting reasons and events that time seldom cures: given up after ``cluster.fault_timeout``."""
NODE_WAITS = "cache: timed out waiting for the condition"
"""Words of a node that has not heard of a secret or a config map yet, whether there is one or not: it asks again by itself."""
_BEFELL = {
    "Preempting": Reason.PREEMPTED,
    "PreemptionByScheduler": Reason.PREEMPTED,
    "EvictionByEvictionAPI": Reason.PREEMPTED,
    "DeletionByTaintManager": Reason.NODE,
    "DeletionByPodGC": Reason.NODE,
    "TerminationByKubelet": Reason.NODE,
    "NodeLost": Reason.NODE,
    "NodeShutdown": Reason.NODE,
    "Shutdown": Reason.NODE,
    "Terminated": Reason.NODE,
    "UnexpectedAdmissionError": Reason.NODE,
    "NodeAffinity": Reason.NODE,
    "DeadlineExceeded": Reason.TIME_LIMIT,
}
"""Reasons of a pod's status and of its condition DisruptionTarget."""
_OWN_LIMIT = re.compile(
    r"exceeds the total limit of containers|exceeded its local ephemeral storage limit|EmptyDir volume .* exceeds the limit"
)
"""Kubelet messages for a pod over its own limits, which any node would evict (pkg/kubelet/eviction/eviction_manager.go)."""
_NEVER_BEGAN = ("StartError", "ContainerCannotRun")
"""Ends of a container whose process could not be started."""
_EVENTS = {"Preempted": Reason.PREEMPTED, "TaintManagerEviction": Reason.NODE}


@dataclass(frozen=True)
class Cause:
    """Explains why a pod can no longer do its part. ``reason`` is None if only the files of its ranks can tell."""

    weight: int
    reason: Reason | None
    detail: str
    stopped: bool = False  # after a checkpoint: may be resumed
    ended: float | None = None  # unix seconds
    bad_node: str | None = None  # the node, where the fault is its
    deleted: float | None = None  # unix seconds when its deletion was asked for, by somebody; infinite: by the controller of its workload


def name_of(pod: Object) -> str:
    return str(pod["metadata"]["name"])


def index_of(pod: Object) -> int:
    """Returns the pod's node index: as an Indexed Job notes it, else the number at the end of its hostname."""
    noted = (pod["metadata"].get("annotations") or {}).get(_INDEX)
    if noted is not None:
        return int(noted)
    match = re.search(r"-(\d+)$", pod["spec"].get("hostname") or name_of(pod))
    return int(match[1]) if match else 0


def container_of(pod: Object) -> Object:
    """Returns the state of the ranks' container, found by name, since a service mesh adds its own; ``{"running": {...}}``, or empty."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    own = next((status for status in statuses if status.get("name") == CONTAINER), statuses[0] if len(statuses) == 1 else {})
    return dict(own.get("state") or {})


def running(pod: Object) -> bool:
    """Its process runs. A pod that has failed at its deadline may still say so of its container."""
    return "running" in container_of(pod) and (pod.get("status") or {}).get("phase") not in ("Failed", "Succeeded")


def unplaced(pod: Object) -> bool:
    """The scheduler has looked, and found no node with room for it."""
    return (condition(pod, "PodScheduled", "False") or {}).get("reason") == "Unschedulable" and not ended(pod)


def begun(pod: Object) -> bool:
    """Its process has started, and perhaps ended: there is a log."""
    state = container_of(pod)
    return "running" in state or ("terminated" in state and state["terminated"].get("reason") not in _NEVER_BEGAN)


def ended(pod: Object) -> bool:
    """Its process has ended, or will never start."""
    return "terminated" in container_of(pod) or (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")


def lost(pod: Object, now: float) -> bool:
    """It should have ended, and its node does not confirm that it has."""
    deleted = seconds(pod["metadata"].get("deletionTimestamp"))
    return deleted is not None and now > deleted + _CONFIRMATION and not ended(pod)


def succeeded(pod: Object) -> bool:
    """By the exit code: a pod may be called OOMKilled for a child that died, and have done its work all the same."""
    ended = container_of(pod).get("terminated")
    return ended.get("exitCode") == 0 if ended else (pod.get("status") or {}).get("phase") == "Succeeded"


def cause_of(pod: Object, gone: bool, events: Sequence[Object], now: float, fault_timeout: float) -> Cause | None:
    """Returns why ``pod`` can no longer do its part; None while it can. ``events`` are those about it, ``gone``: it was deleted."""
    cause = _cause_of(pod, gone, events, now, fault_timeout)
    return replace(cause, deleted=_deleted(pod, gone, events)) if cause else None


def deleted_in(event: Object) -> str:
    """Returns the pod that a controller says it has deleted."""
    match = re.match(r"Deleted pod: (\S+)", event.get("message") or "") if event.get("reason") == "SuccessfulDelete" else None
    return match[1] if match else ""


def _deleted(pod: Object, gone: bool, events: Sequence[Object]) -> float | None:
    head = pod["metadata"]
    until = seconds(head.get("deletionTimestamp"))  # the end of its grace period
    if until is None and not gone:
        return None
    if any(deleted_in(event) == head["name"] for event in events):
        return math.inf
    return 0.0 if until is None else until - float(head.get("deletionGracePeriodSeconds") or 0)


def _cause_of(pod: Object, gone: bool, events: Sequence[Object], now: float, fault_timeout: float) -> Cause | None:
    if succeeded(pod):
        return None
    end = container_of(pod).get("terminated") or {}
    at = seconds(end.get("finishedAt"))
    befallen = _befallen(pod, events)
    if befallen is not None and (end or gone or (pod.get("status") or {}).get("phase") == "Failed"):
        reason, words = befallen
        bad_node = pod["spec"].get("nodeName") if reason is Reason.NODE else None
        return Cause(OWN, reason, _told(pod, words), end.get("exitCode") == EXIT_STOPPED, at, bad_node)
    if end:
        return _end(pod, end, gone, at)
    deleted = seconds(pod["metadata"].get("deletionTimestamp"))
    status = pod.get("status") or {}
    failed = status.get("phase") == "Failed"
    if gone or (
        failed and deleted is not None and not status.get("reason")
    ):  # a kubelet may forget the container before it says how it ended
        return Cause(DELETED, Reason.NODE, _told(pod, "was deleted"), ended=deleted)
    if failed:
        words = f"{status.get('reason') or 'failed'}: {line(status.get('message')) or 'its node gave no reason'}"
        return Cause(OWN, Reason.NODE, _told(pod, words), bad_node=pod["spec"].get("nodeName"))
    if lost(pod, now):
        words = "its node does not answer, and did not confirm that the pod has ended"
        return Cause(OWN, Reason.NODE, _told(pod, words), ended=deleted, bad_node=pod["spec"].get("nodeName"))
    return _stuck(pod, events, now, fault_timeout)


def words_for_waiting(pod: Object, events: Sequence[Object]) -> str:
    """Describes why a pod has not started, in Kubernetes' words."""
    waiting = container_of(pod).get("waiting") or {}
    unplaced = condition(pod, "PodScheduled", "False")
    if unplaced is not None:
        return f"{unplaced.get('reason') or 'not placed'}: {line(unplaced.get('message')) or 'waiting for a node'}"
    fault = _fault(pod, events)
    if fault is not None:
        return f"{fault[0]}: {fault[1]}"
    return waiting.get("reason") or ""


def condition(obj: Object, kind: str, status: str = "True") -> Object | None:
    """The condition of that type, if it has that status."""
    found = [c for c in (obj.get("status") or {}).get("conditions") or [] if c.get("type") == kind and c.get("status") == status]
    return found[0] if found else None


def seconds(stamp: str | None) -> float | None:
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp() if stamp else None


def line(text: str | None) -> str:
    flat = " ".join((text or "").split())
    return flat if len(flat) <= 300 else flat[:297] + "..."


def refusal(event: Object) -> tuple[str, bool] | None:
    """A controller's FailedCreate: the words, and whether waiting may help (a used-up quota is freed, a forbidden pod stays forbidden)."""
    if event.get("reason") != "FailedCreate":
        return None
    message = line(event.get("message"))
    return message, "exceeded quota" in message or "is forbidden" not in message


def _told(pod: Object, words: str) -> str:
    node = pod["spec"].get("nodeName")
    return f"pod {name_of(pod)}{f' on {node}' if node else ''}: {words}"


def _befallen(pod: Object, events: Sequence[Object]) -> tuple[Reason, str] | None:
    """Returns the cluster's action on the pod: evicted, preempted, or its node lost."""
    status = pod.get("status") or {}
    word, message = status.get("reason") or "", line(status.get("message"))
    if word == "Evicted" and _OWN_LIMIT.search(message):
        remedy = "write less there, put cluster.run_dir on a volume, or raise the limit (a LimitRange may set it)"
        return Reason.CONFIGURATION, f"Evicted: {message}; {remedy}"
    if word == "Evicted":
        return (Reason.HOST_MEMORY if "memory" in message else Reason.NODE), f"Evicted: {message}"
    if word in _BEFELL or word.startswith("OutOf"):
        return _BEFELL.get(word, Reason.NODE), f"{word}: {message}" if message else word
    disruption = condition(pod, "DisruptionTarget")
    if disruption is not None:
        word = disruption.get("reason") or ""
        return _BEFELL.get(word, Reason.NODE), f"{word}: {line(disruption.get('message'))}"
    for event in events:
        if event.get("reason") in _EVENTS and "Cancelling" not in (event.get("message") or ""):
            return _EVENTS[event["reason"]], f"{event['reason']}: {line(event.get('message'))}"
    return None


def _end(pod: Object, end: Object, gone: bool, at: float | None) -> Cause:
    """From the exit of the pod's process."""
    code, word, message = end.get("exitCode"), end.get("reason") or "", line(end.get("message"))
    if word == "OOMKilled":
        return Cause(OWN, Reason.HOST_MEMORY, _told(pod, f"OOMKilled (exit code {code}); raise cluster.memory"), ended=at)
    if word in _NEVER_BEGAN:
        return Cause(OWN, Reason.CANNOT_START, _told(pod, f"{word}: {message}; check the image and cluster.python"), ended=at)
    weight = DELETED if gone or pod["metadata"].get("deletionTimestamp") else ENDED
    if code == EXIT_STOPPED:
        told = "was deleted" if weight == DELETED else "told to stop"
        return Cause(weight, Reason.PREEMPTED, _told(pod, f"{told}, and stopped after a checkpoint"), stopped=True, ended=at)
    if weight == DELETED:
        return Cause(weight, Reason.NODE, _told(pod, f"was deleted (exit code {code})"), ended=at)
    reason = Reason.CONFIGURATION if code == EXIT_REFUSED else None
    return Cause(weight, reason, _told(pod, f"exit code {code}"), ended=at)


def _stuck(pod: Object, events: Sequence[Object], now: float, fault_timeout: float) -> Cause | None:
    """A pod that has not started, and will not without help."""
    if running(pod):
        return None
    fault = _fault(pod, events)
    if fault is None:
        return None
    word, words = fault
    detail = _told(pod, f"{word}: {words}")
    if word in HOPELESS:
        return Cause(OWN, Reason.CANNOT_START, f"{detail}; {HOPELESS[word]}")
    placed = condition(pod, "PodScheduled")
    since = seconds(placed.get("lastTransitionTime")) if placed else None
    if since is None or not fault_timeout or now - since < fault_timeout:
        return None
    return Cause(OWN, Reason.CANNOT_START, f"{detail} (for {now - since:.0f} s); {FAULTS[word]}")


def _fault(pod: Object, events: Sequence[Object]) -> tuple[str, str] | None:
    """The fault a waiting pod is in: its own word for it, or that of the events about it while it only says ContainerCreating."""
    waiting = container_of(pod).get("waiting") or {}
    word = waiting.get("reason") or ""
    if NODE_WAITS in (waiting.get("message") or ""):
        return None
    if word in HOPELESS or word in FAULTS:
        return word, line(waiting.get("message")) or "no reason was given"
    for event in reversed(events):
        if NODE_WAITS in (event.get("message") or ""):
            continue
        if event.get("reason") in FAULTS and word in ("ContainerCreating", "PodInitializing", ""):
            return event["reason"], line(event.get("message"))
    return None
