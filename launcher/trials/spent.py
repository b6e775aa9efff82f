"""The time for which trials held their ranks, and the GPU-hours and money of that."""

from __future__ import annotations

import math
from collections.abc import Callable

from launcher.trials.store import Record
from trainer.shared.records.outcome import Status
from trainer.shared.records.trial_files import positive, read_steps
from trainer.shared.run import steady


def step_seconds(record: Record, wanted: Callable[[int], bool]) -> list[float]:
    """Returns the times of the newest attempt's ``wanted`` steps."""
    steps = [s for s in read_steps(record.directory) if s.get("attempt") == record.attempt and wanted(s["step"])]
    return [seconds for step in steps if (seconds := positive(step.get("step_time_s"))) is not None]


def held_s(record: Record) -> float:
    """Returns seconds that a trial held its ranks, by its dates, bounded by its steps and its age against changed clocks."""
    dated = (record.ended or 0.0) - (record.started or record.ended or 0.0)
    passed = steady.age(record.queue_clock, record.history[-1].get("clock") if record.history else None)
    return min(max(dated, sum(step_seconds(record, lambda _: True))), math.inf if passed is None else passed)


def lost_s(record: Record) -> float:
    """Seconds of attempts that came to nothing, each of which took as many devices as the last one."""
    lost = [entry for entry in record.history if entry.get("attempt", 0) < record.attempt and entry.get("status") != Status.DONE.value]
    return sum(max(0.0, (entry.get("ended") or 0.0) - (entry.get("started") or math.inf)) for entry in lost)


def gpu_hours(record: Record) -> float:
    """Returns the device hours of all attempts so far."""
    return record.world_size * (held_s(record) + lost_s(record)) / 3600
