"""Judges the state of a job from everything the API server says of it at one moment. Pure.

A job is a gang: it runs when all of its pods run, is done when all are done, and has failed as soon as one pod can no longer do its part.
The reason is that of the pod which explains the others: when one is evicted, its peers lose their connection and fail too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.backends.kubernetes.causes import (
    DELETED,
    OWN,
    Cause,
    Object,
    cause_of,
    condition,
    container_of,
    deleted_in,
    index_of,
    name_of,
    refusal,
    running,
    seconds,
    succeeded,
    words_for_waiting,
)
from launcher.backends.kubernetes.errors import explain_refusal
from launcher.backends.kubernetes.workloads import WorkloadKind, outcome
from launcher.trials.job import JobState
from trainer.shared.records.outcome import Reason, Status

SETTLE = 20.0
"""Seconds for which running peers of a failed pod are left alone: they may be about to report the reason."""


@dataclass(frozen=True)
class Observed:
    """Holds the objects known of one job."""

    count: int  # pods it has when whole
    root: Object | None  # the Service that owns everything else
    workload: Object | None  # the Job, JobSet, ... that makes the pods; None for plain pods, and when there is none (any more)
    pods: Sequence[Object]
    gone: frozenset[str] = frozenset()  # uids of pods that were deleted, in ``pods`` as last seen
    events: Sequence[Object] = ()


def state_of(kind: WorkloadKind, job: Observed, now: float, fault_timeout: float) -> JobState:
    """Status, reason and words. ``now`` is the server's time in unix seconds."""
    if job.root is None:
        return JobState(Status.FAILED, Reason.NODE, "its objects were deleted from the namespace by somebody else")
    pods = _newest(job.pods, job.gone)
    word, reason, message = outcome(kind, job.workload or {})
    started, nodes = _started(pods), tuple(pod["spec"].get("nodeName") or "" for pod in pods)
    if word == "complete" or (len(pods) == job.count and all(map(succeeded, pods))):
        return JobState(Status.DONE, None, _crowded(nodes), started, nodes)
    suspended = word == "suspended" or (not pods and kind.kind != "Pod" and _wants_suspension(job.workload))
    if suspended:
        return JobState(Status.SUBMITTED, None, message or "suspended: waits for its queue to admit it", None, nodes)
    found = [cause_of(pod, pod["metadata"]["uid"] in job.gone, _about(pod, job.events), now, fault_timeout) for pod in pods]
    causes = [cause for cause in found if cause is not None]
    peers = [pod for pod, cause in zip(pods, found) if cause is None and running(pod)]
    given_up = _given_up(kind, job, word, reason, message, now, fault_timeout)
    if not causes and given_up is None:
        return _alive(job, pods, started, nodes)
    if peers and _unsettled(causes, now):
        first = min(causes, key=_order).detail if causes else message
        return JobState(Status.RUNNING, None, f"failing, waiting for the other pods: {first}", started, nodes)
    cause = _blame(min([*causes, *([given_up] if given_up else [])], key=_order), causes)
    bad = tuple(sorted({c.bad_node for c in causes if c.bad_node}))
    return JobState(Status.STOPPED if cause.stopped else Status.FAILED, cause.reason, cause.detail, started, nodes, bad_nodes=bad)


def _newest(pods: Sequence[Object], gone: frozenset[str]) -> list[Object]:
    """One pod per index, by index: those that exist before those that are gone, then the younger (a queue may suspend and resume)."""
    ordered = sorted(pods, key=lambda pod: (pod["metadata"]["uid"] not in gone, pod["metadata"].get("creationTimestamp") or ""))
    return [pod for _, pod in sorted({index_of(pod): pod for pod in ordered}.items())]


def _started(pods: Sequence[Object]) -> float | None:
    """When the last of the pods began, if all have."""
    states = [container_of(pod) for pod in pods]
    begun = [seconds((state.get("running") or state.get("terminated") or {}).get("startedAt")) for state in states]
    known = [stamp for stamp in begun if stamp]  # a container that could not start says 1970
    return max(known) if known and len(known) == len(pods) else None


def _about(pod: Object, events: Sequence[Object]) -> list[Object]:
    uid, name = pod["metadata"]["uid"], name_of(pod)
    return [e for e in events if (e.get("involvedObject") or {}).get("uid") == uid or deleted_in(e) == name]


def _wants_suspension(workload: Object | None) -> bool:
    return bool(((workload or {}).get("spec") or {}).get("suspend"))


def _given_up(kind: WorkloadKind, job: Observed, word: str, reason: str, message: str, now: float, fault_timeout: float) -> Cause | None:
    """Returns the workload's own report: failed, pods refused, or nothing if it is absent."""
    if kind.kind != "Pod" and job.workload is None:
        return Cause(2, Reason.NODE, f"its {kind.kind} was deleted by somebody else")
    if kind.kind == "Pod" and len(job.pods) < job.count:
        return Cause(2, Reason.NODE, f"{job.count - len(job.pods)} of its {job.count} pods were deleted by somebody else")
    if word == "failed":
        limit = reason == "DeadlineExceeded"
        return Cause(0 if limit else 3, Reason.TIME_LIMIT if limit else None, f"{kind.kind} failed: {reason}: {message}".rstrip(": "))
    created = seconds(job.workload["metadata"].get("creationTimestamp")) if job.workload else None
    for event in job.events:
        refused = refusal(event)
        if refused is None or len(job.pods) >= job.count:
            continue
        words, may_pass = refused
        patient = may_pass and ("exceeded quota" in words or not fault_timeout or now - (created or now) < fault_timeout)
        if not patient:
            return Cause(0, Reason.CANNOT_START, explain_refusal(words, (job.root or {})["metadata"].get("namespace", "")))
    return None


def _unsettled(causes: Sequence[Cause], now: float) -> bool:
    """Returns whether the running peers of a failed pod get a moment longer, counted from the first failure."""
    if any(cause.reason is Reason.CANNOT_START for cause in causes):
        return False
    ends = [cause.ended for cause in causes if cause.ended is not None]
    return bool(ends) and now - min(ends) < SETTLE


def _order(cause: Cause) -> tuple[int, bool, float]:
    """Orders causes: by weight, then failures before orderly stops, then the earliest."""
    return cause.weight, cause.stopped, (cause.deleted if cause.weight == DELETED else cause.ended) or 0.0


def _blame(cause: Cause, causes: Sequence[Cause]) -> Cause:
    """Returns ``cause``, unless another pod's deletion, listed before it, led to it: peers of a deleted pod fail before it has ended."""
    first = min((c for c in causes if c.deleted is not None), key=lambda c: c.deleted or 0.0, default=None)
    if first is None or first is cause or cause.weight == OWN or (first.deleted or 0.0) > (cause.ended or math.inf):
        return cause
    return dataclasses.replace(cause, reason=cause.reason or Reason.NODE, detail=f"{first.detail}; {cause.detail}")


def _alive(job: Observed, pods: Sequence[Object], started: float | None, nodes: tuple[str, ...]) -> JobState:
    """Returns the state of a job without failures: running, or waiting and for which reason."""
    at_work = sum(running(pod) or succeeded(pod) for pod in pods)
    silent = [pod for pod in pods if running(pod) and condition(pod, "Ready", "False") and _lost_sight(pod, job.events)]
    if at_work == job.count:
        words = f"node {silent[0]['spec'].get('nodeName')} of pod {name_of(silent[0])} does not answer" if silent else _crowded(nodes)
        return JobState(Status.RUNNING, None, words, started, nodes)
    waiting = [words_for_waiting(pod, _about(pod, job.events)) for pod in pods if not running(pod) and not succeeded(pod)]
    refused = [words for event in job.events if (told := refusal(event)) and (words := told[0])]
    said = next((words for words in [*refused[-1:], *waiting] if words), "waiting for its pods")
    some = f"{at_work} of {job.count} pods run; " if at_work else ""
    return JobState(Status.SUBMITTED, None, some + said, None, nodes)


def _crowded(nodes: Sequence[str]) -> str:
    """Notes that pods share nodes (``cluster.spread=false``), contrary to the layout."""
    hosts = set(nodes)
    return f"its {len(nodes)} pods share {len(hosts)} node{'s' if len(hosts) > 1 else ''}" if len(hosts) < len(nodes) else ""


def _lost_sight(pod: Object, events: Sequence[Object]) -> bool:
    """Ready=False because the node fell silent, not because a probe failed."""
    ready = condition(pod, "Ready", "False") or {}
    return ready.get("reason") in (None, "NodeNotReady", "NodeStatusUnknown") and any(
        e.get("reason") == "NodeNotReady" for e in _about(pod, events)
    )
