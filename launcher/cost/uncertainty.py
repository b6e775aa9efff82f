"""How far a prediction may be off: a distribution of log(measured / predicted), one for all layouts of a question together. Pure numpy.

    log(measured / predicted) of layout i = a + sum over time parts k of share_ik c_k + s (l(layout_i) + r_i),   share_ik = part_ik / step
    time_i

``a`` is the common error of machine and trainer: it moves every layout alike, so that one measured run nearly removes it. The rest is the
error of one layout against another, on which ranking hangs: one correction c_k for each part of the step, a smooth function l of the layout
for what no part explains, and r, which no other layout shares. All are Gaussian with zero mean (Gaussian process regression; Rasmussen &
Williams 2006, section 2.2). How large what no part explains is differs from machine to machine by a factor s, which is log-normal;
integrals over it are sums over the nodes of Gauss-Hermite quadrature, so that a distribution is a mixture of few Gaussians with one weight
each (hierarchical model; Gelman et al., Bayesian Data Analysis, chapter 5). Where measured trials scatter more than was expected, the
weights move to the wide ones; the width of ``a`` has a factor like s, but of its own, so that a machine on which everything takes twice as
long is not taken for one whose layouts scatter. The corrections of parts have no part in s: a few trials that agree say that the mechanisms
describe this machine, not that a part which they hardly have is predicted well.

The widths are data, conf/uncertainty.yaml, learnt from runs whose source was left out of every fit (``python -m benchmarks.spreads``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from threadpoolctl import threadpool_limits

from launcher.config.uncertainty import Widths
from launcher.cost.normal import ndtr, ndtri, normal_pdf
from launcher.cost.parts import RATED, WIDTH_OF_PART
from trainer.shared.run.schema import RECOMPUTE, SCHEDULES

KIND = 1.5
"""Distance between two kinds of recomputation or schedules, in doublings of a degree."""
NODES = 15
"""Sizes of ``s`` over which is summed before any trial, and of the factor of the common error, of which a machine has one."""
FARTHEST_SIZE = 4.5
"""Standard deviations of the logarithm of ``s`` within which it is looked for."""
SEED = 20260101
"""Seed of all draws: the same question has the same answer."""
CONTENDERS = 400
"""Layouts that are drawn jointly: those most likely to win. A search adds what the rest adds at most (union bound)."""
DRAWS = 4096
HOPELESS = 1e-6
"""Layouts that fit with a smaller probability have no part in who is the fastest."""
HARDLY = 1e-3
"""Sizes of errors that are so much less likely than the likeliest are left out."""
LOW, HIGH = 0.1, 0.9
"""The ends of an 80 % interval."""


Size = tuple[float, float]
"""``s**2``, and what the variance of the common error is multiplied by."""


@dataclass(frozen=True)
class Traits:
    """Features that the error of a prediction depends on; arrays over layouts."""

    shares: np.ndarray  # (n, k) of the step time, by part
    place: np.ndarray  # (n, f) where the layout lies, in doublings
    unit: np.ndarray | None = None  # (n,) number of the machine and trainer, whose errors have nothing in common; None: all have the same

    def __len__(self) -> int:
        return len(self.shares)

    def rows(self, index: np.ndarray | Sequence[int]) -> Traits:
        """Some of them."""
        return Traits(self.shares[index], self.place[index], None if self.unit is None else self.unit[index])


def columns(parts: Mapping[str, float | np.ndarray], count: int) -> np.ndarray:
    """Time parts as a matrix (layouts, parts). A part that is never negative but for rounding stays so."""
    return np.maximum(np.stack([np.broadcast_to(seconds, (count,)) for seconds in parts.values()], axis=1), 0.0)


def coordinates(table: np.ndarray) -> np.ndarray:
    """Where layouts lie, so that what no part of the time explains is learnt for similar ones: doublings of degrees, kinds apart."""
    log = {name: np.log2(table[name]) for name in ("tensor", "pipeline", "virtual_pipeline", "micro_batch")}
    log["slices"] = np.log2(np.maximum(table["slices"], 1))
    log |= {name: np.log2(table[name]) / 4 for name in ("params", "grads", "optimizer")}
    kinds = [KIND * (table["recompute"] == i) / np.maximum(table["recompute_every"], 1) for i in range(1, len(RECOMPUTE))]
    kinds += [KIND * (table["schedule"] == i) for i in range(len(SCHEDULES))]
    return np.stack([*log.values(), *kinds, table["sequence_parallel"].astype(float), table["offload"]], axis=1)


@cache
def sizes() -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights (NODES,) of an integral over a standard normal variable."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    return nodes, weights / weights.sum()


def near_sizes(scale: float, runs: int) -> tuple[np.ndarray, np.ndarray]:
    """The same on equal steps, for what a number of measured runs leaves of s: its logarithm is known to 1 / sqrt(2 ``runs``), as that of
    any standard deviation is, and would lie at whichever of few nodes is nearest. On steps of 1.4 times that, sums of normal densities are
    their integrals to four digits."""
    count = int(np.ceil(FARTHEST_SIZE * scale * np.sqrt(max(runs, 2))))
    nodes = np.linspace(-FARTHEST_SIZE, FARTHEST_SIZE, 2 * max(count, NODES // 2) + 1)
    weights = normal_pdf(nodes)
    return nodes, weights / weights.sum()


def part_widths(widths: Widths, count: int) -> np.ndarray:
    """(count,) width of each part of a step; of parts that are not those of a step, that of any."""
    if count != len(WIDTH_OF_PART):
        return np.full(count, widths.part)
    return np.array([getattr(widths, name) for name in WIDTH_OF_PART.values()])


def rated(traits: Traits) -> np.ndarray:
    """(n,) share of the step that goes as fast as the chip's matrix units, in whatever part; 0 where parts are not those of a step."""
    if traits.shares.shape[1] != len(WIDTH_OF_PART):
        return np.zeros(len(traits))
    return np.asarray(traits.shares[:, [name in RATED for name in WIDTH_OF_PART]].sum(axis=1))


@dataclass(frozen=True)
class Covariance:
    """Covariance of the errors of some layouts with others': explained by machine, trainer and parts
    of the step, and the rest, for s = 1."""

    sure: np.ndarray
    rest: np.ndarray
    common: np.ndarray  # what ``sure`` has of the common error

    def at(self, factor: np.ndarray | float, common: float = 1.0) -> np.ndarray:
        """For ``factor`` = s**2, and a common error whose variance is ``common`` times as large."""
        return np.asarray(self.sure + factor * self.rest + (common - 1.0) * self.common)


def squared_distance(one: Traits, other: Traits) -> np.ndarray:
    """(n, m) in doublings."""
    squares = (one.place**2).sum(axis=1)[:, None] + (other.place**2).sum(axis=1)[None, :]
    return np.maximum(squares - 2 * one.place @ other.place.T, 0.0)


def between(widths: Widths, one: Traits, other: Traits, same: np.ndarray, distance: np.ndarray | None = None) -> Covariance:
    """(n, m) covariances; ``same`` says who shares what no other layout does; ``distance``: ``squared_distance``, if it is known."""
    distance = squared_distance(one, other) if distance is None else distance
    smooth = widths.layout**2 * np.exp(-distance / (2 * widths.reach**2))
    each = part_widths(widths, one.shares.shape[1])
    parts, rest = (one.shares * each) @ (other.shares * each).T, smooth + widths.rough**2 * same
    if widths.rate:
        parts = parts + widths.rate**2 * np.outer(rated(one), rated(other))
    common = np.full(parts.shape, widths.common**2)
    if one.unit is None or other.unit is None:
        return Covariance(common + parts, rest, common)
    together = one.unit[:, None] == other.unit[None, :]
    return Covariance((common + parts) * together, rest * together, common * together)


def own_variance(widths: Widths, traits: Traits) -> Covariance:
    """(n,) the diagonals of ``between``."""
    each = part_widths(widths, traits.shares.shape[1])
    common = np.full(len(traits), widths.common**2)
    sure = common + ((traits.shares * each) ** 2).sum(axis=1) + (widths.rate * rated(traits)) ** 2
    return Covariance(sure, np.full(len(traits), widths.layout**2 + widths.rough**2), common)


@dataclass(frozen=True)
class Mixture:
    """A distribution of log step time for each layout: a Gaussian for each size of the unexplained error."""

    weights: np.ndarray  # (k,)
    means: np.ndarray  # (k, n)
    spreads: np.ndarray  # (k, n)

    @property
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """(n,) seconds that a layout stays above, and below: 80 % lie between."""
        high = self.quantile(HIGH)
        if not np.ptp(self.means, axis=0).any():  # before any trial all nodes have one mean, and the distribution is symmetric
            return np.exp(2 * self.means[0]) / high, high
        return self.quantile(LOW), high

    @property
    def mean(self) -> np.ndarray:
        return np.asarray(self.weights @ self.means)

    @property
    def spread(self) -> np.ndarray:
        """Standard deviation."""
        second = self.weights @ (self.spreads**2 + self.means**2)
        return np.sqrt(np.maximum(second - self.mean**2, 1e-12))

    def below(self, logarithm: np.ndarray | float) -> np.ndarray:
        """(n,) probability that a layout takes less than exp(``logarithm``) seconds."""
        return np.asarray(self.weights @ ndtr((logarithm - self.means) / self.spreads))

    def quantile(self, probability: float) -> np.ndarray:
        """(n,) seconds below which a layout stays with ``probability``: by Newton's method, held inside of what the widest node allows."""
        deviate = float(ndtri(np.array(probability)))
        widest = abs(deviate) * self.spreads.max(axis=0) + np.ptp(self.means, axis=0)
        low, high = self.mean - widest, self.mean + widest
        value = self.mean + deviate * self.spread
        for _ in range(12):
            z = (value - self.means) / self.spreads
            density = self.weights @ (normal_pdf(z) / self.spreads)
            off = self.weights @ ndtr(z) - probability
            before, value = value, np.clip(value - off / np.maximum(density, 1e-9), low, high)
            if np.abs(value - before).max() < 1e-9:
                break
        return np.asarray(np.exp(value))


@dataclass(frozen=True)
class Observation:
    """A measured run: the layout's number among those asked about (-1: none of them) and log(measured / predicted)."""

    index: int
    shares: np.ndarray
    place: np.ndarray
    ratio: float
    noise: float


@dataclass
class TimeSurrogate:
    """Returns the posterior of the step times of ``traits``, predicted to take ``seconds``."""

    seconds: np.ndarray
    traits: Traits
    widths: Widths
    seen: list[Observation] = field(default_factory=list)

    def observe(self, index: int, parts: np.ndarray, seconds: float, noise: float = 0.0, full: bool = True) -> None:
        """Layout ``index``, whose predicted ``parts`` add up to a prediction, took ``seconds``, give or take ``noise``; on all nodes or
        fewer."""
        ratio = float(np.log(seconds / parts.sum()))
        least = self.widths.noise if full else self.widths.transfer
        self.seen.append(Observation(index, parts / parts.sum(), self.traits.place[index], ratio, max(least, noise)))

    def posterior(self) -> Mixture:
        """The distribution of every layout's true log step time (a measurement adds its noise)."""
        own, log = own_variance(self.widths, self.traits), np.log(self.seconds)
        believed, weights = self._sizes()
        if not self.seen:
            spreads = np.sqrt(np.stack([own.at(*size) for size in believed]))
            return Mixture(weights, np.broadcast_to(log, spreads.shape), spreads)
        gram, cross, ratios = self._gram(), self._cross(np.arange(len(self.traits))), self._ratios()
        found = [self._node(size, gram, cross, own, ratios) for size in believed]
        return Mixture(weights, log + np.stack([mean for mean, _ in found]), np.stack([spread for _, spread in found]))

    def draws(self, rows: np.ndarray, count: int = DRAWS) -> np.ndarray:
        """(count, rows) joint draws of the true log step times of some layouts, always the same."""
        believed, normal, drawn_before = self.posterior(), normals(SEED, count * len(rows)).reshape(count, -1), 0
        some = self.traits.rows(rows)
        prior = between(self.widths, some, some, np.eye(len(rows)))
        known = (self._gram(), self._cross(rows)) if self.seen else None
        drawn = []
        with threadpool_limits(1, "blas"):  # threads that spin while they wait for a core that others use make it ten times slower
            for size, share, mean in zip(self._sizes()[0], _counts(believed.weights, count), believed.means[:, rows], strict=True):
                if not share:
                    continue
                covariance = prior.at(*size)
                if known:
                    gram, cross = self._both(size, *known)
                    covariance = covariance - cross @ np.linalg.solve(gram, cross.T)
                root = np.linalg.cholesky(covariance + 1e-9 * np.eye(len(rows)))
                drawn.append(mean + normal[drawn_before : drawn_before + share] @ root.T)
                drawn_before += share
        return np.concatenate(drawn)

    def apart(self, rows: np.ndarray, rival: int) -> Mixture:
        """The distribution of how far the log step times of some layouts are above that of layout ``rival``: what they share cancels."""
        believed, both = self.posterior(), np.append(rows, rival)
        some = self.traits.rows(both)
        shared, own = between(self.widths, some, some.rows([-1]), both[:, None] == rival), own_variance(self.widths, some)
        known = (self._gram(), self._cross(both)) if self.seen else None
        spreads = []
        for size in self._sizes()[0]:
            covariance, variance = shared.at(*size)[:, 0], own.at(*size)
            if known:
                gram, cross = self._both(size, *known)
                solved = np.linalg.solve(gram, cross.T)
                covariance = covariance - cross @ solved[:, -1]
                variance = variance - np.einsum("nm,mn->n", cross, solved)
            spreads.append(np.sqrt(np.maximum(variance + variance[-1] - 2 * covariance, 1e-12))[:-1])
        return Mixture(believed.weights, believed.means[:, rows] - believed.means[:, rival, None], np.stack(spreads))

    def _sizes(self) -> tuple[list[Size], np.ndarray]:
        """How large the errors are that layouts have of their own, and the common one, with weights: what measured runs leave of it. Before
        any, the common error has the width that was learnt. Runs may tell of a machine on which everything takes twice as long, and not of
        one whose layouts scatter: once there are some, that width is no better known than those of layouts, with a factor of its own."""
        nodes, weights = sizes()
        factors = np.exp(2 * self.widths.scale * nodes)
        if not self.seen:
            return [(float(factor), 1.0) for factor in factors], weights
        near, likely = near_sizes(self.widths.scale, len(self.seen))
        pairs = [(float(factor), float(common)) for factor in np.exp(2 * self.widths.scale * near) for common in factors]
        gram, ratios = self._gram(), self._ratios()
        noise = np.diag([one.noise**2 for one in self.seen])
        covariances = np.stack([gram.at(*pair) + noise for pair in pairs])
        fit = np.linalg.solve(covariances, np.broadcast_to(ratios[:, None], (len(pairs), len(ratios), 1)))[..., 0] @ ratios
        evidence = np.log(np.multiply.outer(likely, weights).ravel()) - 0.5 * (fit + np.linalg.slogdet(covariances)[1])
        shares = np.exp(evidence - np.logaddexp.reduce(evidence))
        kept = np.flatnonzero(shares > HARDLY * shares.max())
        return [pairs[i] for i in kept], shares[kept] / shares[kept].sum()

    def _node(self, size: Size, gram: Covariance, cross: Covariance, own: Covariance, ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Means (n,) and spreads (n,) for one size."""
        seen, with_seen = self._both(size, gram, cross)
        solved = np.linalg.solve(seen, np.column_stack([ratios[:, None], with_seen.T]))
        variance = own.at(*size) - np.einsum("nm,mn->n", with_seen, solved[:, 1:])
        return with_seen @ solved[:, 0], np.sqrt(np.maximum(variance, 1e-12))

    def _both(self, size: Size, gram: Covariance, cross: Covariance) -> tuple[np.ndarray, np.ndarray]:
        """Covariances between measured runs, and of all layouts with them, for one size."""
        noise = np.diag([one.noise**2 for one in self.seen])
        return gram.at(*size) + noise, cross.at(*size)

    def _gram(self) -> Covariance:
        some, index = self._known(), np.array([one.index for one in self.seen])
        same = (index[:, None] == index[None, :]) & (index >= 0)[:, None] | np.eye(len(index), dtype=bool)
        return between(self.widths, some, some, same)

    def _cross(self, rows: np.ndarray) -> Covariance:
        index = np.array([one.index for one in self.seen])
        return between(self.widths, self.traits.rows(rows), self._known(), rows[:, None] == index[None, :])

    def _known(self) -> Traits:
        unit = None if self.traits.unit is None else self.traits.unit[[one.index for one in self.seen]]
        return Traits(np.array([one.shares for one in self.seen]), np.array([one.place for one in self.seen]), unit)

    def _ratios(self) -> np.ndarray:
        return np.array([one.ratio for one in self.seen])


_NORMALS: dict[int, np.ndarray] = {}


def normals(seed: int, count: int) -> np.ndarray:
    """(count,) first draws of a standard normal variable from ``seed``. They are kept: a search asks for the same before every trial."""
    if len(_NORMALS.get(seed, ())) < count:
        _NORMALS[seed] = np.random.default_rng(seed).standard_normal(count)
    return _NORMALS[seed][:count]


def _counts(weights: np.ndarray, count: int) -> np.ndarray:
    """Whole numbers in proportion to ``weights`` that add up to ``count``."""
    ends = np.round(np.cumsum(weights) * count).astype(int)
    return np.diff(ends, prepend=0)


def fitting(fits: np.ndarray, widths: Widths, count: int = DRAWS) -> np.ndarray:
    """(count, n) draws of which layouts fit into memory, each with its probability ``fits``; where the memory of one is predicted too low,
    that of the others is likely to be, too."""
    normal = normals(SEED + 1, count * (len(fits) + 1))
    own = normal[count:].reshape(count, -1)
    shared = widths.memory**2 / (widths.memory**2 + widths.memory_layout**2)
    error = np.sqrt(shared) * normal[:count, None] + np.sqrt(1 - shared) * own
    return np.asarray(error < ndtri(np.clip(fits, 0.0, 1.0)))


def fastest(surrogate: TimeSurrogate, fits: np.ndarray) -> np.ndarray:
    """(n,) probability that each layout fits and is the fastest of those that do; 0 for those that have no part in the draws."""
    rows = contenders(surrogate, fits)
    times = np.where(fitting(fits[rows], surrogate.widths), surrogate.draws(rows), np.inf)
    any_fits = np.isfinite(times).any(axis=1)
    won = np.bincount(times.argmin(axis=1)[any_fits], minlength=len(rows)) / len(times)
    out = np.zeros(len(fits))
    out[rows] = won
    return out


def contenders(surrogate: TimeSurrogate, fits: np.ndarray) -> np.ndarray:
    """The layouts that are likeliest to be the fastest, ``CONTENDERS`` at most: those that are likeliest to fit and to be ahead of the
    fastest that is likely to fit. They are held against that one since an error of all alike makes no winner."""
    believed, likely = surrogate.posterior(), np.flatnonzero(fits >= min(0.5, fits.max()))
    rival = int(likely[believed.mean[likely].argmin()])
    hopeful = np.union1d(np.flatnonzero(fits > HOPELESS), rival)
    ahead = np.where(hopeful == rival, 1.0, fits[hopeful] * surrogate.apart(hopeful, rival).below(0.0))
    return np.sort(hopeful[np.argsort(-ahead, kind="stable")[:CONTENDERS]])


def most_telling(widths: Widths, traits: Traits, groups: Sequence[np.ndarray]) -> tuple[list[int], list[float]]:
    """Chooses the layouts to measure so that all step times become as certain as possible: one of each of ``groups`` (rows to choose from),
    and the mean standard deviation of a log step time before any and after each. Each is the one that lowers the sum of variances most,
    given those before it (A-optimal design, chosen greedily; Krause, Singh & Guestrin 2008, Journal of Machine Learning Research 9)."""
    open_ = between(widths, traits, traits, np.eye(len(traits))).at(1.0)
    chosen: list[int] = []
    left = [float(np.sqrt(np.diag(open_)).mean())]
    for group in groups:
        rows = np.setdiff1d(group, chosen)
        if not len(rows):
            continue
        pinned = np.diag(open_)[rows] + widths.noise**2
        best = int(rows[((open_[:, rows] ** 2).sum(axis=0) / pinned).argmax()])
        open_ = open_ - np.outer(open_[:, best], open_[best]) / (open_[best, best] + widths.noise**2)
        chosen.append(best)
        left.append(float(np.sqrt(np.maximum(np.diag(open_), 0.0)).mean()))
    return chosen, left
