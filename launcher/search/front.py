"""Which way of serving to measure next, so that the front of time against cost is known with few measurements. Pure.

Predictions are corrected by what was measured: log(measured / predicted) is a Gaussian process over logarithms of degrees and batch, a sum
of errors that all points share, that those of similar layouts, of similar batches or of both share, and that a point has alone. The first
moves no front, so nothing is believed about its size. How large the others are is learnt with every measurement (Student's t process; Shah
et al. 2014).

The front is that of the corrected values; what is behind it by less than the tolerance ties. Of every other point it is known how much
it is expected to beat, by more than the tolerance, what stands in its way (expected improvement of a difference of two Gaussians). The
next measurement is the one that leaves least of these gains to chance, be it of a challenger, of what stands in its way, or of a neighbour
of both. The search ends when the largest gain is a small part of the tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from launcher.cost.normal import ndtr, normal_pdf
from launcher.planning.serving.plan import front

COMMON = 1.0
"""Standard error that all points share, in logarithms: next to unknown."""
LAYOUT, BATCH, BOTH, ALONE = 0.05, 0.2, 0.65, 0.1
"""Parts of the variance of an error against that of the others: the most likely ones of the 30 grids of served load in
benchmarks/published, their models left out of the fit of the constants."""
OF_LAYOUTS, OF_BATCHES = 1.0, 1.8
"""Doublings of a degree, and of the batch, after which an error is mostly another one; from the same grids."""
FIRM = 4.0
"""Measurements after which what was measured says as much of the size of errors as what was believed before."""
NOISE = 0.02
"""Standard error of a measurement, in logarithms."""
SMALL = 0.05
"""The part of the tolerance below which nothing is expected to be gained."""


@dataclass
class FrontSearch:
    """``predicted`` (points,) are seconds; ``per_second`` what a second costs relative to the others, so that cost = seconds x that;
    ``place`` (points, axes) are logarithms of base 2, the batch last; ``spread`` is the standard error of a
    prediction against others of the same search, in logarithms."""

    predicted: np.ndarray
    per_second: np.ndarray
    place: np.ndarray
    spread: float
    tolerance: float
    measured: dict[int, float] = field(default_factory=dict)

    def tell(self, point: int, seconds: float) -> None:
        """What a point was measured to take."""
        self.measured[point] = seconds

    def drop(self, point: int) -> None:
        """A point that cannot run."""
        self.predicted = np.where(np.arange(len(self.predicted)) == point, np.inf, self.predicted)

    def ask(self) -> int | None:
        """The point to measure next; None when nothing is worth it."""
        runs = np.flatnonzero(np.isfinite(self.predicted))
        if not len(runs):
            return None
        values, covariance = self.corrected()
        gains, rivals, deviation = self._gains(values, covariance, runs)
        if gains.max() <= SMALL * self.tolerance:
            return None
        with_each = covariance[runs] - covariance[rivals]  # of a difference with each point: what measuring that says of it
        told = with_each**2 / (np.diag(covariance) + NOISE**2)
        left = np.sqrt(np.maximum(deviation[:, None] ** 2 - told, 0.0))
        worth = (gains[:, None] * (1 - left / deviation[:, None])).sum(axis=0)
        worth[[*self.measured, *np.flatnonzero(~np.isfinite(self.predicted))]] = -1.0
        return int(np.argmax(worth))

    def named(self, values: np.ndarray | None = None) -> np.ndarray:
        """The points that are said to be on the front."""
        seconds = self.corrected()[0] if values is None else values
        return front(seconds, seconds * self.per_second)

    def answer(self, values: np.ndarray | None = None) -> np.ndarray:
        """The points on the front, and those that differ from one of it by less than the tolerance: with errors of that size they may be on
        it in its place."""
        seconds = self.corrected()[0] if values is None else values
        slower, dearer = behind(seconds, seconds * self.per_second, self.named(seconds))
        return np.flatnonzero(np.maximum(slower, dearer).min(axis=1) <= np.log1p(self.tolerance))

    def corrected(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of each point by prediction and measurements, and the covariance of their logarithms."""
        prior, seen = self._prior, list(self.measured)
        if not seen:
            return self.predicted, prior
        inner = prior[np.ix_(seen, seen)] + NOISE**2 * np.eye(len(seen))
        off = np.log([self.measured[i] / self.predicted[i] for i in seen])
        weights = np.linalg.solve(inner, prior[seen])
        values = self.predicted * np.exp(weights.T @ off)
        values[seen] = [self.measured[i] for i in seen]
        size = (FIRM + off @ np.linalg.solve(inner, off)) / (FIRM + len(seen) - 1)
        return values, size * (prior - prior[:, seen] @ weights)

    @cached_property
    def _prior(self) -> np.ndarray:
        apart = (self.place[:, None] - self.place[None]) ** 2 / 2
        layout, batch = np.exp(-apart[..., :-1].sum(axis=-1) / OF_LAYOUTS**2), np.exp(-apart[..., -1] / OF_BATCHES**2)
        alone = np.eye(len(self.place))
        return COMMON**2 + self.spread**2 * (LAYOUT * layout + BATCH * batch + BOTH * layout * batch + ALONE * alone)

    def _gains(self, values: np.ndarray, covariance: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each of ``points``: the expected amount (in logarithms) by which it is faster, or costs less, than any of the answer, beyond
        the tolerance; 0 where it is of the answer, or known and so is what beats it most; that one; the standard error between the two."""
        answer, seen = self.answer(values), list(self.measured)
        beaten = np.minimum(*behind(values, values * self.per_second, answer))[points]
        rivals = answer[np.argmax(beaten, axis=1)]
        variance = covariance[points, points] + covariance[rivals, rivals] - 2 * covariance[points, rivals]
        deviation = np.sqrt(np.maximum(variance, 1e-12))
        far = (beaten.max(axis=1) + np.log1p(self.tolerance)) / deviation
        known = np.isin(points, answer) | (np.isin(points, seen) & np.isin(rivals, seen))
        return np.where(known, 0.0, deviation * (normal_pdf(far) - far * ndtr(-far))), rivals, deviation


def behind(seconds: np.ndarray, cost: np.ndarray, best: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How much slower and how much dearer (in logarithms) each point is than each of the points ``best``: twice (points, best). Where
    both are above 0 it is beaten."""
    return np.log(seconds)[:, None] - np.log(seconds[best]), np.log(cost)[:, None] - np.log(cost[best])
