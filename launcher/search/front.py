"""Chooses the next way of serving to measure, so that few measurements determine the front of time against cost. Pure.

Predictions are corrected by measurements: log(measured / predicted) is a Gaussian process over logarithms of degrees and batch: errors
shared by all points (which move no front, so their size has no prior), by similar layouts, by similar batches, by both, and one per point.
Their size is learnt with every measurement (Student's t process; Shah et al. 2014).

The front is that of the corrected values; points behind it by less than the tolerance tie. Every other point has an expected gain beyond
the tolerance over the points in its way (expected improvement of a difference of two Gaussians). The next measurement, of a challenger, of
its obstacle or of a neighbour, is the one that leaves least of these gains to chance. The search ends when the largest gain is a small part
of the tolerance.
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
"""Parts of an error's variance: the most likely ones of the 30 grids of served load in benchmarks/published, left out of the fit."""
OF_LAYOUTS, OF_BATCHES = 1.0, 1.8
"""Doublings of a degree, and of the batch, after which an error is mostly another one; from the same grids."""
FIRM = 4.0
"""Weight of the prior size of errors, in measurements."""
NOISE = 0.02
"""Standard error of a measurement, in logarithms."""
SMALL = 0.05
"""The part of the tolerance below which nothing is expected to be gained."""


@dataclass
class FrontSearch:
    """Searches the front: ``predicted`` (points,) are seconds; cost = seconds x ``per_second``; ``place`` (points, axes) are logarithms
    of base 2, the batch last; ``spread`` is the standard error of one prediction against others of the same search, in logarithms."""

    predicted: np.ndarray
    per_second: np.ndarray
    place: np.ndarray
    spread: float
    tolerance: float
    measured: dict[int, float] = field(default_factory=dict)

    def tell(self, point: int, seconds: float) -> None:
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
        """Returns the points on the front, and those within the tolerance of one of it."""
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
        """Returns for each of ``points`` the expected gain (logarithms) beyond the tolerance over every answer; the answer in its way; its
        error."""
        answer, seen = self.answer(values), list(self.measured)
        beaten = np.minimum(*behind(values, values * self.per_second, answer))[points]
        rivals = answer[np.argmax(beaten, axis=1)]
        variance = covariance[points, points] + covariance[rivals, rivals] - 2 * covariance[points, rivals]
        deviation = np.sqrt(np.maximum(variance, 1e-12))
        far = (beaten.max(axis=1) + np.log1p(self.tolerance)) / deviation
        known = np.isin(points, answer) | (np.isin(points, seen) & np.isin(rivals, seen))
        return np.where(known, 0.0, deviation * (normal_pdf(far) - far * ndtr(-far))), rivals, deviation


def behind(seconds: np.ndarray, cost: np.ndarray, best: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns how much slower and dearer (logarithms) each point is than each of ``best``: twice (points, best). Beaten if both are
    above 0."""
    return np.log(seconds)[:, None] - np.log(seconds[best]), np.log(cost)[:, None] - np.log(cost[best])
