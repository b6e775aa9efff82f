"""What the cost model says of a source that it has never seen: constants and chips' rates fitted to all other sources, nothing else.

With a few measured runs of the source given, the error that all of its rows share is taken out: with a common factor of unknown logarithm,
normal with the spread that sources have among each other, and rows around it with the spread that rows have within a source, the best
estimate after ``n`` runs is their mean error times t^2 / (t^2 + s^2 / n).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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
Key = Callable[[Judged], object]


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


def spreads(errors: Mapping[str, Sequence[float]], without: str) -> tuple[float, float]:
    """Spread of the common errors of sources, and of rows around them; medians, as if both were normal."""
    others = {source: values for source, values in errors.items() if source != without and len(values) > 2}
    middles = {source: statistics.median(values) for source, values in others.items()}
    inside = [statistics.median(abs(value - middles[source]) for value in values) for source, values in others.items()]
    if not inside:
        return 0.15, 0.1
    return 1.48 * statistics.median(map(abs, middles.values())), 1.48 * statistics.median(inside)


def after_runs(judged: Sequence[Judged], count: int, known: Mapping[str, Sequence[float]], key: Key = lambda one: "") -> float | None:
    """Median error of the rows that are left when ``count`` random runs of their source (and ``key``) are given; the mean over draws.
    ``known``: errors of sources, of which all but the row's own tell the spreads."""
    chance, totals = np.random.default_rng(0), []
    for _ in range(DRAWS):
        errors = [error for source, rows in residuals(judged).items() for error in _calibrated(rows, count, known, source, key, chance)]
        if errors:
            totals.append(statistics.median(abs(np.expm1(errors)).tolist()))
    return statistics.fmean(totals) if totals else None


def _calibrated(
    rows: list[tuple[Judged, float]], count: int, known: Mapping[str, Sequence[float]], source: str, key: Key, chance: np.random.Generator
) -> list[float]:
    """Errors of one source's rows after one draw, the drawn ones left out."""
    between, within = spreads(known, source)
    groups: dict[object, list[float]] = defaultdict(list)
    for one, error in rows:
        groups[key(one)].append(error)
    left: list[float] = []
    for errors in groups.values():
        drawn = chance.permutation(len(errors))
        given, rest = [errors[i] for i in drawn[:count]], [errors[i] for i in drawn[count:]]
        common = statistics.fmean(given) * between**2 / (between**2 + within**2 / len(given))
        left += [error - common for error in rest]
    return left
