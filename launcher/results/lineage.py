"""Draws a pipeline: each stage below its inputs, with its state and result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from launcher.labels import amount
from launcher.results import svg
from launcher.trials.labels import duration, elapsed_s
from launcher.trials.store import Record
from trainer.shared.records.artifacts import METRICS_FILE
from trainer.shared.records.outcome import Status
from trainer.shared.records.stage_run import StageRun, stage_in
from trainer.shared.records.trial_files import number
from trainer.shared.run.files import read_json

WIDE, HIGH, GAP = 210.0, 62.0, 34.0
"""Width and height of a stage's box, and the gap between rows."""
SCORES = ("loss", "exact_match", "perplexity", "bits_per_byte")
"""Scores by which an evaluation is shown; the box has room for the first two present."""


def picture(records: Sequence[Record]) -> Markup | None:
    """Draws the whole graph; None without stages."""
    stages = {stage.name: (stage, record) for record in records if (stage := stage_in(record.config)) is not None}
    if not stages:
        return None
    places = _places([stage for stage, _ in stages.values()])
    parts = [edge for stage, _ in stages.values() for edge in _edges(stage, places)]
    parts += [part for stage, record in stages.values() for part in _box(stage, record, *places[stage.name])]
    return svg.figure(max(y for _, y in places.values()) + HIGH + 8, "what each stage was made of", parts)


def _places(stages: Sequence[StageRun]) -> dict[str, tuple[float, float]]:
    """Left upper corners by name: a stage stands one row below the lowest that it takes; the stages of a row share its width."""
    rows: dict[str, int] = {}
    for stage in stages:  # each after those that it takes
        rows[stage.name] = 1 + max((rows[name] for name in stage.made_by.values() if name in rows), default=-1)
    in_row = {row: [name for name in rows if rows[name] == row] for row in rows.values()}
    return {
        name: ((at + 0.5) * svg.WIDTH / len(names) - WIDE / 2, 4 + row * (HIGH + GAP))
        for row, names in in_row.items()
        for at, name in enumerate(names)
    }


def _edges(stage: StageRun, places: Mapping[str, tuple[float, float]]) -> list[Markup]:
    x, y = places[stage.name]
    above = [places[name] for name in dict.fromkeys(stage.made_by.values()) if name in places]
    return [svg.line(left + WIDE / 2, top + HIGH, x + WIDE / 2, y, "edge") for left, top in above]


def _box(stage: StageRun, record: Record, x: float, y: float) -> list[Markup]:
    state = record.status.value if record.reason is None else f"{record.status.value}: {record.reason.value}"
    took = f", {duration(elapsed_s(record))}" if record.status is Status.DONE else ""
    title = f"{stage.id} {stage.folder}"
    return [
        svg.rectangle(x, y, WIDE, HIGH, f"stage {record.status.value}", title),
        svg.text(x + 10, y + 20, f"{stage.name} · {stage.verb}", "name"),
        svg.text(x + 10, y + 38, f"{stage.id[:8]}  {state}{took}"),
        svg.text(x + 10, y + 54, came_to(stage)),
    ]


def came_to(stage: StageRun) -> str:
    """Returns the artifact's digest, or its scores."""
    made = stage.made
    if made is None:
        return "not there"
    figures = read_json(Path(stage.folder) / METRICS_FILE) or {}
    scores = [f"{name.replace('_', ' ')} {amount(value)}" for name in SCORES if (value := number(figures.get(name))) is not None]
    return ", ".join(scores[:2]) if scores else f"{made.kind.value} {made.digest[:12]}"
