"""What is believed of every candidate's step time and memory, given the cost model and the trials measured so far. Pure numpy.

Time. The model is off by a factor: log(measured / predicted) of candidate i is taken to be

    a + sum over time parts k of share_ik c_k + l(layout_i) + noise,        share_ik = part_ik / step time_i

with one constant a for the cluster, one correction c_k per part of the step (matrix products, tensor collectives, bubble ...),
a smooth function l of the layout for what no part explains, and noise. All are Gaussian with zero mean, so that a few measured
trials correct the model as far as they can and no further (Gaussian process regression; Rasmussen & Williams 2006, section 2.2).
How wide the prior is, is itself only believed: where trials differ from the model by more than it allows, all standard deviations grow
by one factor (a Student process; the same book, section 9.9, with ``trust`` trials' worth of belief in the prior).

Memory. The need is off by one factor for the cluster and by noise per layout. A trial that ran says that its need was below the
capacity, one that ran out says that it was above, a measured peak says how much it was. The factor's distribution is kept on a grid.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.special import ndtr


@dataclass(frozen=True)
class Prior:
    """How far the cost model is trusted, as standard deviations of logarithms: what makes the published sweeps of 13B most likely."""

    cluster: float = 0.30  # a
    part: float = 0.20  # c_k
    layout: float = 0.08  # l
    reach: float = 1.2  # distance in layout space (doublings of a degree) over which l forgets
    noise: float = 0.01
    trust: float = 4.0  # trials that agree with these widths, as it were, before the first
    transfer: float = 0.04  # noise of a measurement on fewer nodes as one of the full size
    memory: float = 0.10  # the cluster's factor on memory
    memory_noise: float = 0.06


@dataclass(frozen=True)
class Candidates:
    """What the cost model says of each candidate; arrays over candidates."""

    parts: np.ndarray  # (n, k) seconds per time part; their sum is the predicted step time
    memory: np.ndarray  # (n,) predicted peak in bytes
    features: np.ndarray  # (n, f) coordinates of the layout
    capacity: float  # bytes of the device

    def __post_init__(self) -> None:
        n = len(self.parts)
        assert self.memory.shape == (n,) and len(self.features) == n, "one entry per candidate"

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def seconds(self) -> np.ndarray:
        return self.parts.sum(axis=1)

    @property
    def shares(self) -> np.ndarray:
        return self.parts / self.seconds[:, None]


@dataclass
class TimeSurrogate:
    """Gaussian process over log(measured / predicted)."""

    candidates: Candidates
    prior: Prior
    shares: list[np.ndarray] = field(default_factory=list)  # of each measured trial
    features: list[np.ndarray] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)  # log(measured / predicted)
    noise: list[float] = field(default_factory=list)

    def observe(self, parts: np.ndarray, features: np.ndarray, seconds: float, noise: float = 0.0, full: bool = True) -> None:
        """A trial whose predicted ``parts`` add up to a prediction took ``seconds``, give or take ``noise``; on all nodes or fewer."""
        self.shares.append(parts / parts.sum())
        self.features.append(features)
        self.ratios.append(float(np.log(seconds / parts.sum())))
        self.noise.append(max(self.prior.noise if full else self.prior.transfer, noise))

    def posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of every candidate's true log step time (a measurement adds its noise)."""
        shares, features = self.candidates.shares, self.candidates.features
        prior_variance = self.prior.cluster**2 + self.prior.part**2 * (shares**2).sum(axis=1) + self.prior.layout**2
        mean, variance = np.log(self.candidates.seconds), prior_variance
        if self.ratios:
            seen_shares, seen_features = np.array(self.shares), np.array(self.features)
            gram = self._covariance(seen_shares, seen_features, seen_shares, seen_features)
            gram += np.diag(np.square(self.noise))
            cross = self._covariance(shares, features, seen_shares, seen_features)
            weights = np.linalg.solve(gram, np.column_stack([np.array(self.ratios)[:, None], cross.T]))
            mean = mean + cross @ weights[:, 0]
            variance = prior_variance - np.einsum("nm,mn->n", cross, weights[:, 1:])
            surprise = (self.prior.trust + np.array(self.ratios) @ weights[:, 0]) / (self.prior.trust + len(self.ratios))
            variance = variance * max(float(surprise), 1.0)
        return mean, np.sqrt(np.maximum(variance, 1e-12))

    def _covariance(self, shares: np.ndarray, features: np.ndarray, other_shares: np.ndarray, other_features: np.ndarray) -> np.ndarray:
        distance = ((features[:, None, :] - other_features[None, :, :]) ** 2).sum(axis=2)
        local = self.prior.layout**2 * np.exp(-distance / (2 * self.prior.reach**2))
        return np.asarray(self.prior.cluster**2 + self.prior.part**2 * shares @ other_shares.T + local)


@dataclass
class MemorySurrogate:
    """Distribution of the log factor between needed and predicted memory, on a grid."""

    candidates: Candidates
    prior: Prior

    def __post_init__(self) -> None:
        self.grid = np.linspace(-10, 10, 81) * self.prior.memory
        self.log_weight = -0.5 * (self.grid / self.prior.memory) ** 2

    def observe(self, predicted: float, ran: bool, peak: float = 0.0) -> None:
        """A trial predicted to need ``predicted`` bytes ran or ran out of memory; ``peak`` is what it was seen to use, if it was."""
        if peak:
            self.log_weight += -0.5 * ((np.log(peak / predicted) - self.grid) / self.prior.memory_noise) ** 2
            return
        fits = ndtr(self._margin(np.array([predicted]))[0])
        self.log_weight += np.log(np.maximum(fits if ran else 1 - fits, 1e-12))

    def fits(self) -> np.ndarray:
        """Probability that each candidate fits into memory."""
        weight = np.exp(self.log_weight - self.log_weight.max())
        return ndtr(self._margin(self.candidates.memory)) @ (weight / weight.sum())

    def _margin(self, predicted: np.ndarray) -> np.ndarray:
        """(candidates, grid): distance of the need from the capacity in standard deviations."""
        with np.errstate(divide="ignore"):
            need = np.log(predicted / self.candidates.capacity)
        return -(need[:, None] + self.grid[None, :]) / self.prior.memory_noise


def normal_pdf(z: np.ndarray) -> np.ndarray:
    """Standard normal density."""
    return np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)
