"""Short words for a person about how a trial stands. Shared by progress and ``trireme status``."""

from __future__ import annotations

import time

from launcher.labels import seconds
from launcher.sweep.store import Record
from trainer.config import Status


def state(record: Record) -> str:
    """``failed: out of memory``."""
    return record.status.value + (f": {record.reason.value}" if record.reason else "")


def elapsed_s(record: Record) -> float | None:
    """Seconds from the start (or submission) of the newest attempt to its end, or to now; None before the first."""
    began = record.started or record.submitted
    return None if began is None else max(0.0, (record.ended or time.time()) - began)


def duration(value: float | None) -> str:
    """``1:15`` or ``1:01:40``: minutes and seconds, hours where needed."""
    if value is None:
        return "-"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def total_steps(record: Record) -> int | None:
    """Steps that the trial is to make."""
    steps = record.config.get("run", {}).get("steps")
    return steps if isinstance(steps, int) else None


def step(record: Record) -> int | None:
    """The last step that the newest attempt has completed."""
    line = record.last_step() or {}
    value = line.get("step")
    return value if isinstance(value, int) and line.get("attempt", 0) == record.attempt else None


def newest_step(record: Record) -> str:
    """The newest step in words: ``step 7  loss 5.83  41.2 ms``; empty before the first."""
    line = record.last_step() or {}
    if step(record) is None:
        return ""
    loss, step_time = line.get("loss"), line.get("step_time_s")
    words = [f"step {line['step']}"]
    words += [f"loss {loss:.4g}"] if isinstance(loss, (int, float)) else []
    words += [seconds(step_time)] if isinstance(step_time, (int, float)) else []
    return "  ".join(words)


def outcome(record: Record) -> str:
    """How a trial ended: its step time, or the reason and the words that go with it."""
    if record.status is Status.DONE:
        step_time = (record.result() or {}).get("step_time_s")
        return "done" + (f"  {seconds(step_time)} a step" if isinstance(step_time, (int, float)) else "")
    return state(record) + (f" ({record.detail})" if record.detail else "")
