"""Short words for a person about how a trial stands. Shared by progress and ``trireme status``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from launcher.labels import layout_label, one_line, seconds
from launcher.trials.store import Record
from trainer.shared.records.outcome import Status
from trainer.shared.records.stage_run import trains
from trainer.shared.records.trial_files import LAST_STEP, number, positive
from trainer.shared.run.read import flatten

UNSAID = ("sweep", "search", "tracking", "hydra", "dry_run", "expect")
"""Sections whose keys cannot set one trial apart from another."""
LAYOUT = ("layout", "serving")
"""Sections that the layout's label already describes; further keys are added where labels are alike."""
LONGEST = 40
"""Characters of a value in a label."""


def trial_labels(records: Iterable[Record]) -> dict[str, str]:
    """Returns unique labels of a sweep's trials, by trial id.

    The layout's words where layouts differ, then KEY=VALUE of differing overrides. A pruned combination has overrides alone. Trials that
    are still alike are composed from other files: they get their differing configuration, or the first digits of their ids. Where nothing
    differs, the layout is the label.
    """
    trials = {record.id: record for record in records}
    layouts = {name: layout_label(layout) for name, record in trials.items() if (layout := record.config.get("layout"))}
    several = len(set(layouts.values())) > 1
    given = {name: _given(record.overrides) for name, record in trials.items()}
    differing = _differing(list(given.values()))
    labels = {}
    for name in trials:
        keys = [key for key in given[name] if key in differing and not (name in layouts and _section(key) in LAYOUT)]
        if trials[name].stage:
            labels[name] = trials[name].stage
            continue
        words = [layouts[name]] if several and name in layouts else []
        words += [f"{key}={one_line(given[name][key], LONGEST)}" for key in keys]
        labels[name] = " ".join(words) or layouts.get(name) or one_line(" ".join(trials[name].overrides)) or name
    return _told_apart(trials, labels)


def heading(name: str, records: Sequence[Record]) -> str:
    """The name of a sweep, with the layout that all its trials share where their labels do not say it."""
    layouts = {layout_label(layout) for record in records if (layout := record.config.get("layout"))}
    return f"{name} (layout {layouts.pop()})" if len(layouts) == 1 and len(records) > 1 else name


def _given(overrides: Sequence[str]) -> dict[str, str]:
    """The overrides that can differ between trials, by key. Values of environment variables may be secret."""
    pairs = (override.lstrip("+~").partition("=") for override in overrides)
    return {key: value for key, _, value in pairs if _section(key) not in UNSAID and not key.startswith("cluster.env")}


def _section(key: str) -> str:
    return key.partition(".")[0].partition("/")[0].partition("@")[0]


def _differing(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Keys that do not have the same value in all rows."""
    keys = {key for row in rows for key in row}
    return {key for key in keys if len({repr(row.get(key)) for row in rows}) > 1}


def _told_apart(trials: Mapping[str, Record], labels: Mapping[str, str]) -> dict[str, str]:
    """``labels`` with more words where two are alike."""
    alike = {label: [name for name in labels if labels[name] == label] for label, count in Counter(labels.values()).items() if count > 1}
    longer = dict(labels)
    for names in alike.values():
        flat = {name: _flat(trials[name]) for name in names}
        differing = sorted(_differing(list(flat.values())))[:3]
        for name in names:
            words = [f"{key}={one_line(flat[name][key], LONGEST)}" for key in differing if key in flat[name]]
            longer[name] = " ".join([labels[name], *words])
    counts = Counter(longer.values())
    return {name: label if counts[label] == 1 else f"{label} · {name[:4]}" for name, label in longer.items()}


def _flat(record: Record) -> dict[str, Any]:
    flat = flatten({**record.config, "cluster": record.cluster}) if record.config else {}
    hidden = ("tracking.", "cluster.env", "cluster.hardware.calibration")
    return {key: value for key, value in flat.items() if not key.startswith(hidden)}


def state(record: Record) -> str:
    """``failed: out of memory``."""
    return record.status.value + (f": {record.reason.value}" if record.reason else "")


def elapsed_s(record: Record) -> float | None:
    """Seconds from the start (or submission) of the newest attempt to its end, or to now; None before the first."""
    began = record.started or record.submitted
    return None if began is None else max(0.0, (record.ended or time.time()) - began)


def expected_start(records: Iterable[Record]) -> str:
    """Returns when the queue expects the first of the trials that wait to start; empty where it does not say."""
    at = min((r.expected for r in records if r.status is Status.SUBMITTED and r.expected is not None), default=0.0)
    if at < time.time():
        return ""
    day = "" if time.localtime(at)[:3] == time.localtime()[:3] else time.strftime(" on %Y-%m-%d", time.localtime(at))
    return f"expected to start{day} at {time.strftime('%H:%M', time.localtime(at))}"


def duration(value: float | None) -> str:
    """``1:15`` or ``1:01:40``: minutes and seconds, hours where needed."""
    if value is None:
        return "-"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def total_steps(record: Record) -> int | None:
    """Steps that the trial is to make; None where that is not known."""
    if not trains(record.config):
        return None
    steps = record.config.get("run", {}).get("steps")
    return steps if isinstance(steps, int) else None


def step(record: Record) -> int | None:
    """The last step that the newest attempt has completed."""
    line = record.read_last_step() or {}
    value = line.get("step")
    return value if isinstance(value, int) and 0 <= value < LAST_STEP and line.get("attempt", 0) == record.attempt else None


def left_s(record: Record) -> float | None:
    """Returns the seconds that a running trial still needs: its remaining steps at the newest step's time, or the predicted one before it.
    None where neither is known."""
    total, made = total_steps(record), step(record) or 0
    if record.status is not Status.RUNNING or total is None:
        return None
    newest = positive((record.read_last_step() or {}).get("step_time_s")) if made else None
    per_step = newest or positive((record.predicted or {}).get("step_time_s"))
    return None if per_step is None else max(0, total - made) * per_step


def newest_step(record: Record) -> str:
    """The newest step in words: ``step 7  loss 5.83  41.2 ms``; empty before the first."""
    line = record.read_last_step() or {}
    if step(record) is None:
        return ""
    loss, step_time = number(line.get("loss")), positive(line.get("step_time_s"))
    words = [f"step {line['step']}"]
    words += [f"loss {loss:.4g}"] if loss is not None else []
    words += [seconds(step_time)] if step_time else []
    return "  ".join(words)


def outcome(record: Record) -> str:
    """Describes how a trial ended: its step time, or reason and words."""
    if record.status is Status.DONE:
        step_time = positive((record.read_result() or {}).get("step_time_s"))
        return "done" + (f"  {seconds(step_time)} a step" if step_time else "")
    return state(record) + (f" ({record.detail})" if record.detail else "")
