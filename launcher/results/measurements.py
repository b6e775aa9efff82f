"""Reads a trial's directory for ranking, report and mirror.

Files may be missing, half written or damaged (a trial may die at any moment): unreadable ones count as absent.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from launcher.results.ranking import Measurement, measurement
from launcher.trials.spent import gpu_hours
from launcher.trials.store import Record
from trainer.shared.records.trial_files import TIMELINE, attempt_of, failures_in, positive, read_steps
from trainer.shared.run.files import read_json


def measure(records: Iterable[Record]) -> list[Measurement]:
    """One measurement for each record, in order. A trial without a result is measured by the steps that it wrote so far."""
    return [measurement(record, record.read_result() or summary(record), gpu_hours(record)) for record in records]


def summary(record: Record) -> dict[str, Any]:
    """The part of ``result.json`` that can be told from ``metrics.jsonl`` alone; empty before the first step after warm-up."""
    warmup = record.config.get("run", {}).get("warmup_steps", 0)
    steps = [s for s in read_steps(record.directory) if s["step"] > warmup and positive(s.get("step_time_s"))]
    if not steps:
        return {}
    times = [float(s["step_time_s"]) for s in steps]
    quartiles = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [0.0, 0.0, 0.0]
    rates = [s["tokens_per_s"] for s in steps if positive(s.get("tokens_per_s"))]
    return {
        "step_times_s": [0.0] * warmup + times,
        "step_time_s": statistics.median(times),
        "step_time_spread_s": quartiles[2] - quartiles[0],
        "tokens_per_s": statistics.median(rates) if rates else None,
    }


def read_timeline(directory: Path) -> dict[str, Any]:
    return read_json(directory / TIMELINE) or {}


def newest_logs(directory: Path) -> list[Path]:
    """The logs of the newest attempt, those of ranks that say they failed first, then by rank."""
    logs = list(directory.glob("logs/attempt*.rank*.log"))
    newest = max((_attempt_and_rank(log)[0] for log in logs), default=0)
    failed = {f.get("rank") for f in failures_in(directory) if attempt_of(f) == newest}
    chosen = [log for log in logs if _attempt_and_rank(log)[0] == newest]
    return sorted(chosen, key=lambda log: (_attempt_and_rank(log)[1] not in failed, _attempt_and_rank(log)[1]))


def tail(path: Path, at_most: int) -> str:
    """The last ``at_most`` bytes of a text file, without reading the rest of it; empty when it is gone."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - at_most))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def _attempt_and_rank(log: Path) -> tuple[int, int]:
    numbers = [int("".join(c for c in part if c.isdigit()) or 0) for part in log.name.split(".")[:2]]
    return numbers[0], numbers[-1]
