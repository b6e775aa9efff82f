"""A table of measured training runs: errors of step time and memory, the order of layouts, shortages of memory."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from launcher.config.hardware import hardware_files
from launcher.config.trainer import TrainerProfile
from launcher.cost.thresholds import FITS
from launcher.goals.views import Answer, Grid, Line, View, not_predicted
from launcher.labels import percent
from launcher.tables.canonical import read
from launcher.tables.repeats import Repeat, of_rows
from launcher.tables.validation import Judged, RankedSweep, Summary, by_source, check_units, judge, summary, unanswered

COLUMNS = ("row", "step_time_s", "peak_mem_gb", "oom", "reason")
TIME = ("source", "rows", "asked", "timed", "median error", "p90", "bias", "in 80 %", "sweeps", "rank corr.", "regret")
MEMORY = ("source", "told", "out", "precision", "recall", "F1", "AUC by bytes", "AUC by share", "peaks", "median error")
SWEEPS = ("sweep", "rows", "rank corr.", "regret", "median error", "bias")
WHOLE = "dense rows with full configuration"


@dataclass(frozen=True)
class TrainingTable:
    """Rows with what is predicted of each."""

    judged: Sequence[Judged]

    @cached_property
    def everything(self) -> Summary:
        return summary(self.judged)

    @property
    def predicted(self) -> int:
        return self.everything.predicted

    @property
    def repeats(self) -> Sequence[Sequence[Repeat]]:
        return of_rows(each.case for each in self.judged if each.case is not None)

    def lines(self) -> list[Sequence[Any]]:
        return [(j.row.number, *_cells(j), j.reason) for j in self.judged]

    def answer(self, with_sweeps: bool) -> Answer:
        sources, whole = by_source(self.judged), summary([j for j in self.judged if j.whole])
        missing = unanswered(self.judged)
        document = {
            "all": _document(self.everything),
            WHOLE: _document(whole),
            "sources": {source: _document(each) for source, each in sources.items()},
            "not predicted": missing,
        }
        return Answer(document, self._shown(sources, whole, missing, with_sweeps))

    def _shown(self, sources: Mapping[str, Summary], whole: Summary, missing: Counter[str], with_sweeps: bool) -> Iterator[View]:
        summaries = {**sources, "all": self.everything, WHOLE: whole}
        yield _grid("step time", summaries, TIME, _times)
        yield _grid("memory", summaries, MEMORY, _memory)
        if with_sweeps:
            yield Grid(SWEEPS, [_sweep(sweep) for sweep in self.everything.sweeps], "sweeps", figures=True, compact=True)
        covered = [each.coverage for each in sources.values() if each.coverage is not None]
        if covered:
            share = percent(sum(covered) / len(covered))
            yield Line(f"inside of the 80 % interval: {percent(self.everything.coverage)} of rows, {share} with each source counted once")
        yield from not_predicted(missing)


def training_table(path: str, trainer: TrainerProfile | None) -> TrainingTable:
    """Reads a table and predicts its rows, as if measured with ``trainer`` if one is given."""
    judged = judge(read(path), hardware_files(), trainer=trainer)
    check_units(judged)
    return TrainingTable(judged)


def _cells(judged: Judged) -> tuple[str, str, str]:
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
    """Returns one line for each source that has something to say, then the selections."""
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
