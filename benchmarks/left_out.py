"""What the cost model says of a source that it has never seen: constants and chips' rates fitted to all other sources, nothing else.

With a few measured runs of the source given, the error that its rows share is taken out: logarithms of errors are the sum of a part common
to the source and a rest, with the spreads that other sources have.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.fit import Fit, FitProblem, Parameters, left_out_parameters, with_parameters
from launcher.config.schema import HardwareConfig
from launcher.tables.canonical import MeasuredRun
from launcher.tables.cases import TableCase
from launcher.tables.predictions import predict_rows
from launcher.tables.validation import Judged, judge

DRAWS = 40
"""Random choices of the runs that are given."""


@dataclass(frozen=True)
class Unseen:
    """Constants for rows of each source; those of a source that was not fitted to are those of the whole fit."""

    by_source: Mapping[str, Parameters]
    others: Parameters

    @classmethod
    def of(cls, problem: FitProblem, whole: Fit) -> Unseen:
        return cls(left_out_parameters(problem, whole), whole.values)

    def judge(self, rows: Sequence[MeasuredRun], hardware: dict[str, HardwareConfig]) -> list[Judged]:
        """Every row as ``launcher.tables.validation.judge`` has it, predicted with what was fitted without its source."""
        shipped = judge(rows, hardware)
        cases = {i: self._changed(one.case) for i, one in enumerate(shipped) if one.case}
        found = dict(zip(cases, predict_rows(list(cases.values()))))
        return [replace(one, case=cases[i], prediction=found[i]) if i in cases else one for i, one in enumerate(shipped)]

    def _changed(self, case: TableCase) -> TableCase:
        values = self.by_source.get(case.row["source"], self.others)
        device, constants = with_parameters(case.device, case.constants, values)
        return replace(case, device=device, constants=constants)


def residuals(judged: Sequence[Judged]) -> dict[str, list[tuple[Judged, float]]]:
    """Timed rows of each source, with the logarithm of predicted / measured."""
    found: dict[str, list[tuple[Judged, float]]] = defaultdict(list)
    for one in judged:
        if one.prediction and one.step_seconds:
            found[one.row["source"]].append((one, float(np.log(one.prediction.step_time_s / one.step_seconds))))
    return found


def spreads(known: Sequence[Judged], without: str) -> tuple[float, float]:
    """Mean size of the error that a source's rows share, and the standard deviation of rows around it, over all sources but one."""
    sources = [[error for _, error in rows] for name, rows in residuals(known).items() if name != without and len(rows) > 2]
    if len(sources) < 3:
        return 0.1, 0.1
    middles = [statistics.median(errors) for errors in sources]
    inside = [statistics.median(abs(error - middle) for error in errors) for errors, middle in zip(sources, middles)]
    return statistics.fmean(map(abs, middles)), 1.48 * statistics.median(inside)


def common_error(given: Sequence[float], shared: float, row: float) -> float:
    """The most probable common error behind the errors of ``given`` runs. Most sources share little, a few much (Laplace): what could be
    chance is not believed."""
    mean = statistics.fmean(given)
    return float(np.sign(mean)) * max(abs(mean) - row**2 / (len(given) * shared), 0.0)


def after_runs(judged: Sequence[Judged], count: int, known: Sequence[Judged], sizes: bool = False) -> float | None:
    """Median error of the rows that are left when ``count`` random runs of their source are given, with ``sizes`` of every number of
    devices; the mean over draws. ``known``: rows of left-out sources, of which all but the row's own tell what rows share."""
    chance, totals = np.random.default_rng(0), []
    sources = {source: (rows, spreads(known, source)) for source, rows in residuals(judged).items()}
    for _ in range(DRAWS):
        errors = [error for rows, widths in sources.values() for error in _calibrated(rows, count, widths, sizes, chance)]
        if errors:
            totals.append(statistics.median(abs(np.expm1(errors)).tolist()))
    return statistics.fmean(totals) if totals else None


def _calibrated(
    rows: Sequence[tuple[Judged, float]], count: int, widths: tuple[float, float], sizes: bool, chance: np.random.Generator
) -> list[float]:
    """Errors of one source's rows after one draw, the drawn ones left out."""
    groups: dict[object, list[float]] = defaultdict(list)
    for i in chance.permutation(len(rows)):
        groups[rows[i][0].row["gpus"] if sizes else None].append(rows[i][1])
    return [error - common_error(errors[:count], *widths) for errors in groups.values() for error in errors[count:]]
