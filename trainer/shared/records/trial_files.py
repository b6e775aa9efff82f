"""The files of a trial that one program writes and the other reads: names, exit codes, who may overwrite what, names of metrics.

A trial's folder holds ``config.yaml`` (the resolved run), ``metrics.jsonl`` (a line per step), ``timeline.json``,
``failure-RANK.json`` for each rank that failed, and at the end ``result.json``. Each names the attempt that wrote it, and an older
attempt never overwrites a newer one. Readers accept files of other versions; a missing or damaged file counts as absent.

``launcher/backends/kubernetes/entry.py`` travels alone into pods and repeats the names and codes; a test compares them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import Tail, read_json, write_json

FORMAT = 1
"""Version of the files of a trial and of a sweep; each states it as ``format``, older files have none. It rises when a key changes its
meaning. Readers take their own version and every older one: unknown keys are ignored, missing ones take their defaults. ``check_format``
refuses a newer version."""

CONFIG, METRICS, RESULT, TIMELINE = "config.yaml", "metrics.jsonl", "result.json", "timeline.json"

EXIT_FAILED, EXIT_REFUSED, EXIT_STOPPED = 1, 2, 75
"""Exit codes of a rank: it failed, its configuration is wrong, it stopped on request and wants to be restarted (``EX_TEMPFAIL``)."""

LAST_STEP = 1 << 53
"""More steps than any run has; a line with a larger one is damaged."""

MOST = 1e18
"""Above all seconds, bytes and rates of a run, and small enough that sums and products do not overflow."""

SUMMARY = (
    "step_time_s", "step_time_spread_s", "tokens_per_s", "tflops_per_gpu", "mfu", "hfu", "peak_memory_bytes",
    "energy_per_step_j", "power_w", "gpu_clock_mhz", "gpu_memory_errors",
)  # fmt: skip
"""Keys of ``result.json`` that become metrics of the trial's MLflow run."""

SERIES = {"losses": "loss", "grad_norms": "grad_norm", "step_times_s": "step_time_s"}
"""Keys of ``result.json`` that hold a number of each step, and its name in ``metrics.jsonl``."""

PERCENTILES = ("latency_s", "ttft_s", "tpot_s", "requests_per_s")
"""Keys of the ``result.json`` of an inference: p50, p90 and p99 of a request's seconds, of those to its first token and per further one,
and of the requests served per second. Its step is a batch (static), or as many requests as a replica has in flight."""

OFFSET = "trireme.mirrored_bytes"
"""Tag of an MLflow run: the number of bytes of ``metrics.jsonl`` that it holds."""


def check_format(data: Mapping[str, Any], path: Path) -> None:
    """Raises ``ConfigError`` when ``data``, the content of ``path``, was written by a version whose files this one may misread."""
    written = data.get("format")
    if isinstance(written, int) and written > FORMAT:
        raise ConfigError(
            f"{path} has format {written}, that of a newer Trireme; this one reads formats up to {FORMAT}: "
            "upgrade it, or name another folder (--dir, sweep.dir)"
        )


def failure_file(rank: int | str) -> str:
    return f"failure-{rank}.json"


def write_outcome(path: Path, data: dict[str, Any]) -> None:
    """Writes the outcome of an attempt, unless a newer attempt has written there: a process of the old one may still live."""
    written = attempt_of(read_json(path) or {})
    if written > data["attempt"]:
        print(f"{path.name} is that of attempt {written}, and attempt {data['attempt']} leaves it alone", file=sys.stderr)
        return
    write_json(path, {"format": FORMAT, **data})


def attempt_of(data: Mapping[str, Any]) -> int:
    """Returns the attempt that wrote a result or failure file; -1, older than any, if it has none."""
    attempt = data.get("attempt")
    return attempt if isinstance(attempt, int) else -1


def outcome_of(result: Mapping[str, Any]) -> tuple[Status, Reason | None]:
    """Returns status and reason as a rank wrote them; words that this version does not know are an error of the trial."""
    status, reason = result.get("status"), result.get("reason")
    if status not in [s.value for s in Status]:
        return Status.FAILED, Reason.ERROR
    return Status(status), known_reason(reason) or (None if status == Status.DONE.value else Reason.ERROR)


def known_reason(word: Any) -> Reason | None:
    """Returns the reason of that name; None where this version knows none."""
    return Reason(word) if word in [reason.value for reason in Reason] else None


def reason_of(failure: Mapping[str, Any]) -> Reason:
    """Returns the reason that a failure file gives."""
    return outcome_of({"status": Status.FAILED.value, **failure})[1] or Reason.ERROR


def failures_in(directory: Path) -> list[dict[str, Any]]:
    """Reads the failure files of the ranks: newest attempt first, then by rank."""
    found = [data for path in directory.glob(failure_file("*")) if (data := read_json(path)) is not None]
    return sorted(found, key=lambda data: (-attempt_of(data), rank if isinstance(rank := data.get("rank"), int) else -1))


def read_steps(directory: Path) -> list[dict[str, Any]]:
    """Returns the lines of ``metrics.jsonl`` in order of step. If a step was run twice (resumption), the later line counts."""
    steps = {line["step"]: line for line in step_lines(Tail(directory / METRICS))}
    return [steps[step] for step in sorted(steps)]


def step_lines(tail: Tail) -> list[dict[str, Any]]:
    """Returns the new lines of a ``metrics.jsonl`` that have a step."""
    return [line for line in tail.objects() if isinstance(step := line.get("step"), int) and 0 <= step < LAST_STEP]


def step_metrics(line: Mapping[str, Any]) -> list[tuple[str, float, int, int]]:
    """Converts one line of ``metrics.jsonl`` to MLflow metrics ``train/NAME``: (name, value, unix milliseconds, step)."""
    stamp = int(1000 * (positive(line.get("time")) or 0)) % (1 << 53)
    known = {name: number(value) for name, value in line.items() if name not in ("attempt", "step", "time")}
    return [(f"train/{name}", value, stamp, line["step"]) for name, value in known.items() if value is not None]


def summary_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """Returns the figures of a trial's MLflow run at its end: only those that are known and finite."""
    if result.get("status") != Status.DONE.value:
        return {}
    found: dict[str, Any] = {name: 0.0 if result.get(name) == 0 else positive(result.get(name)) for name in SUMMARY}
    memory, losses = result.get("memory"), result.get("losses")
    found |= {f"memory/{part}": value for part, value in (memory if isinstance(memory, Mapping) else {}).items()}
    for name in PERCENTILES:
        values = result.get(name)
        found |= {f"{name}/{share}": value for share, value in (values if isinstance(values, Mapping) else {}).items()}
    found["loss"] = losses[-1] if isinstance(losses, list) and losses else None
    return {name: known for name, value in found.items() if (known := number(value)) is not None and math.isfinite(known)}


def positive(value: Any) -> float | None:
    """Returns ``value`` if it is a number above zero that a run can have: one as large as ``MOST`` was never measured."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < MOST:
        return None
    return float(value)


def number(value: Any) -> float | None:
    """Returns ``value`` if it is a number that floating point can hold; it may be infinite or NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
