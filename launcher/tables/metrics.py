"""Scores predictions: errors, rank correlation, regret, and the verdict on memory as a classifier. Pure functions.

error        |predicted / measured - 1|; bias is the geometric mean of predicted / measured
correlation  Spearman's, of predicted and measured time within a sweep
regret       how much slower than the sweep's best the layout is that was predicted fastest
AUC          the chance that a run that had too little memory is predicted to need more than one that ran: in bytes, so that runs on devices
             of different size are held against each other as they are, or in shares of the device
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from trainer.shared.run.errors import ConfigError

R = TypeVar("R", bound=Any)
"""A row of a table with its prediction."""


@dataclass(frozen=True)
class Errors:
    """Figures over pairs of (predicted, measured)."""

    count: int
    median: float
    mean: float
    p90: float
    bias: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Errors | None:
        if not pairs:
            return None
        errors = [abs(p / m - 1) for p, m in pairs]
        bias = math.exp(statistics.fmean(math.log(p / m) for p, m in pairs))
        return cls(len(pairs), statistics.median(errors), statistics.fmean(errors), float(np.quantile(errors, 0.9)), bias)


def by_cell(rows: Iterable[R], column: str) -> dict[str, list[R]]:
    """Returns rows grouped by the value of a column, in order of appearance."""
    groups: dict[str, list[R]] = defaultdict(list)
    for one in rows:
        groups[one.row[column] or f"(no {column})"].append(one)
    return groups


def check_unit(errors: Errors | None, source: str, column: str, unit: str, rate: bool = False) -> None:
    """Raises ``ConfigError`` if measurements are so far off that their unit must be another. A ``rate`` is inverse to time."""
    if errors and not 0.01 < errors.bias < 100:
        factor = f"{max(errors.bias, 1 / errors.bias):.2g} times {'less' if (errors.bias > 1) != rate else 'more'}"
        raise ConfigError(f"{column} of {source} are {factor} than predicted; convert them to {unit}")


@dataclass(frozen=True)
class Verdicts:
    """Predicted against real shortage of memory."""

    hits: int
    false_alarms: int
    missed: int
    rest: int
    auc: float | None
    auc_of_shares: float | None

    @classmethod
    def of(cls, told: Sequence[tuple[bool, bool, float, float]]) -> Verdicts:
        """Scores (predicted shortage, real shortage, predicted bytes, predicted bytes / the device's)."""
        hits = sum(t[0] and t[1] for t in told)
        alarms = sum(t[0] and not t[1] for t in told)
        missed = sum(t[1] and not t[0] for t in told)
        area, of_shares = (auc([t[i] for t in told if t[1]], [t[i] for t in told if not t[1]]) for i in (2, 3))
        return cls(hits, alarms, missed, len(told) - hits - alarms - missed, area, of_shares)

    @property
    def count(self) -> int:
        return self.hits + self.false_alarms + self.missed + self.rest

    @property
    def short(self) -> int:
        """Runs that had too little memory."""
        return self.hits + self.missed

    @property
    def precision(self) -> float | None:
        return _ratio(self.hits, self.hits + self.false_alarms)

    @property
    def recall(self) -> float | None:
        return _ratio(self.hits, self.hits + self.missed)

    @property
    def f1(self) -> float | None:
        return _ratio(2 * self.hits, 2 * self.hits + self.false_alarms + self.missed)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation; None where one side does not vary."""
    if len(first) < 2 or len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Returns ranks from 1; equal values have the mean of theirs. SciPy's take a second and a half to import."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[place])


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Returns the measured excess of the predicted fastest over the best; the mean over ties."""
    first = min(predicted)
    chosen = [m for p, m in zip(predicted, measured) if p <= first * (1 + 1e-12)]
    return statistics.fmean(chosen) / min(measured) - 1


def auc(positive: Sequence[float], negative: Sequence[float]) -> float | None:
    """Probability that a positive scores above a negative; a tie counts one half."""
    if not positive or not negative:
        return None
    order, count = _ranks([*positive, *negative]), len(positive)
    return float((order[:count].sum() - count * (count + 1) / 2) / (count * len(negative)))
