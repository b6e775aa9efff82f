"""How good predictions are: errors, rank correlation, regret, and the verdict on memory as a classifier. Pure functions.

error        |predicted / measured - 1|; bias is the geometric mean of predicted / measured
correlation  Spearman's, of predicted and measured time within a sweep
regret       how much slower than the sweep's best the layout is that was predicted fastest
AUC          the chance that a run that had too little memory is predicted to need more than one that ran: in bytes, so that runs on devices
             of different size are held against each other as they are, or in shares of the device
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


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
        """None without pairs."""
        if not pairs:
            return None
        errors = [abs(p / m - 1) for p, m in pairs]
        bias = math.exp(statistics.fmean(math.log(p / m) for p, m in pairs))
        return cls(len(pairs), statistics.median(errors), statistics.fmean(errors), quantile(errors, 0.9), bias)


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
        """Of (predicted shortage, real shortage, predicted bytes, predicted bytes / the device's)."""
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


def quantile(values: Sequence[float], fraction: float) -> float:
    """Linear interpolation between the closest ranks."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * fraction
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    out = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in range(start, end + 1):
            out[order[place]] = (start + end) / 2 + 1
        start = end + 1
    return out


def correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation; None where one side does not vary."""
    if len(first) < 2:
        return None
    one, two, mean = ranks(first), ranks(second), (len(first) + 1) / 2
    spread = sum((a - mean) ** 2 for a in one) * sum((b - mean) ** 2 for b in two)
    return sum((a - mean) * (b - mean) for a, b in zip(one, two)) / math.sqrt(spread) if spread > 0 else None


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Measured excess over the best of what was predicted fastest; the mean over ties."""
    first = min(predicted)
    chosen = [m for p, m in zip(predicted, measured) if p <= first * (1 + 1e-12)]
    return statistics.fmean(chosen) / min(measured) - 1


def auc(positive: Sequence[float], negative: Sequence[float]) -> float | None:
    """Probability that a positive scores above a negative; a tie counts one half."""
    if not positive or not negative:
        return None
    order = ranks([*positive, *negative])
    count = len(positive)
    return (sum(order[:count]) - count * (count + 1) / 2) / (count * len(negative))
