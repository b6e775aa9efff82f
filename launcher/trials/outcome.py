"""From everything known of an ended attempt to one status and one reason. Pure.

Known are: what the backend says of the job, what rank 0 wrote (``result.json``), and what each failing rank wrote
(``failure-<rank>.json``). When one rank fails its peers fail too, a moment later and for a duller reason (a lost
connection), so the reason is the one that cannot be a consequence of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.trials.job import JobState
from trainer.spec import Reason, Status
from trainer.spec.records import attempt_of, outcome_of, reason_of

ROOT_CAUSES = (
    Reason.OUT_OF_MEMORY, Reason.HOST_MEMORY, Reason.NUMERICS, Reason.CONFIGURATION, Reason.CANNOT_START, Reason.UPSTREAM,
    Reason.CANNOT_WIN, Reason.MEASURED, Reason.CANCELLED, Reason.PREEMPTED, Reason.TIME_LIMIT, Reason.NODE, Reason.ERROR,
    Reason.COMMUNICATION,
)  # fmt: skip
"""Every reason, from the one that explains all others to the one that others explain."""

_STOPPED = (Reason.CANCELLED, Reason.CANNOT_WIN)


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended."""

    status: Status
    reason: Reason | None
    detail: str
    attempt: int  # the attempt that ended: the one asked about, or a later one that the place itself began

    @property
    def resumable(self) -> bool:
        """Ended by the place after a checkpoint: the next attempt continues where this one stopped."""
        return self.status is Status.STOPPED and self.reason in (Reason.PREEMPTED, Reason.TIME_LIMIT)

    @property
    def retryable(self) -> bool:
        return self.resumable or (self.reason is not None and self.reason.retryable)


def decide(attempt: int, state: JobState, result: dict[str, Any] | None, failures: Sequence[dict[str, Any]] = ()) -> Verdict:
    """The verdict on ``attempt``. Whatever an older attempt wrote is not looked at."""
    newest = max([attempt, state.attempt or 0, *(attempt_of(f) for f in failures), attempt_of(result or {})])
    if result is not None and attempt_of(result) < newest:
        result = None
    if result is not None and outcome_of(result)[0] is Status.DONE:
        remarks = [state.detail if state.status is Status.DONE else "", str(result.get("message") or "")]
        return Verdict(Status.DONE, outcome_of(result)[1], "; ".join(filter(None, remarks)), newest)
    if result is not None and outcome_of(result)[0] is Status.STOPPED:  # the place knows best why it asked the trainer to stop
        reason = state.reason or outcome_of(result)[1] or Reason.PREEMPTED
        return Verdict(Status.STOPPED, reason, state.detail or str(result.get("message") or ""), newest)
    causes = [_cause(f, f"rank {f.get('rank')}: ") for f in failures if attempt_of(f) == newest]
    if result is not None:
        causes.append(_cause(result))
    if state.reason is not None:
        causes.append((state.reason, state.detail))
    if not causes:
        return Verdict(Status.FAILED, Reason.ERROR, state.detail or "ended without a result; its log may say why", newest)
    reason, detail = min(causes, key=lambda cause: ROOT_CAUSES.index(cause[0]))  # the first of equals: failures come by rank
    return Verdict(Status.STOPPED if reason in _STOPPED else Status.FAILED, reason, detail, newest)


def all_said(attempt: int, state: JobState, result: dict[str, Any] | None, failures: Sequence[dict[str, Any]]) -> bool:
    """Whether the files of an ended attempt are complete, as far as one can know: a result, or a failure with a cause other than lost
    peers. When the backend could not start the ranks, there are none to wait for."""
    newest = max(attempt, state.attempt or 0)
    words = [*failures, *([result] if result is not None else [])]
    said = [reason_of(data) for data in words if attempt_of(data) >= newest]
    return state.reason is Reason.CANNOT_START or any(reason is not Reason.COMMUNICATION for reason in said)


def silent_nodes(nodes: Sequence[str], world_size: int, attempt: int, failures: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Nodes whose ranks all left no word when ranks of other nodes lost their connections: power or network is gone there.

    ``nodes`` are in the order of their ranks, which fill one after the other.
    """
    per_node = -(-world_size // max(1, len(nodes)))
    of_attempt = [failure for failure in failures if attempt_of(failure) == attempt]
    spoke = {rank // per_node for failure in of_attempt if isinstance(rank := failure.get("rank"), int)}
    lost = any(failure.get("reason") == Reason.COMMUNICATION.value for failure in of_attempt)
    return tuple(node for index, node in enumerate(nodes) if index not in spoke) if lost else ()


def _cause(data: dict[str, Any], prefix: str = "") -> tuple[Reason, str]:
    reason = reason_of(data)
    message = str(data.get("message") or reason.value)
    return reason, message if message.startswith(prefix.strip()) else prefix + message
