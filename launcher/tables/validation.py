"""The cost model against a table of measurements: which rows it can answer, and how well, by source and by sweep."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from launcher.config.schema import HardwareConfig
from launcher.config.trainer import TrainerProfile
from launcher.config.uncertainty import Widths
from launcher.cost.known import widths_at
from launcher.cost.thresholds import FITS
from launcher.cost.uncertainty import TimeSurrogate, Traits, coordinates
from launcher.tables.canonical import MeasuredRun, Unanswerable
from launcher.tables.cases import TableCase, asked_cells, table_case
from launcher.tables.metrics import Errors, Verdicts, by_cell, check_unit, correlation, regret
from launcher.tables.predictions import RowPrediction, predict_rows

MIN_SWEEP = 5
"""Measured rows that make a sweep worth ranking."""


STATED = ("layers", "hidden", "seq", "hardware", "gpus", "tensor", "pipeline", "micro_batch", "global_batch", "recompute")
"""Columns that a source must state for its row to count as fully described."""


@dataclass(frozen=True)
class PredictedRun:
    """One row, its measurement, and its prediction if there is one."""

    row: MeasuredRun
    case: TableCase | None
    prediction: RowPrediction | None
    reason: str  # why there is no prediction
    inside: bool | None = None  # whether the measured step time lies in the 80 % interval of the predicted one

    @property
    def step_seconds(self) -> float | None:
        return self.row.step_seconds

    @property
    def peak_bytes(self) -> float | None:
        return self.row.peak_bytes

    @property
    def whole(self) -> bool:
        """A dense model with every cell that the prediction rests on most."""
        known = self.row["family"] is not None and self.row["experts"] == 0
        return known and not any(self.row[name] is None or name in self.row.assumed for name in STATED)


@dataclass(frozen=True)
class RankedSweep:
    """Rows that differ in layout only, ranked."""

    name: str
    count: int
    correlation: float | None
    regret: float
    errors: Errors


@dataclass(frozen=True)
class Summary:
    """The figures of a selection of rows."""

    rows: int
    predicted: int
    time: Errors | None
    memory: Errors | None
    verdicts: Verdicts | None
    sweeps: tuple[RankedSweep, ...]
    coverage: float | None  # of measured step times, how many lie in the 80 % interval of the predicted one

    @property
    def correlation(self) -> float | None:
        known = [s.correlation for s in self.sweeps if s.correlation is not None]
        return statistics.fmean(known) if known else None

    @property
    def regret(self) -> float | None:
        return statistics.fmean(s.regret for s in self.sweeps) if self.sweeps else None


def judge(rows: Sequence[MeasuredRun], hardware: dict[str, HardwareConfig], trainer: TrainerProfile | None = None) -> list[PredictedRun]:
    """Every row with its prediction, or the reason why it has none. ``trainer`` replaces the rows' own."""
    found: dict[int, TableCase] = {}
    reasons: dict[int, str] = {}
    for place, row in enumerate(rows):  # numbers are those of a file, and rows may be of several
        try:
            found[place] = table_case(row, hardware, trainer)
        except Unanswerable as why:
            reasons[place] = str(why)
    predicted = dict(zip(found, predict_rows(list(found.values()))))
    inside = dict(zip(found, _inside(list(found.values()), list(predicted.values()), hardware)))
    return [
        PredictedRun(row, found.get(place), predicted.get(place), reasons.get(place, ""), inside.get(place))
        for place, row in enumerate(rows)
    ]


def _inside(cases: Sequence[TableCase], predicted: Sequence[RowPrediction], hardware: dict[str, HardwareConfig]) -> list[bool | None]:
    """Returns, by row, whether the measured step time lies in the 80 % interval of its uncalibrated prediction."""
    found: list[bool | None] = [None] * len(cases)
    for name in {case.row["hardware"] for case in cases}:
        rows = [i for i, case in enumerate(cases) if case.row["hardware"] == name and case.row.step_seconds]
        if not rows:
            continue
        parts = np.array([predicted[i].causes for i in rows])
        seconds = parts.sum(axis=1)
        layouts = np.array([cases[i].layout for i in rows], dtype=cases[rows[0]].layout.dtype)
        traits = Traits(parts / seconds[:, None], coordinates(layouts))
        groups: dict[Widths, list[int]] = defaultdict(list)
        for place, widths in enumerate(widths_at(hardware[name], [asked_cells(cases[i]) for i in rows])):
            groups[widths].append(place)
        for widths, places in groups.items():
            low, high = TimeSurrogate(seconds[places], traits.rows(places), widths).posterior().interval
            for place, least, most in zip(places, low, high, strict=True):
                found[rows[place]] = bool(least <= (cases[rows[place]].row.step_seconds or 0.0) <= most)
    return found


def summary(judged: Sequence[PredictedRun]) -> Summary:
    """All figures of a selection."""
    known = [j for j in judged if j.prediction is not None]
    times = [(j.prediction.step_time_s, j.step_seconds) for j in known if j.prediction and j.step_seconds]
    sizes = [(j.prediction.reported_bytes, j.peak_bytes) for j in known if j.prediction and j.peak_bytes]
    flags = [told for j in known if (told := _verdict(j)) is not None]
    inside = [j.inside for j in known if j.inside is not None]
    verdicts = Verdicts.of(flags) if flags else None
    coverage = statistics.fmean(inside) if inside else None
    return Summary(len(judged), len(known), Errors.of(times), Errors.of(sizes), verdicts, tuple(sweeps(known)), coverage)


def _verdict(judged: PredictedRun) -> tuple[bool, bool, float, float] | None:
    flag, predicted = judged.row["oom"], judged.prediction
    if flag is None or predicted is None or judged.case is None:
        return None
    return predicted.fits < FITS, flag, predicted.reported_bytes, predicted.memory_bytes / judged.case.device.memory


def by_source(judged: Sequence[PredictedRun]) -> dict[str, Summary]:
    return {source: summary(members) for source, members in by_cell(judged, "source").items()}


def check_units(judged: Sequence[PredictedRun]) -> None:
    """Raises ``ConfigError`` where a source's measurements must be in other units."""
    for source, each in by_source(judged).items():
        check_unit(each.time, source, "step times", "seconds")
        check_unit(each.memory, source, "peak_memory_gb", "1e9 bytes")


def sweeps(judged: Sequence[PredictedRun]) -> list[RankedSweep]:
    """Groups of one model, sequence length and cluster with enough measured rows and three different layouts."""
    groups: dict[tuple[Any, ...], list[PredictedRun]] = defaultdict(list)
    keys = ("source", "model", "layers", "hidden", "heads", "ffn", "vocab", "seq", "hardware", "memory_gb", "gpus")
    for j in judged:
        if j.prediction and j.case and j.step_seconds and not {"tensor", "pipeline", "micro_batch"} & j.row.assumed:
            groups[(*(j.row.stated(key) for key in keys), bits(j.case.precision))].append(j)
    ranked = (_ranked(members) for members in groups.values() if len(members) >= MIN_SWEEP)
    return [sweep for sweep in ranked if sweep is not None]


def bits(precision: str) -> str:
    """Formats of one width are compared with each other."""
    return {"fp4": "4", "fp8": "8", "fp32": "32", "fp64": "64"}.get(precision, "16")


def short(source: str | None) -> str:
    return (source or "(no source)").split(" (")[0]


def _ranked(members: list[PredictedRun]) -> RankedSweep | None:
    if len({(j.case.layout.tobytes(), j.case.global_batch, j.case.trainer.kernels.attention) for j in members if j.case}) < 3:
        return None
    measured = [j.step_seconds / _tokens(j) for j in members if j.step_seconds]
    predicted = [j.prediction.step_time_s / _tokens(j) for j in members if j.prediction]
    row = members[0].row
    name = f"{short(row['source'])}: {row['model']} seq {row['seq']} on {row['gpus']} {row['hardware']}"
    errors = Errors.of(list(zip(predicted, measured)))
    assert errors is not None
    return RankedSweep(name, len(members), correlation(predicted, measured), regret(predicted, measured), errors)


def _tokens(judged: PredictedRun) -> float:
    """Tokens of one step: sweeps may vary the batch."""
    assert judged.case is not None
    return judged.case.global_batch * float(judged.case.shape.seq)
