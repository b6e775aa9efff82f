"""Chooses the next trial to measure, and when to stop: a pure state machine. A cluster and a table of measurements drive the same one.

Order: largest P(fits into memory) x E[gain over the best] / E[GPU-hours], so a layout at the edge of memory is tried in the order of its
gain rather than excluded, and a trial that would end early is cheap. Stop: when the joint probability that any untried candidate fits and
beats the best by more than ``tolerance`` is below ``doubt``. Trials on fewer nodes are followed by trials of the best at full size. Where
noise leaves open which is faster, the best are measured once more: the luckiest of several noisy measurements is not the fastest layout.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol, TypeVar

import numpy as np

from launcher.config.schema import Config
from launcher.config.search import SearchConfig
from launcher.config.uncertainty import Widths, shipped_widths
from launcher.cost.normal import ndtr, normal_pdf
from launcher.cost.recomputing import of_use
from launcher.cost.thresholds import NEVER_TRIED
from launcher.cost.uncertainty import CONTENDERS, Mixture, TimeSurrogate, fastest, fitting
from launcher.labels import percent
from launcher.search.surrogate import Candidates, MemorySurrogate
from trainer.shared.records.outcome import Reason


@dataclass(frozen=True)
class SearchTrial:
    """A proposed trial: candidate ``index``, at the cluster's size or on as few nodes as keep its structure."""

    index: int
    full: bool
    prune_above_s: float | None  # a step time above this cannot win
    repeats: int = 0  # how often the same has been measured before


@dataclass(frozen=True)
class TrialObservation:
    """A trial's result. ``seconds`` is the median step time; infinite: it did not run, for ``reason``."""

    seconds: float = math.inf
    reason: Reason = Reason.ERROR
    noise: float = 0.0  # relative standard error of ``seconds``, as far as it is known
    peak_bytes: float = 0.0  # 0: not known
    gpu_hours: float = 0.0
    hours: float = 0.0
    start_s: float = math.nan  # seconds that it took besides its steps; nan: not known
    served: Mapping[str, float] = field(default_factory=dict)  # of an inference: medians of what its ``result.json`` says, by name
    losses: Sequence[tuple[int, float]] = ()  # steps and validation losses, also of a run that failed
    phases: Sequence[tuple[int, float]] = ()  # of a training with phases: a step of each, from 1, and its seconds

    @property
    def ran(self) -> bool:
        return math.isfinite(self.seconds)


@dataclass(frozen=True)
class Stop:
    """The end of a search and why."""

    reason: str
    doubt: float | None = None  # probability that an untried layout fits and is faster than the best by more than the tolerance
    likeliest: int | None = None  # the one that is most likely to


@dataclass(frozen=True)
class ScaledDownPlan:
    """The candidates scaled down to few nodes, with predicted times and memory of their trials."""

    parts: np.ndarray
    memory: np.ndarray


@dataclass(frozen=True)
class TrialCost:
    """The price of each candidate's trial, in any one unit: run to the end, and out of memory in its first step."""

    whole: np.ndarray
    failed: np.ndarray

    def expected(self, fits: np.ndarray) -> np.ndarray:
        return fits * self.whole + (1 - fits) * self.failed


class AskTell(Protocol):
    """Picks the trials of a search."""

    def ask(self, count: int = 1) -> list[SearchTrial] | Stop:
        """Returns up to ``count`` trials to run now, or the reason to stop; a function of the results so far."""

    def tell(self, trial: SearchTrial, measured: TrialObservation) -> None:
        """Records a trial's result."""


P = TypeVar("P", bound=AskTell, covariant=True)


class Searchable(Protocol[P]):
    """The candidates of a search, with the configuration and prediction of each trial."""

    @property
    def config(self) -> Config: ...

    def policy(self) -> P: ...

    def trial_config(self, trial: SearchTrial) -> Config: ...

    def predicted(self, trial: SearchTrial) -> tuple[np.ndarray, float] | None:
        """Seconds of a step by part, and bytes; None if they are not asked for."""

    def interval(self, trial: SearchTrial) -> tuple[float, float] | None:
        """Seconds between which 80 % of such steps lie."""

    def words(self, trial: SearchTrial) -> list[str]:
        """The overrides that make the trial out of ``config``, for the record."""


class Policy:
    """The search. ``ask`` is a function of the measurements observed so far and of nothing else."""

    def __init__(
        self,
        candidates: Candidates,
        settings: SearchConfig,
        small: ScaledDownPlan | None = None,
        price: TrialCost | None = None,
        widths: Widths | None = None,
    ):
        self.candidates, self.settings = candidates, settings
        self.price = price or TrialCost(np.ones(len(candidates)), np.full(len(candidates), 0.1))
        self.small = small or ScaledDownPlan(candidates.parts, candidates.memory)
        self.time = TimeSurrogate(candidates.seconds, candidates.traits, widths or shipped_widths())
        self.memory = MemorySurrogate(candidates, self.time.widths)
        self.tried: dict[int, float] = {}  # candidate -> estimated full-size step time; inf: did not run
        self.verified: dict[int, float] = {}
        self.noise: dict[int, float] = {}  # relative standard error of the last measurement
        self.repeated: set[int] = set()
        self.given_up: set[int] = set()
        self.strangers: set[int] = set()  # tried candidates that do not train the same model: they ran, and cannot win
        self.starts: list[float] = []  # measured seconds of trials besides their steps
        self.trials, self.gpu_hours, self.hours = 0, 0.0, 0.0

    def ask(self, count: int = 1) -> list[SearchTrial] | Stop:
        """Up to ``count`` trials to run now, the most promising first, or the reason to stop."""
        fits, believed, count = self._fits(), self.time.posterior(), at_most(self.settings, self.trials, count)
        if limit := limit_reached(self.settings, self.trials, self.gpu_hours, self.hours):
            return self._open_end(limit, believed, fits)
        if self.best_seconds() is None:  # nothing to compare with: run something
            worth = np.where(self.untried & (fits >= NEVER_TRIED), fits * np.exp(believed.mean.min() - believed.mean), 0.0)
            words = "no layout that may fit is left" if self.tried else "no layout is likely to fit into memory"
            return self._best_of(worth, count) or Stop(words)
        stop = self._open_end("", believed, fits)
        if stop.doubt is not None and stop.doubt >= self.settings.doubt:
            gain = expected_gain(believed, float(self.best_seconds() or math.inf)) * fits / self.price.expected(fits)
            if trials := self._best_of(np.where(self.untried, gain, 0.0), count):
                return trials
        last = self._verification() or self._repetition()
        if last:
            return [last]
        tolerance = percent(self.settings.tolerance, digits=0)
        why = f"no untried layout is likely to be faster by {tolerance} (probability {percent(stop.doubt)})"
        return dataclasses.replace(stop, reason=why)

    @property
    def untried(self) -> np.ndarray:
        """(n,) which candidates have not been tried."""
        mask = np.ones(len(self.candidates), dtype=bool)
        mask[list(self.tried)] = False
        return mask

    def chances(self, believed: Mixture, fits: np.ndarray) -> np.ndarray:
        """(n,) probability that each untried candidate fits and beats the best by more than the tolerance, one by one."""
        best = self.best_seconds()
        assert best is not None, "there is a best only after a trial that ran"
        return np.asarray(np.where(self.untried, fits * believed.below(math.log(best) + self._margin), 0.0))

    def doubt(self, chances: np.ndarray, fits: np.ndarray) -> float:
        """Returns the probability that any does, by joint draws of the likeliest and the best, plus an upper bound for the others."""
        order = np.argsort(-chances, kind="stable")
        rivals, rest = order[:CONTENDERS], float(chances[order[CONTENDERS:]].sum())
        rivals = rivals[chances[rivals] > 1e-6]
        if not len(rivals):
            return min(rest, 1.0)
        times = self.time.draws(np.append(rivals, self.ranking()[0]))
        faster = (times[:, :-1] < times[:, -1:] + self._margin) & fitting(fits[rivals], self.time.widths, len(times))
        return min(float(faster.any(axis=1).mean()) + rest, 1.0)

    @property
    def _margin(self) -> float:
        """The tolerance in logarithms: how much less the others must take."""
        return math.log1p(-min(self.settings.tolerance, 0.999))

    def _open_end(self, reason: str, believed: Mixture, fits: np.ndarray) -> Stop:
        """Returns the end for ``reason``, with the open doubt."""
        if self.best_seconds() is None:
            return Stop(reason)
        chances = self.chances(believed, fits)
        return Stop(reason, self.doubt(chances, fits), int(chances.argmax()) if chances.any() else None)

    def _best_of(self, worth: np.ndarray, count: int) -> list[SearchTrial]:
        order = np.argsort(-worth, kind="stable")[:count]
        return [self._trial(int(i)) for i in order if worth[i] > 0]

    def tell(self, trial: SearchTrial, measured: TrialObservation) -> None:
        """Learns from a finished trial. Infrastructure failures do not update the model but count against the budget."""
        index = trial.index
        parts, memory = (self.candidates.parts, self.candidates.memory) if trial.full else (self.small.parts, self.small.memory)
        self.trials, self.gpu_hours, self.hours = self.trials + 1, self.gpu_hours + measured.gpu_hours, self.hours + measured.hours
        if math.isfinite(measured.start_s):
            self.starts.append(measured.start_s)
        if measured.ran:
            self.time.observe(index, parts[index], measured.seconds, measured.noise, self._is_full(trial))
        if measured.ran or measured.reason is Reason.OUT_OF_MEMORY:
            self.memory.observe(float(memory[index]), measured.ran, measured.peak_bytes)
        seconds = measured.seconds * float(self.candidates.parts[index].sum() / parts[index].sum())
        if trial.repeats:
            self.repeated.add(index)
            seconds = math.sqrt(self._measured(index) * seconds) if measured.ran else self._measured(index)
        self.tried[index], self.noise[index] = seconds, measured.noise
        (self.given_up.add if measured.reason is Reason.CANNOT_WIN else self.given_up.discard)(index)
        if self._is_full(trial):
            self.verified[index] = seconds

    def ranking(self) -> list[int]:
        """Candidates that ran, fastest first; those measured at full size before those that were not."""
        ran = [i for i in self.tried if math.isfinite(self.seconds_of(i))]
        return sorted(ran, key=lambda i: (bool(self.verified) and i not in self.verified, self.seconds_of(i)))

    def best_seconds(self) -> float | None:
        """Full-size step time of the best so far."""
        return min((s for s in map(self.seconds_of, self.tried) if math.isfinite(s)), default=None)

    def seconds_of(self, index: int) -> float:
        """Returns the full-size step time of a tried candidate, scaled up if on fewer nodes; infinite if it failed or ran another model."""
        return math.inf if index in self.strangers else self._measured(index)

    def _measured(self, index: int) -> float:
        return self.verified.get(index, self.tried[index])

    def believed(self, index: int) -> float:
        return float(np.exp(self.time.posterior().mean[index]))

    def fastest(self) -> np.ndarray:
        """(n,) probability that each candidate is the fastest of those that fit."""
        fits = self._fits()
        fits[list(self.strangers)] = 0.0
        return fastest(self.time, fits)

    def grid_gpu_hours(self, steps: int, world_size: int) -> float:
        """Returns the price of running every candidate for ``steps`` steps at full size, by the corrected model and measured starts."""
        start = median(self.starts) if self.starts else self.settings.start_s
        seconds = np.exp(self.time.posterior().mean) * self.memory.fits() * steps + start
        return float(seconds.sum() * world_size / 3600)

    def _fits(self) -> np.ndarray:
        """(n,) probability that each candidate fits and is of use."""
        fits, plain = self.memory.fits(), self.candidates.plain
        failed = [i for i, seconds in self.tried.items() if math.isinf(seconds)]
        return fits if plain is None else of_use(fits, plain, failed)

    def _is_full(self, trial: SearchTrial) -> bool:
        return trial.full or self.small.parts is self.candidates.parts

    def _trial(self, index: int, full: bool = False) -> SearchTrial:
        best = self.best_seconds()
        parts = self.candidates.parts if full else self.small.parts
        ratio = float(parts[index].sum() / self.candidates.parts[index].sum())
        return SearchTrial(index, full, None if best is None else best * ratio * (1 + self.settings.tolerance))

    def _verification(self) -> SearchTrial | None:
        """The next of the best that has been measured on fewer nodes only."""
        if self.small.parts is self.candidates.parts:
            return None
        leaders = sorted((i for i in self.tried if math.isfinite(self.seconds_of(i))), key=self.seconds_of)
        for index in leaders[: self.settings.verify]:
            if index not in self.verified:
                return self._trial(index, full=True)
        return None

    def _repetition(self) -> SearchTrial | None:
        """The next of the best that has been measured once, if noise leaves open which of them is faster."""
        best, *others = self.ranking()[: self.settings.verify]
        rivals = [i for i in others if self._open(best, i)]
        return next((SearchTrial(i, True, None, 1) for i in (best, *rivals) if rivals and i not in self.repeated), None)

    def _open(self, best: int, other: int) -> bool:
        """Returns whether the slower one may be faster by more than the tolerance; not if it was ended early, since its steps were too
        slow."""
        if min(self.noise[best], self.noise[other]) <= 0 or self.given_up & {best, other}:
            return False
        ahead = math.log(self.seconds_of(best) * (1 - self.settings.tolerance) / self.seconds_of(other))
        return float(ndtr(np.asarray(ahead / math.hypot(self.noise[best], self.noise[other])))) >= self.settings.doubt


def at_most(settings: SearchConfig, trials: int, count: int) -> int:
    return count if settings.max_trials is None else min(count, settings.max_trials - trials)


def limit_reached(settings: SearchConfig, trials: int, gpu_hours: float, hours: float) -> str | None:
    """Returns why the budget ends the search; None: it may go on."""
    for name, spent in (("max_trials", trials), ("max_gpu_hours", gpu_hours), ("max_hours", hours)):
        limit = getattr(settings, name)
        if limit is not None and spent >= limit:
            return f"search.{name}={limit:g} is reached"
    return None


def expected_gain(believed: Mixture, best: float) -> np.ndarray:
    """(n,) E[max(0, log best - log t)]: expected improvement (Jones et al. 1998, equation 15), for each Gaussian of the mixture."""
    z = (np.log(best) - believed.means) / believed.spreads
    return np.asarray(believed.weights @ (believed.spreads * (z * ndtr(z) + normal_pdf(z))))
