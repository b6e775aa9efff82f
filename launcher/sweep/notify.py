"""The notification at the end of a sweep (``sweep.notify``): a command that is run, or an address that gets a JSON document."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import urllib.request
from collections import Counter
from typing import Any

from launcher.interrupt import Interrupted
from launcher.labels import one_line, seconds
from launcher.sweep.live import shown_counts
from launcher.trials.labels import duration, trial_labels
from launcher.trials.store import Sweep
from trainer.shared.records.outcome import Status
from trainer.shared.records.trial_files import positive
from trainer.shared.run.errors import ConfigError

PATIENCE_S = 30.0
"""Seconds for which a command waits for its notification."""
LONGEST = 200
PREFIX = "TRIREME_"


def notify(target: str, sweep: Sweep, error: BaseException | None, elapsed_s: float) -> str:
    """Sends the outcome of a command that took ``elapsed_s``. Returns what went wrong, in one line; empty if nothing did."""
    told = document(sweep, error, elapsed_s)
    try:
        (_post if is_address(target) else _run)(target, told)
    except (OSError, ValueError, http.client.HTTPException, subprocess.SubprocessError) as trouble:
        return one_line(trouble, LONGEST)
    return ""


def check_notify(target: str | None) -> None:
    """Raises ``ConfigError`` for other text than a command or an address."""
    if target is None:
        return
    scheme, separator, rest = target.partition("://")
    if not target.strip() or (separator and scheme.isalnum() and not (is_address(target) and rest.strip("/"))):
        raise ConfigError(
            f"sweep.notify={target!r} is neither a command nor an address http://... or https://...; give one, or null to notify nobody"
        )


def is_address(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def document(sweep: Sweep, error: BaseException | None, elapsed_s: float) -> dict[str, Any]:
    """Returns the outcome as plain data. ``text`` is the whole in one line, which chat programs show as it is."""
    counts = Counter(record.status for record in sweep.records)
    done = [record for record in sweep.records if record.status is Status.DONE]
    times = {record.id: positive((record.read_result() or {}).get("step_time_s")) for record in done}
    known = {name: value for name, value in times.items() if value is not None}
    best = min(known, key=lambda name: known[name], default=None)
    fastest = "" if best is None else trial_labels(sweep.records)[best]
    outcome = _outcome(counts, error)
    words = [f"sweep {sweep.name} {outcome}", shown_counts(sweep.records)]
    words += [f"fastest {fastest}, {seconds(known[best])} a step"] if best is not None else []
    words += [one_line(error, LONGEST)] if error is not None and str(error) else []
    return {
        "sweep": sweep.name, "outcome": outcome, "elapsed_s": round(elapsed_s, 1), **{status.value: counts[status] for status in Status},
        "fastest": fastest, "trial": best or "", "step_time_s": known.get(best or ""), "text": "; ".join([*words, duration(elapsed_s)]),
    }  # fmt: skip


def _outcome(counts: Counter[Status], error: BaseException | None) -> str:
    """``interrupted``, ``failed``, ``submitted`` where nobody waits for the trials, or ``done``."""
    if error is not None:
        return "interrupted" if isinstance(error, (Interrupted, KeyboardInterrupt)) else "failed"
    if any(not status.final for status in counts):
        return "submitted"
    return "done" if counts[Status.DONE] else "failed"


def _run(command: str, told: dict[str, Any]) -> None:
    """Runs it in a shell, the outcome in its environment: TRIREME_SWEEP, TRIREME_OUTCOME, TRIREME_TEXT, ..."""
    variables = {f"{PREFIX}{name.upper()}": "" if value is None else str(value) for name, value in told.items()}
    ran = subprocess.run(
        command, shell=True, env=os.environ | variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S
    )
    if ran.returncode:
        raise ValueError(f"exit code {ran.returncode} {ran.stderr}".strip())


def _post(address: str, told: dict[str, Any]) -> None:
    request = urllib.request.Request(address, json.dumps(told).encode(), {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=PATIENCE_S):
        pass
