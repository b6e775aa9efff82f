"""``report.html``: everything that a sweep showed on one page that needs no network, no script and no server.

The page's words are in ``report.html.j2``, which escapes whatever it is given; the pictures come from ``plots.py`` and
``timeline.py``. What is gathered here is plain data.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from launcher import labels
from launcher.results import arms, front, lineage, plots, timeline
from launcher.results.measurements import measure, newest_logs, read_timeline, tail
from launcher.results.plots import Series
from launcher.results.predicted_timeline import foreseen
from launcher.results.ranking import Measurement, leaders, problem, rank
from launcher.results.reasons import largest_differences, next_commands
from launcher.results.timeline import Timeline
from launcher.trials.labels import trial_labels
from launcher.trials.store import Record, Sweep
from launcher.trials.told import as_files
from trainer.shared.records.outcome import Status
from trainer.shared.records.stage_run import trains
from trainer.shared.records.trial_files import failures_in, number, positive, read_steps
from trainer.shared.run.foreign import CommandConfig
from trainer.shared.run.read import from_record
from trainer.shared.run.schema import LayoutConfig

COLOURS = 8
"""Colours of the palette; more trials share them."""
DRAWN = 120
"""Trials in a picture that has a row or a curve for each, the fastest; the table has all."""
PICTURES_BYTES = 500_000
"""Timelines are drawn, fastest trial first, until they make up so much of the page."""
TAIL_LINES, TAIL_BYTES, TAIL_FILES = 30, 8192, 3
"""Lines, bytes and files of an unsuccessful trial's logs in the report."""


@dataclass(frozen=True)
class ReportedTrial:
    """One trial with all that the page says of it."""

    measured: Measurement
    name: str  # unique in the page
    record: Record
    result: Mapping[str, Any]
    series: Series
    timeline: Timeline | None


@dataclass(frozen=True)
class LossGroup:
    """Trials that train the same model on the same data: their losses must coincide."""

    curves: Markup | None  # of the first ``DRAWN`` trials of the page
    differences: Markup | None
    trials: Sequence[ReportedTrial]
    widest: tuple[float, int, str, str] | None  # relative difference, step, and the two trials


@dataclass(frozen=True)
class ReportedPipeline:
    """One trial's pipeline: as it was traced, and as the cost model expected it, in the same scale of time."""

    trial: ReportedTrial
    timeline: Timeline
    traced: Markup
    predicted: Markup | None


def render(sweep: Sweep) -> str:
    """The whole page."""
    environment = Environment(
        loader=PackageLoader("launcher.results", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "seconds": labels.seconds, "amount": labels.amount, "memory": labels.memory, "percent": labels.percent, "plain": printable,
    }  # fmt: skip
    return environment.get_template("report.html.j2").render(page(sweep))


def page(sweep: Sweep) -> dict[str, Any]:
    """Returns the template's variables."""
    trials = gather(sweep.records)
    timed = [trial for trial in trials if trial.series.times and trial.measured.place]
    series = [trial.series for trial in timed]
    rows = timed[:DRAWN]
    drawn, left_out = pictures(timed)
    predicted = [s for s in series if s.predicted]
    failed = [trial for trial in trials if trial.measured.status in (Status.FAILED, Status.STOPPED, Status.PRUNED)]
    curves = arms.curves_of(sweep.front)
    best = leaders([trial.measured for trial in trials])
    optional = ("predicted_step_time_s", "predicted_memory_bytes", "mfu", "price")
    return {
        "sweep": sweep, "trials": trials, "made": stamp(time.time()), "created": stamp(sweep.created), "facts": facts(trials),
        "told": told(timed[0].record) if timed else {},
        "best": best, "why": why(trials), "next": next_commands([trial.record for trial in trials if trial.measured in best]),
        "names": {trial.measured.trial: trial.name for trial in trials},
        "slowest": timed[-1] if len(timed) > 1 else None, "counts": counts(trials), "labels": labels,
        "spent": labels.spent([(trial.measured.gpu_hours, trial.measured.price) for trial in trials if trial.record.config]),
        "step_times": plots.step_times(series[:DRAWN]) if series else None, "rows_left_out": len(timed) - len(rows), "most_drawn": DRAWN,
        "split": _parts(rows, split, plots.PHASES), "memory": _parts(rows, memory_parts, plots.STATES),
        "predictions": plots.predictions(predicted) if predicted else None, "prediction_error": mean_error(predicted),
        "losses": loss_groups(trials), "timelines": drawn, "timelines_left_out": left_out,
        "unsuccessful": [(trial, said(trial.record)) for trial in failed],
        "front": front.picture(points) if (points := front.points_of(sweep.front)) else None,
        "recommended": front.recommended(sweep.front),
        "arms": curves, "reached": arms.picture(curves, sweep.front.get("target_loss")), "told_of_arms": arms.said(sweep.front),
        "lineage": lineage.picture(sweep.records),
        "any": {name: any(getattr(trial.measured, name) for trial in trials) for name in optional},
    }  # fmt: skip


def why(trials: Sequence[ReportedTrial]) -> dict[str, Any] | None:
    """Returns the fastest trial, the fastest that it can be told from, and the largest differences of their measured and predicted steps;
    None where there is nothing to compare."""
    ranked = [trial for trial in trials if trial.measured.place and trial.series.times]
    other = next((trial for trial in ranked[1:] if not trial.measured.tied_with_best), None)
    if other is None:
        return None
    predicted = [_amounts((trial.record.predicted or {}).get("parts")) for trial in (ranked[0], other)]
    found = {"measured": largest_differences(split(ranked[0]).parts, split(other).parts), "predicted": largest_differences(*predicted)}
    return {"winner": ranked[0], "other": other, "parts": found} if any(found.values()) else None


def told(record: Record) -> dict[str, str]:
    """Returns the files with which another trainer repeats the trial; none for this project's trainer."""
    if not record.config.get("command"):
        return {}
    command, layout = from_record(CommandConfig, record.config["command"]), from_record(LayoutConfig, record.config["layout"])
    return as_files(command, layout, record.cluster["gpus_per_node"], f"trial {record.id} of sweep {record.sweep}")


# -- gathering ------------------------------------------------------------------------------------------------------------------


def gather(records: Sequence[Record]) -> list[ReportedTrial]:
    """Returns every trial of the sweep with its measurements, in the order of the ranking."""
    by_id = {record.id: record for record in records}
    ranked = rank(measure(by_id.values()))
    names = trial_labels(records)
    return [_trial(measured, by_id[measured.trial], names[measured.trial], index % COLOURS) for index, measured in enumerate(ranked)]


def _trial(measured: Measurement, record: Record, name: str, colour: int) -> ReportedTrial:
    result, steps = record.read_result() or {}, read_steps(record.directory) if trains(record.config) else []
    warmup = record.config.get("run", {}).get("warmup_steps", 0)
    times = [seconds for s in steps if s["step"] > warmup and (seconds := positive(s.get("step_time_s")))]
    losses = {s["step"]: loss for s in steps if (loss := number(s.get("loss"))) is not None}
    series = Series(name, colour, times, measured.step_time_interval_s, measured.predicted_step_time_s, losses)
    return ReportedTrial(measured, name, record, result, series, Timeline.read(read_timeline(record.directory)))


def facts(trials: Sequence[ReportedTrial]) -> dict[str, str]:
    """Returns the settings that all trials share, for the head of the page."""
    config: Mapping[str, Any] = next((trial.record.config for trial in trials if trial.record.config), {})
    cluster: Mapping[str, Any] = next((trial.record.cluster for trial in trials if trial.record.cluster), {})
    versions: dict[str, Any] = next((v for trial in trials if isinstance(v := trial.result.get("versions"), dict)), {})
    model = "{family}, {layers} layers, hidden {hidden}, {heads} heads, sequence {seq}, vocabulary {vocab}"
    run = "global batch {global_batch}, {precision}, {steps} steps, seed {seed}"
    found = {
        "model": model.format_map(_Known(config.get("model", {}))) if config else "",
        "run": run.format_map(_Known(config.get("run", {}))) if config else "",
        "cluster": "{backend}, {nodes} x {gpus_per_node} ranks".format_map(_Known(cluster)) if cluster else "",
        "hardware": cluster.get("hardware", {}).get("name", ""),
        "code": next((trial.record.commit[:12] for trial in trials if trial.record.commit), ""),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    return {name: words for name, words in found.items() if words}


class _Known(dict[str, Any]):
    """Values of a recorded configuration; a question mark for those that its version did not have."""

    def __missing__(self, name: str) -> str:
        return "?"


def counts(trials: Sequence[ReportedTrial]) -> str:
    """``3 done, 1 failed``."""
    found = {status.value: sum(trial.measured.status is status for trial in trials) for status in Status}
    return ", ".join(f"{count} {status}" for status, count in found.items() if count)


def said(record: Record) -> dict[str, Any]:
    """Returns an unsuccessful trial's failure messages and the ends of its logs."""
    words = [f"rank {f.get('rank')}: {f.get('message')}" for f in failures_in(record.directory) if f.get("attempt") == record.attempt]
    failures = [line for line in words if line != record.detail]
    logs = {log.name: "\n".join(tail(log, TAIL_BYTES).splitlines()[-TAIL_LINES:]) for log in newest_logs(record.directory)[:TAIL_FILES]}
    return {"failures": failures, "logs": logs}


# -- pictures -------------------------------------------------------------------------------------------------------------------


def pictures(trials: Sequence[ReportedTrial]) -> tuple[list[ReportedPipeline], int]:
    """The pipelines of as many trials as the page has room for, the fastest first; and how many had to be left out."""
    drawn: list[ReportedPipeline] = []
    have = [trial for trial in trials if trial.timeline is not None]
    for trial in have:
        assert trial.timeline is not None
        expected = foreseen(trial.record)
        seconds = max(t.seconds for t in (trial.timeline, expected) if t is not None)
        traced = timeline.picture(trial.timeline, f"pipeline of {trial.name}, traced", seconds)
        simulated = timeline.picture(expected, f"pipeline of {trial.name}, predicted", seconds) if expected else None
        drawn.append(ReportedPipeline(trial, trial.timeline, traced, simulated))
        if sum(len(p.traced) + len(p.predicted or "") for p in drawn) > PICTURES_BYTES:
            break
    return drawn, len(have) - len(drawn)


def loss_groups(trials: Sequence[ReportedTrial]) -> list[LossGroup]:
    """One overlay for each set of trials that must train alike: same model, data, optimizer, batch, seed and precision. What is not drawn
    is compared all the same."""
    groups: dict[str, list[ReportedTrial]] = {}
    for trial in trials:
        if trial.series.losses:
            groups.setdefault(problem(trial.record.config), []).append(trial)
    found, room = [], DRAWN
    for group in groups.values():
        series = [trial.series for trial in group]
        drawn = series[: max(0, room)]
        room -= len(drawn)
        curves, differences = (plots.loss_curves(drawn), plots.loss_differences(drawn)) if drawn else (None, None)
        found.append(LossGroup(curves, differences, group, plots.widest_gap(series)))
    return found


def _parts(trials: Sequence[ReportedTrial], series_of: Any, order: Sequence[str]) -> Markup | None:
    found = [series for series in map(series_of, trials) if series.parts]
    return plots.stacked(found, order, labels.memory if order is plots.STATES else labels.seconds) if found else None


def memory_parts(trial: ReportedTrial) -> Series:
    """Returns counted bytes of the fullest rank by part; the peak is the device's."""
    measured = trial.measured
    return Series(
        trial.name, trial.series.colour, parts=_amounts(trial.result.get("memory")), mark=measured.peak_memory_bytes,
        foreseen=measured.predicted_memory_bytes,
    )  # fmt: skip


def split(trial: ReportedTrial) -> Series:
    """Returns the mean step's seconds by part, over ranks and steps; ``other`` is unaccounted."""
    parts = _amounts(trial.result.get("step_split_s"))
    if parts:
        parts["other"] = parts.get("other", 0.0) + max(0.0, statistics.fmean(trial.series.times) - sum(parts.values()))
    return Series(trial.name, trial.series.colour, parts=parts)


def mean_error(predicted: Sequence[Series]) -> float | None:
    errors = [labels.error_of(s.predicted, statistics.median(s.times)) for s in predicted]
    return statistics.fmean(abs(e) for e in errors if e is not None) if predicted else None


def _amounts(values: Any) -> dict[str, float]:
    known = values.items() if isinstance(values, dict) else ()
    return {str(name): number for name, value in known if (number := positive(value))}


# -- words ----------------------------------------------------------------------------------------------------------------------

_UNPRINTABLE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[^\t\n\x20-\x7e\u00a0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(words: object) -> str:
    """Text without terminal colours and control characters, which a page may not hold."""
    return _UNPRINTABLE.sub("", str(words))


def stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
