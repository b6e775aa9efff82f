"""The time that a sweep still takes: predictions, corrected by what its ended trials have measured."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from launcher.trials.labels import elapsed_s, left_s, step, total_steps
from launcher.trials.store import Record
from trainer.shared.records.outcome import Status
from trainer.shared.records.trial_files import positive


@dataclass(frozen=True)
class Pace:
    """Lessons of ended trials for the others: medians over those that are done."""

    ratio: float = 1.0  # of measured to predicted step time
    beside_s: float = 0.0  # seconds of a trial beside its steps: start, warm-up, end
    step_s: float | None = None  # measured step time, for trials without a prediction


def pace(ended: Iterable[Record]) -> Pace:
    """Returns the pace of a sweep's ended trials."""
    ratios, beside, steps = list[float](), list[float](), list[float]()
    for record in ended:
        total, measured = total_steps(record), positive((record.read_result() or {}).get("step_time_s"))
        if record.status is not Status.DONE or record.reason is not None or total is None or measured is None:
            continue
        steps.append(measured)
        beside.append(max(0.0, (elapsed_s(record) or 0.0) - total * measured))
        if (predicted := _predicted_step_s(record)) is not None:
            ratios.append(measured / predicted)
    return Pace(median(ratios) if ratios else 1.0, median(beside) if beside else 0.0, median(steps) if steps else None)


def remaining_s(record: Record, learnt: Pace) -> float | None:
    """Returns the seconds that a trial still needs once it runs: by its own steps, or as expected before the first. None where neither its
    number of steps nor a step time is known."""
    if step(record) and (left := left_s(record)) is not None:
        return left
    predicted, total = _predicted_step_s(record), total_steps(record)
    per_step = learnt.step_s if predicted is None else predicted * learnt.ratio
    if per_step is None or total is None:
        return None
    gone = elapsed_s(record) or 0.0 if record.status is Status.RUNNING else 0.0
    return max(0.0, total * per_step + learnt.beside_s - gone)


def sweep_left_s(records: Sequence[Record], learnt: Pace) -> float | None:
    """Returns the seconds until the last trial has ended, if as many run at once as do now. None while a queue decides when the first
    starts, and where a trial's end cannot be told."""
    open_ones = [record for record in records if not record.status.final]
    waiting = [record for record in open_ones if record.status is not Status.RUNNING]
    running = [record for record in open_ones if record.status is Status.RUNNING]
    if not running and any(record.status is Status.SUBMITTED for record in waiting):
        return None
    needs = {record.id: remaining_s(record, learnt) for record in open_ones}
    known = {name: seconds for name, seconds in needs.items() if seconds is not None}
    if len(known) < len(needs):
        return None
    slots = [known[record.id] for record in running] or [0.0]
    heapq.heapify(slots)
    for record in waiting:
        heapq.heapreplace(slots, slots[0] + known[record.id])
    return max(slots)


def _predicted_step_s(record: Record) -> float | None:
    return positive((record.predicted or {}).get("step_time_s"))
