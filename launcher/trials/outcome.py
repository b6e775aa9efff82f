"""Reduces everything known of an ended attempt to one status and one reason. Pure.

The inputs are the backend's state of the job, rank 0's ``result.json``, and each failing rank's ``failure-<rank>.json``. When one rank
fails its peers fail a moment later with a lost connection, so the reason is the one that cannot be a consequence of the others.

A result "done" counts if failing ranks failed in their shutdown: our own ranks write it when each has given its measurements. Another
trainer's ranks are observed one by one, and one of them tells the result: if a rank failed while others went on, its layout was not
measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.trials.job import JobState
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.records.trial_files import attempt_of, outcome_of, positive, reason_of
from trainer.shared.run import steady

ROOT_CAUSES = (
    Reason.OUT_OF_MEMORY, Reason.HOST_MEMORY, Reason.NUMERICS, Reason.CONFIGURATION, Reason.CANNOT_START, Reason.UPSTREAM,
    Reason.CANNOT_WIN, Reason.MEASURED, Reason.CANCELLED, Reason.PREEMPTED, Reason.TIME_LIMIT, Reason.NODE, Reason.ERROR,
    Reason.COMMUNICATION,
)  # fmt: skip
"""Every reason, from the one that explains all others to the one that others explain."""

_STOPPED = (Reason.CANCELLED, Reason.CANNOT_WIN)

_LAST_LINES = 2
"""Steps that may be recorded after a rank of all steps ended: a step is dated when the next is told, and the last line may be late."""


@dataclass(frozen=True)
class RankReports:
    """Steps that one rank of another trainer reported."""

    lines: tuple[Mapping[str, Any], ...]  # of ``metrics.jsonl``
    whole: bool  # they are all that it was to run


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


def decide(
    attempt: int,
    state: JobState,
    result: dict[str, Any] | None,
    failures: Sequence[dict[str, Any]] = (),
    told: RankReports | None = None,
) -> Verdict:
    """Returns the verdict on ``attempt``, ignoring older files. ``told``: another trainer's steps; None: our ranks wrote the result."""
    newest = max([attempt, state.attempt or 0, *(attempt_of(f) for f in failures), attempt_of(result or {})])
    if result is not None and attempt_of(result) < newest:
        result = None
    words = [failure for failure in failures if attempt_of(failure) == newest]
    if result is not None and outcome_of(result)[0] is Status.DONE:
        if not _incomplete(state, result, words, told):
            remarks = [_of_shutdown(state, words), str(result.get("message") or "")]
            return Verdict(Status.DONE, outcome_of(result)[1], "; ".join(filter(None, remarks)), newest)
        result = None
    if result is not None and outcome_of(result)[0] is Status.STOPPED:  # the place knows best why it asked the trainer to stop
        reason = state.reason or outcome_of(result)[1] or Reason.PREEMPTED
        return Verdict(Status.STOPPED, reason, state.detail or str(result.get("message") or ""), newest)
    causes = [_of_rank(failure) for failure in words]
    if result is not None:
        causes.append(_cause(result))
    if state.reason is not None:
        causes.append((state.reason, state.detail))
    if not causes:
        return Verdict(Status.FAILED, Reason.ERROR, state.detail or "ended without a result; its log may say why", newest)
    reason, detail = _first(causes)
    return Verdict(Status.STOPPED if reason in _STOPPED else Status.FAILED, reason, detail, newest)


def all_said(attempt: int, state: JobState, result: dict[str, Any] | None, failures: Sequence[dict[str, Any]]) -> bool:
    """Returns whether an ended attempt's files are complete: a result, or a cause other than lost peers; or no rank that could start."""
    newest = max(attempt, state.attempt or 0)
    words = [*failures, *([result] if result is not None else [])]
    said = [reason_of(data) for data in words if attempt_of(data) >= newest]
    return state.reason is Reason.CANNOT_START or any(reason is not Reason.COMMUNICATION for reason in said)


def silent_nodes(nodes: Sequence[str], world_size: int, attempt: int, failures: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Returns nodes, in rank order, whose ranks all fell silent when others lost their connections: power or network is gone there."""
    per_node = -(-world_size // max(1, len(nodes)))
    of_attempt = [failure for failure in failures if attempt_of(failure) == attempt]
    spoke = {rank // per_node for failure in of_attempt if isinstance(rank := failure.get("rank"), int)}
    lost = any(failure.get("reason") == Reason.COMMUNICATION.value for failure in of_attempt)
    return tuple(node for index, node in enumerate(nodes) if index not in spoke) if lost else ()


def _incomplete(state: JobState, result: dict[str, Any], failures: Sequence[dict[str, Any]], told: RankReports | None) -> bool:
    """Returns whether a result "done" lacks the part of a rank."""
    if told is None or outcome_of(result)[1] is Reason.MEASURED:  # those whose steps were enough were ended
        return False
    if not told.whole and (failures or state.status is Status.FAILED):
        return True
    return any(sum(_after(failure, line) for line in told.lines) > _LAST_LINES for failure in failures)


def _after(failure: Mapping[str, Any], line: Mapping[str, Any]) -> bool:
    """Returns whether a step was recorded after a rank failed. Dates are compared across machines only."""
    passed = steady.age(failure.get("clock"), line.get("clock"))
    if passed is not None:
        return passed > 0
    end = positive(failure.get("time"))
    return end is None or (positive(line.get("time")) or 0.0) > end


def _of_shutdown(state: JobState, failures: Sequence[dict[str, Any]]) -> str:
    """Returns a remark on a finished run: its late failure, or the backend's words."""
    if state.status is Status.DONE and not failures:
        return state.detail
    if failures or (state.status is Status.FAILED and state.reason in (None, Reason.ERROR)):
        said = _first([_of_rank(failure) for failure in failures])[1] if failures else state.detail
        return f"after the last step: {said}" if said else ""
    return ""


def _first(causes: Sequence[tuple[Reason, str]]) -> tuple[Reason, str]:
    """The one that explains the others; the first of equals, for failures come by rank."""
    return min(causes, key=lambda cause: ROOT_CAUSES.index(cause[0]))


def _of_rank(failure: dict[str, Any]) -> tuple[Reason, str]:
    return _cause(failure, f"rank {failure.get('rank')}: ")


def _cause(data: dict[str, Any], prefix: str = "") -> tuple[Reason, str]:
    reason = reason_of(data)
    message = str(data.get("message") or reason.value)
    return reason, message if message.startswith(prefix.strip()) else prefix + message
