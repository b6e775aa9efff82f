"""Maps exceptions to failure reasons: one file per failed rank, one root cause per run."""

from __future__ import annotations

import re
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from trainer.launch.rank_env import RankEnv
from trainer.shared.records.manifest import CheckpointError
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.records.trial_files import (
    EXIT_FAILED,
    RESULT,
    attempt_of,
    failure_file,
    failures_in,
    reason_of,
    write_outcome,
)
from trainer.shared.run import steady
from trainer.shared.run.errors import ConfigError

RECORDING = threading.RLock()
"""Held while a rank writes down why it ends: one thread does."""


class OverBudget(RuntimeError):
    """Counted tensor bytes exceed ``run.memory_gb``."""


class NonFinite(RuntimeError):
    """The loss or the gradient norm is not a number, or infinite."""


class CommunicationError(RuntimeError):
    """A collective failed or did not complete in time. ``collective`` names it: ``all_reduce over tensor``."""

    def __init__(self, message: str, collective: str):
        super().__init__(message)
        self.collective = collective


class Hung(RuntimeError):
    """This rank waits in no collective, and others wait for it."""


class TrainerFailure(RuntimeError):
    """Another trainer's command failed, for ``reason``. ``reports``: on the rank that writes the run's result."""

    def __init__(self, reason: Reason, message: str):
        super().__init__(message)
        self.reason = reason
        self.reports = True


@dataclass(frozen=True)
class Failure:
    """Why one rank ended."""

    reason: Reason
    message: str
    collective: str | None = None


def classify(error: BaseException) -> Failure:
    """The reason for ``error``, with its first line as the message."""
    lines = str(error).strip().splitlines()
    message = lines[0] if lines else type(error).__name__
    kind = type(error).__name__
    if isinstance(error, ConfigError):
        return Failure(Reason.CONFIGURATION, message)
    if isinstance(error, (CheckpointError, TrainerFailure)):
        return Failure(error.reason, message)
    if isinstance(error, CommunicationError):
        return Failure(Reason.COMMUNICATION, message, error.collective)
    if isinstance(error, Hung):
        return Failure(Reason.NODE, message)
    if isinstance(error, NonFinite):
        return Failure(Reason.NUMERICS, message)
    if isinstance(error, OverBudget) or kind == "OutOfMemoryError":
        return Failure(Reason.OUT_OF_MEMORY, message)
    if isinstance(error, MemoryError):
        return Failure(Reason.HOST_MEMORY, message if message != kind else "the host has no memory left")
    if refused := re.search(r"DefaultCPUAllocator.*tried to allocate (\d+) bytes", str(error), re.DOTALL):
        return Failure(Reason.HOST_MEMORY, f"the host does not grant {int(refused[1]) / 1e9:.3g} GB more at once")
    if kind.startswith("Dist") and kind.endswith("Error"):
        return Failure(Reason.COMMUNICATION, message)
    return Failure(Reason.ERROR, f"{kind}: {message}")


def write_failure(directory: Path, attempt: int, rank: int, failure: Failure) -> None:
    """``failure-<rank>.json``. ``time``, unix seconds, and ``clock``: whether the run was over by then (``launcher.trials.outcome``)."""
    said = {"reason": failure.reason.value, "message": failure.message, "collective": failure.collective}
    write_outcome(directory / failure_file(rank), {"attempt": attempt, "rank": rank, **said, "time": time.time(), "clock": steady.mark()})


def root_cause(directory: Path, attempt: int, own: Failure, patience_s: float = 1.0) -> Failure:
    """Returns the failure that explains the others; waits ``patience_s`` for a better reason if this rank failed in a collective."""
    if own.reason is not Reason.COMMUNICATION:
        return own
    deadline = time.monotonic() + patience_s
    while True:
        for data in failures_in(directory):
            reason = reason_of(data)
            if attempt_of(data) == attempt and reason is not Reason.COMMUNICATION:
                return Failure(reason, f"rank {data.get('rank')}: {data.get('message')}", data.get("collective"))
        if time.monotonic() >= deadline:
            return own
        time.sleep(0.05)


def record_failure(error: BaseException, env: RankEnv, out: Path, attempt: int) -> int:
    """Records and prints why this rank failed, and on rank 0 why the run failed; returns the exit code."""
    with RECORDING:
        return _record(error, env, out, attempt)


def _record(error: BaseException, env: RankEnv, out: Path, attempt: int) -> int:
    failure = classify(error)
    write_failure(out, attempt, env.rank, failure)
    wrong_input = isinstance(error, ConfigError)
    if wrong_input or isinstance(error, (TrainerFailure, Hung)):
        print(f"error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    if env.rank == 0 and (not isinstance(error, TrainerFailure) or error.reports):  # else another rank's word on the run may be there
        cause = root_cause(out, attempt, failure)
        write_outcome(
            out / RESULT,
            {
                "status": Status.FAILED.value,
                "reason": cause.reason.value,
                "message": cause.message,
                "attempt": attempt,
                "world_size": env.world_size,
            },
        )
    return ConfigError.exit_code if wrong_input else EXIT_FAILED
