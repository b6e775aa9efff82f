"""The trials of a sweep and their steps as plain rows, one column a figure: for tables, loggers and notebooks."""

from __future__ import annotations

from typing import Any

from launcher.results.measurements import measure
from launcher.results.ranking import Measurement, rank
from launcher.trials.labels import trial_labels
from launcher.trials.store import Record, Sweep
from trainer.shared.records.stage_run import trains
from trainer.shared.records.trial_files import number, read_steps, summary_metrics
from trainer.shared.run.read import SECTION, flatten

HIDDEN = ("tracking.", "cluster.env.", "cluster.hardware.calibration.")
"""Configuration that is not a parameter of a trial: the mirror's address, private values, page-long ones."""
FIGURES = (
    "step_time_s", "step_time_spread_s", "steps_measured", "tokens_per_s", "peak_memory_bytes", "mfu", "predicted_step_time_s",
    "predicted_memory_bytes",
)  # fmt: skip
"""Fields of a measurement that are columns."""


def trial_rows(sweep: Sweep) -> list[dict[str, Any]]:
    """Returns a row for each trial, as ranked: its outcome, its figures (seconds, bytes), then its configuration by dotted names."""
    records, names = {record.id: record for record in sweep.records}, trial_labels(sweep.records)
    return [_row(sweep, records[m.trial], m, names[m.trial]) for m in rank(measure(sweep.records))]


def _row(sweep: Sweep, record: Record, m: Measurement, label: str) -> dict[str, Any]:
    reason = m.reason.value if m.reason else None
    known = {"sweep": sweep.name, "trial": m.trial, "label": label, "place": m.place, "tied_with_best": m.tied_with_best}
    known |= {"status": m.status.value, "reason": reason, "detail": m.detail, "attempt": record.attempt}
    known |= {"started": record.started, "ended": record.ended} | {name: getattr(m, name) for name in FIGURES}
    return known | figures(record) | configuration(record)


def figures(record: Record) -> dict[str, float]:
    """Returns the figures of a finished trial's result that a measurement does not have: parts of memory, percentiles, the loss."""
    return {name: value for name, value in summary_metrics(record.read_result() or {}).items() if name not in FIGURES}


def configuration(record: Record) -> dict[str, Any]:
    """Returns a trial's resolved configuration by dotted names, ``layout.tensor`` -> 2; of a stage that does not train, its section."""
    config = record.config
    if config and not trains(config) and config["run"]["task"] == "train":
        config = {SECTION: config[SECTION]}
    flat = flatten({**config, **({"cluster": record.cluster} if record.cluster else {})})
    return {name: value for name, value in flat.items() if not name.startswith(HIDDEN)}


def step_rows(record: Record) -> list[dict[str, Any]]:
    """Returns a row for each step of a trial, in order: attempt, step, unix time and the figures that rank 0 wrote."""
    return [
        {"trial": record.id, "attempt": line.get("attempt"), "step": line["step"], "time": number(line.get("time"))} | step_figures(line)
        for line in read_steps(record.directory)
    ]


def step_figures(line: dict[str, Any]) -> dict[str, float]:
    """Returns the figures of a line of ``metrics.jsonl``."""
    known = {name: number(value) for name, value in line.items() if name not in ("attempt", "step", "time")}
    return {name: value for name, value in known.items() if value is not None}
