"""What a trial left in its directory, read for ranking, report and mirror. Nothing here is written.

Files may be missing, half written or damaged (a trial may die at any moment): what cannot be read is absent, never an error.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.results.ranking import Measurement, measurement, positive
from launcher.sweep.files import read_json

if TYPE_CHECKING:
    from launcher.sweep.store import Record


LAST_STEP = 1 << 53
"""No run has so many steps; a line that says so is damaged."""


def measure(records: Iterable[Record]) -> list[Measurement]:
    """One measurement for each record, in order. A trial without a result is measured by the steps that it wrote so far."""
    return [measurement(record, record.result() or summary(record)) for record in records]


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
    """``timeline.json``, or an empty dict."""
    return read_json(directory / "timeline.json") or {}


def read_failures(directory: Path) -> list[dict[str, Any]]:
    """What each rank said when it failed, newest attempt first, then by rank."""
    found = [read_json(path) for path in directory.glob("failure-*.json")]
    return sorted([f for f in found if f], key=lambda f: (-_whole(f, "attempt"), _whole(f, "rank")))


def read_steps(directory: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` in order of step. Of a step that was run twice (resumption) the later line counts."""
    lines, _ = read_lines(directory / "metrics.jsonl", 0)
    steps = {line["step"]: line for line in lines}
    return [steps[step] for step in sorted(steps)]


def read_lines(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a JSONL file after byte ``offset``, and the offset after the last of them.

    A last line without its end is left for the next call. A file that is missing or shorter than ``offset`` was started anew
    and is read from its beginning. Lines that are not an object with a ``step`` are passed over.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset if offset <= path.stat().st_size else 0)
            start = file.tell()
            data = file.read()
    except OSError:
        return [], 0
    whole = data[: data.rfind(b"\n") + 1]
    objects = [_parse(line) for line in whole.splitlines()]
    return [o for o in objects if isinstance(step := o.get("step"), int) and 0 <= step < LAST_STEP], start + len(whole)


def newest_logs(directory: Path) -> list[Path]:
    """The logs of the newest attempt, those of ranks that say they failed first, then by rank."""
    logs = list(directory.glob("logs/attempt*.rank*.log"))
    newest = max((_attempt_and_rank(log)[0] for log in logs), default=0)
    failed = {_whole(f, "rank") for f in read_failures(directory) if _whole(f, "attempt") == newest}
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


def _whole(data: dict[str, Any], name: str) -> int:
    value = data.get(name)
    return value if isinstance(value, int) else -1


def _parse(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
