"""How a trial can stand and why it can fail: one pair of enums for trainer, every backend and the ranking."""

from __future__ import annotations

from enum import Enum


class Status(str, Enum):
    """Where a trial stands. The last four are final."""

    PLANNED = "planned"
    SUBMITTED = "submitted"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    PRUNED = "pruned"
    STOPPED = "stopped"

    @property
    def final(self) -> bool:
        return self in (Status.DONE, Status.FAILED, Status.PRUNED, Status.STOPPED)


class Reason(str, Enum):
    """Why a trial failed, was pruned or stopped."""

    OUT_OF_MEMORY = "out of memory"
    HOST_MEMORY = "host memory"
    COMMUNICATION = "communication"
    NODE = "node"
    CONFIGURATION = "configuration"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time limit"
    NUMERICS = "numerics"
    CANNOT_START = "cannot start"
    CANCELLED = "cancelled"
    CANNOT_WIN = "cannot win"
    ERROR = "error"

    @property
    def retryable(self) -> bool:
        """Faults of the place, not of the trial: worth another attempt elsewhere."""
        return self in (Reason.NODE, Reason.PREEMPTED, Reason.COMMUNICATION)
