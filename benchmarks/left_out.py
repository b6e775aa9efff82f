"""What the cost model says of a source that it has never seen: constants and chips' rates fitted to all other sources, nothing else.

With a few measured runs of the source given, the others are predicted as a search does after so many trials: errors that layouts share move
together, as far as ``conf/uncertainty.yaml`` says. (Its widths were learnt from left-out errors of all sources, this one's among them.) The
runs are any, or those that ``trireme plan --measure`` would ask for: what they took has no part in that choice.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from benchmarks.fit import Fit, FitProblem, Parameters, left_out_parameters, with_parameters
from benchmarks.spreads import known_cells
from launcher.config.schema import HardwareConfig
from launcher.config.uncertainty import shipped_widths
from launcher.cost.known import MeasuredPoints
from launcher.cost.uncertainty import TimeSurrogate, Traits, coordinates, most_telling
from launcher.tables.canonical import MeasuredRun
from launcher.tables.cases import TableCase
from launcher.tables.predictions import predict_rows
from launcher.tables.validation import PredictedRun, judge

Each = Literal["source", "machine", "size"]
"""Of what so many runs are given: of a source, of each of its machines with a trainer, or of each number of devices."""
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

    def judge(self, rows: Sequence[MeasuredRun], hardware: dict[str, HardwareConfig]) -> list[PredictedRun]:
        """Every row as ``launcher.tables.validation.judge`` has it, predicted with what was fitted without its source."""
        shipped = judge(rows, hardware)
        cases = {i: self._changed(one.case) for i, one in enumerate(shipped) if one.case}
        found = dict(zip(cases, predict_rows(list(cases.values()))))
        return [replace(one, case=cases[i], prediction=found[i]) if i in cases else one for i, one in enumerate(shipped)]

    def _changed(self, case: TableCase) -> TableCase:
        values = self.by_source.get(case.row["source"], self.others)
        device, constants = with_parameters(case.device, case.constants, values)
        return replace(case, device=device, constants=constants)


def after_runs(judged: Sequence[PredictedRun], count: int, each: Each = "source") -> float | None:
    """Median error of the rows that are left when ``count`` random runs of ``each`` are given; the mean over draws. What the runs teach is
    what a search learns from its trials (``launcher.cost.uncertainty``)."""
    chance, totals = np.random.default_rng(0), []
    learners = learners_of(judged, each)
    for _ in range(DRAWS):
        errors = [error for learner in learners for error in learner.errors(learner.drawn(count, chance))]
        if errors:
            totals.append(statistics.median(errors))
    return statistics.fmean(totals) if totals else None


def after_chosen(judged: Sequence[PredictedRun], count: int, each: Each = "source") -> float | None:
    """The same where the runs are those that tell most of all others."""
    errors = [error for learner in learners_of(judged, each) for error in learner.errors(learner.chosen(count))]
    return statistics.median(errors) if errors else None


def learners_of(judged: Sequence[PredictedRun], each: Each) -> list[Learner]:
    """One for each source."""
    sources: dict[str, list[PredictedRun]] = defaultdict(list)
    for one in judged:
        if one.prediction and one.case and one.step_seconds:
            sources[one.row["source"]].append(one)
    return [Learner.of(rows, each) for rows in sources.values()]


@dataclass(frozen=True)
class Learner:
    """The rows of one source, and what is believed of them before any is measured."""

    believed: TimeSurrogate
    parts: np.ndarray  # (n, k) predicted seconds
    measured: np.ndarray  # (n,) seconds
    group: Sequence[object]  # of each row: every group has runs given
    machine: np.ndarray  # (n,) number of the machine and trainer: only their own runs teach anything of them

    @classmethod
    def of(cls, rows: Sequence[PredictedRun], each: Each) -> Learner:
        cases = [one.case for one in rows if one.case]
        parts = np.array([one.prediction.causes for one in rows if one.prediction])
        layouts = np.array([case.layout for case in cases], dtype=cases[0].layout.dtype)
        place = np.concatenate([coordinates(layouts), MeasuredPoints.of([known_cells(case) for case in cases]).machines], axis=1)
        believed = TimeSurrogate(parts.sum(axis=1), Traits(parts / parts.sum(axis=1, keepdims=True), place), shipped_widths())
        measured = np.array([one.step_seconds for one in rows], dtype=float)
        machines = [(one.row["hardware"], one.row["trainer"]) for one in rows]
        groups: dict[Each, Sequence[object]] = {
            "source": [None] * len(rows),
            "machine": machines,
            "size": [one.row["gpus"] for one in rows],
        }
        return cls(believed, parts, measured, groups[each], np.array([machines.index(one) for one in machines]))

    def drawn(self, count: int, chance: np.random.Generator) -> list[int]:
        """Random rows, so many of each group."""
        given: dict[object, list[int]] = defaultdict(list)
        for i in chance.permutation(len(self.measured)).tolist():
            if len(given[self.group[i]]) < count:
                given[self.group[i]].append(i)
        return [i for some in given.values() for i in some]

    def chosen(self, count: int) -> list[int]:
        """As many, those that tell most of all."""
        traits = replace(self.believed.traits, unit=self.machine)
        groups = [np.array([i for i, own in enumerate(self.group) if own == group]) for group in dict.fromkeys(self.group)]
        return most_telling(self.believed.widths, traits, [rows for rows in groups for _ in range(count)])[0]

    def errors(self, told: Sequence[int]) -> list[float]:
        """Relative errors of the rows that are not ``told``."""
        seconds = self.believed.seconds.copy()
        for machine in {self.machine[i] for i in told}:
            rows = np.flatnonzero(self.machine == machine)
            seconds[rows] = self._learnt(rows, [i for i in told if self.machine[i] == machine])
        return [float(error) for error in np.delete(np.abs(seconds / self.measured - 1), told)]

    def _learnt(self, rows: np.ndarray, told: Sequence[int]) -> np.ndarray:
        """Seconds of ``rows``, of one machine, after its runs ``told``."""
        believed = TimeSurrogate(self.believed.seconds[rows], self.believed.traits.rows(rows), self.believed.widths)
        for i in told:
            believed.observe(int(np.searchsorted(rows, i)), self.parts[i], float(self.measured[i]))
        return np.exp(believed.posterior().mean)
