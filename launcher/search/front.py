"""Which way of serving to measure next, so that the front of time against cost is known with few measurements. Pure.

Predictions are corrected by what was measured: the logarithm of measured / predicted is a Gaussian process over the logarithms of degrees
and batch, a part of it an error that all share. The front is that of the corrected values. Once every layout near it was measured, the
next is what is not on it, but would gain most if it were: the expected amount by which it beats what stands in its way (expected
improvement of a difference of two Gaussians). The search ends when that is a small part of the tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from scipy.special import ndtr

from launcher.cost.uncertainty import normal_pdf
from launcher.planning.inference import front

SHARED, OF_LAYOUTS, OF_BATCHES = 0.25, 0.7, 3.0
"""The part of the variance that all points share; doublings of a degree, and of the batch, after which the rest is mostly another error."""
NOISE = 0.02
"""Standard error of a measurement, in logarithms."""
SMALL = 0.05
"""The part of the tolerance below which nothing is expected to be gained."""


@dataclass
class FrontSearch:
    """``predicted`` (points,) are seconds; ``per_second`` what a second costs relative to the others, so that cost = seconds x that;
    ``place`` (points, axes) are logarithms of base 2, the batch last; ``spread`` is the standard error of a prediction, in logarithms."""

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
        """The point to measure next; None when nothing is worth it. First every layout (all of ``place`` but the batch) that is on the
        front, or may be, is measured once: how far predictions are off is mostly a matter of the layout."""
        values, covariance = self.corrected()
        if not np.isfinite(values).any():
            return None
        named = self.named(values)
        gains = self._gains(values, covariance, named)
        gains[named], gains[list(self.measured)] = 0.0, -1.0
        unseen = self._unseen()
        near = [i for i in named if unseen[i]] or [i for i in np.flatnonzero(unseen) if gains[i] > SMALL * self.tolerance]
        if near:
            return int(near[len(near) // 2])
        best = int(np.argmax(gains))
        return None if gains[best] < SMALL * self.tolerance else best

    def _unseen(self) -> np.ndarray:
        """Whether nothing of a point's layout was measured yet."""
        seen = {tuple(self.place[i, :-1]) for i in self.measured}
        return np.array([tuple(place[:-1]) not in seen for place in self.place])

    def named(self, values: np.ndarray | None = None) -> np.ndarray:
        """The points that are said to be on the front."""
        seconds = self.corrected()[0] if values is None else values
        return front(seconds, seconds * self.per_second)

    def answer(self) -> np.ndarray:
        """The points on the front, and those behind it by less than the tolerance: with errors of that size they may be on it."""
        seconds = self.corrected()[0]
        cost, named = seconds * self.per_second, self.named(seconds)
        behind = np.maximum(seconds[:, None] / seconds[named], cost[:, None] / cost[named])
        return np.flatnonzero(behind.min(axis=1) <= 1 + self.tolerance)

    def corrected(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of each point by prediction and measurements, and the covariance of their logarithms."""
        prior = self._prior
        seen = list(self.measured)
        if not seen:
            return self.predicted, prior
        inner = prior[np.ix_(seen, seen)] + NOISE**2 * np.eye(len(seen))
        off = np.log([self.measured[i] / self.predicted[i] for i in seen])
        weights = np.linalg.solve(inner, prior[seen])
        values = self.predicted * np.exp(weights.T @ off)
        values[seen] = [self.measured[i] for i in seen]
        return values, prior - prior[:, seen] @ weights

    @cached_property
    def _prior(self) -> np.ndarray:
        doublings = (self.place[:, None] - self.place[None]) / np.array([*[OF_LAYOUTS] * (self.place.shape[1] - 1), OF_BATCHES])
        return self.spread**2 * (SHARED + (1 - SHARED) * np.exp(-(doublings**2).sum(axis=-1) / 2))

    def _gains(self, values: np.ndarray, covariance: np.ndarray, named: np.ndarray) -> np.ndarray:
        """Expected amount (in logarithms) by which each point beats the point of the front that it is nearest to beating; below 0 where it
        cannot run."""
        runs = np.flatnonzero(np.isfinite(values))
        seconds, cost = np.log(values), np.log(values * self.per_second)
        behind = np.maximum(seconds[runs, None] - seconds[named], cost[runs, None] - cost[named])
        rivals = named[np.argmin(behind, axis=1)]
        variance = covariance[runs, runs] + covariance[rivals, rivals] - 2 * covariance[runs, rivals] + 2 * NOISE**2
        deviation = np.sqrt(np.maximum(variance, 1e-12))
        far = behind.min(axis=1) / deviation
        gains = np.full(len(values), -1.0)
        gains[runs] = deviation * (normal_pdf(far) - far * ndtr(-far))
        return gains


def behind_front(chosen: np.ndarray, seconds: np.ndarray, cost: np.ndarray) -> float:
    """How far ``chosen`` points are from the true front: the largest factor, over its points, by which the nearest chosen one is slower or
    dearer, less 1."""
    best = front(seconds, cost)
    factors = np.maximum(seconds[chosen][None] / seconds[best][:, None], cost[chosen][None] / cost[best][:, None])
    return float(factors.min(axis=1).max() - 1)
