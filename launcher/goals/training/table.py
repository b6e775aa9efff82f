"""A table of measured training runs: errors of step time and memory, the order of layouts, shortages of memory."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from launcher.config.hardware import hardware_files
from launcher.config.trainer import TrainerProfile
from launcher.cost.thresholds import FITS
from launcher.goals.goal import GoalTable
from launcher.goals.views import Answer, Grid, Line, View, not_predicted
from launcher.labels import percent
from launcher.tables.canonical import read
from launcher.tables.repeats import of_rows
from launcher.tables.validation import PredictedRun, RankedSweep, Summary, by_source, check_units, judge, summary

COLUMNS = ("row", "step_time_s", "peak_mem_gb", "oom", "reason")
TIME = ("source", "rows", "asked", "timed", "median error", "p90", "bias", "in 80 %", "sweeps", "rank corr.", "regret")
MEMORY = ("source", "told", "out", "precision", "recall", "F1", "AUC by bytes", "AUC by share", "peaks", "median error")
SWEEPS = ("sweep", "rows", "rank corr.", "regret", "median error", "bias")
WHOLE = "dense rows with full configuration"


def training_table(path: str, trainer: TrainerProfile | None, with_sweeps: bool) -> GoalTable:
    """Reads a table and judges its rows, as if measured with ``trainer`` if one is given."""
    judged = judge(read(path), hardware_files(), trainer=trainer)
    check_units(judged)
    everything, whole, sources = summary(judged), summary([j for j in judged if j.whole]), by_source(judged)
    missing = Counter(j.reason for j in judged if j.reason)
    document = {
        "all": _document(everything),
        WHOLE: _document(whole),
        "sources": {source: _document(each) for source, each in sources.items()},
        "not predicted": missing,
    }
    views = _shown({**sources, "all": everything, WHOLE: whole}, list(sources), missing, with_sweeps)
    lines = [(j.row.number, *_cells(j), j.reason) for j in judged]
    return GoalTable(lines, everything.predicted, Answer(document, views), of_rows(j.case for j in judged if j.case is not None))


def _shown(found: Mapping[str, Summary], sources: Sequence[str], missing: Counter[str], with_sweeps: bool) -> Iterator[View]:
    everything, covered = found["all"], [each.coverage for name, each in found.items() if name in sources and each.coverage is not None]
    yield _grid("step time", found, TIME, _times)
    yield _grid("memory", found, MEMORY, _memory)
    if with_sweeps:
        yield Grid(SWEEPS, [_sweep(sweep) for sweep in everything.sweeps], "sweeps", figures=True, compact=True)
    if covered:
        share = percent(sum(covered) / len(covered))
        yield Line(f"inside of the 80 % interval: {percent(everything.coverage)} of rows, {share} with each source counted once")
    yield from not_predicted(missing)


def _cells(judged: PredictedRun) -> tuple[str, str, str]:
    predicted = judged.prediction
    if predicted is None:
        return "", "", ""
    return f"{predicted.step_time_s:.6g}", f"{predicted.reported_bytes / 1e9:.6g}", "yes" if predicted.fits < FITS else "no"


def _document(each: Summary) -> dict[str, Any]:
    found = dataclasses.asdict(each)
    if each.verdicts:
        found["verdicts"] |= {name: getattr(each.verdicts, name) for name in ("precision", "recall", "f1")}
    return found | {"correlation": each.correlation, "regret": each.regret}


def _grid(title: str, summaries: Mapping[str, Summary], heads: Sequence[str], cells: Callable[[Summary], list[str]]) -> Grid:
    """Returns one line for each source with results, then the selections."""
    short = Counter(name.split(" (")[0] for name in summaries)
    rows: list[Sequence[str] | None] = []
    for name, each in summaries.items():
        if name == "all":
            rows.append(None)
        if line := cells(each):
            brief = name.split(" (")[0]
            rows.append((brief if short[brief] == 1 else name, *line))
    return Grid(heads, rows, title, figures=True, compact=True, widest=48)


def _times(each: Summary) -> list[str]:
    cells = [str(each.rows), str(each.predicted)]
    time = each.time
    cells += [str(time.count), percent(time.median), percent(time.p90), f"{time.bias:.2f}", _percent(each.coverage)] if time else [""] * 5
    return cells + ([str(len(each.sweeps)), _number(each.correlation), _percent(each.regret)] if each.sweeps else [""] * 3)


def _memory(each: Summary) -> list[str]:
    flags, memory = each.verdicts, each.memory
    if not flags and not memory:
        return []
    cells = [str(flags.count), str(flags.short)] if flags else [""] * 2
    if flags and flags.short:
        cells += [_percent(flags.precision), _percent(flags.recall), *map(_number, (flags.f1, flags.auc, flags.auc_of_shares))]
    else:
        cells += [""] * 5
    return cells + ([str(memory.count), percent(memory.median)] if memory else [""] * 2)


def _sweep(sweep: RankedSweep) -> tuple[str, ...]:
    errors = sweep.errors
    figures = (_number(sweep.correlation), _percent(sweep.regret), percent(errors.median), f"{errors.bias:.2f}")
    return (sweep.name, str(sweep.count), *figures)


def _percent(value: float | None) -> str:
    return "" if value is None else percent(value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
