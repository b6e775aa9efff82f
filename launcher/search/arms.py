"""Tells which arm of a training reaches a loss soonest, and whether its runs suffice to say so. Pure.

An arm is trained once per seed; runs of one seed begin with the same weights and read the same samples, so arms are compared seed by seed.

- **Steps to a loss** (``crossing``): the first of three consecutive validations at or below it, interpolated linearly from the one before.
  Curves are not smoothed: each validation reads the same text.
- **Ratio of two arms' times** (``lead``): the mean over seeds of log(steps / steps), or of log(seconds / seconds) where step times are
  measured. Predicted ones add log(step time / step time), which is known to a variance of its own. Its intervals are Student's, with
  Satterthwaite's degrees of freedom (Biometrics Bulletin 2, 1946).
- **A run that misses the loss** counts with all its steps: the least that it would have needed. So its arm can be told to be slower,
  and never to be faster.
- **Branches** (``launcher.search.branches``) end at some lengths each, with a loss that is compared with the target alone; between two
  lengths it is interpolated. An arm whose shortest branch has the loss counts with its steps, the most that it needs, and is never told to
  be slower.
- **Confidence.** The probability that a winner is named that is not the fastest is at most 1 - ``confidence``: Bonferroni's bound over both
  sides of each pair with one arm, and over the earlier looks at which arms are dropped, which have ``EARLY`` of it. Loss curves may cross
  late, so an arm is dropped only by runs that have ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev

import numpy as np

CONSECUTIVE = 3
"""Validations at or below a loss after which it counts as reached, by the first of them."""
LEAST_SEEDS = 3
"""Seeds before which no arm is dropped: two tell hardly how much they scatter."""
EARLY = 0.2
"""Share of the probability of a wrong winner that the looks before the last seed have."""
POWER = 0.84
"""Standard errors by which a difference must exceed its bound to be told with a probability of 80 %."""
MOST_SEEDS = 1000

Curve = Sequence[tuple[int, float]]
"""Steps and validation losses, in order of the steps."""


def crossing(curve: Curve, target: float, consecutive: int = CONSECUTIVE) -> float | None:
    """Returns the steps after which the loss was ``target``; None if it was not reached."""
    below = [loss <= target for _, loss in curve]
    first = next((i for i in range(len(curve) - consecutive + 1) if all(below[i : i + consecutive])), None)
    if first is None:
        return None
    step, loss = curve[first]
    before, above = curve[first - 1] if first else (step, loss)
    return step if not math.isfinite(above) or above <= loss else before + (above - target) / (above - loss) * (step - before)


@dataclass(frozen=True)
class Reach:
    """The steps after which one run had the loss; of a run that ``missed`` it, all steps that it made. ``step_s``: its measured step time,
    where that counts. ``most``: it may have needed fewer, for its shortest branch had the loss."""

    steps: float
    missed: bool = False
    step_s: float = 1.0
    most: bool = False


@dataclass(frozen=True)
class StepTimes:
    """Predicted log step times of the arms on one cluster: their means (k,), and the covariances (k, k) of their errors. Zeros where each
    run's own is measured."""

    mean: np.ndarray
    covariance: np.ndarray

    def apart(self, one: int, other: int) -> tuple[float, float]:
        """Returns mean and variance of log(step time of ``one`` / that of ``other``)."""
        own = self.covariance[[one, other], [one, other]].sum()
        return float(self.mean[one] - self.mean[other]), max(float(own - 2 * self.covariance[one, other]), 0.0)


@dataclass(frozen=True)
class LogMean:
    """A mean over ``seeds`` that scatter by ``scatter``, plus a value known to the variance ``fixed``, which seeds do not lower."""

    mean: float
    scatter: float
    seeds: int
    fixed: float = 0.0

    @property
    def error(self) -> float:
        """Standard error."""
        return math.sqrt(self.scatter**2 / self.seeds + self.fixed)

    def margin(self, level: float) -> float:
        """Returns how far the truth lies above the mean with the probability ``level`` at most, and below it likewise."""
        from scipy.special import stdtrit  # SciPy takes long to import, and no other verb needs it here

        of_seeds, error = self.scatter**2 / self.seeds, self.error
        freedom = (self.seeds - 1) * (error**2 / of_seeds) ** 2 if of_seeds else math.inf
        return error and error * float(stdtrit(min(freedom, 1e9), 1 - level))

    def bounds(self, level: float) -> tuple[float, float]:
        margin = self.margin(level)
        return self.mean - margin, self.mean + margin

    def seeds_to_tell(self, level: float) -> int | None:
        """Returns with how many seeds the mean would probably (80 %) be told from zero, if it is the truth; None: no number suffices."""
        for seeds in range(2, MOST_SEEDS + 1):
            then = LogMean(self.mean, self.scatter, seeds, self.fixed)
            if abs(self.mean) > then.margin(level) + POWER * then.error:
                return seeds
        return None


Runs = Sequence[Mapping[int, "Reach | None"]]
"""The finished runs of each arm by number of the seed; None: its run failed and says nothing."""


@dataclass(frozen=True)
class Evidence:
    """The ``runs`` of arms, and the decisions that they allow; each arm is to have ``seeds`` of them."""

    runs: Runs
    times: StepTimes
    seeds: int
    confidence: float = 0.95

    @property
    def level(self) -> float:
        """Probability with which the last look may find one side of one pair wrongly."""
        return (1 - self.confidence) * ((1 - EARLY) if self._looks else 1.0) / self._sides

    @property
    def early_level(self) -> float:
        """That of each earlier look."""
        return (1 - self.confidence) * EARLY / max(self._looks, 1) / self._sides

    @property
    def _sides(self) -> int:
        return 2 * max(len(self.runs) - 1, 1)

    @property
    def _looks(self) -> int:
        return max(self.seeds - LEAST_SEEDS, 0)

    def lead(self, one: int, other: int, upto: int | None = None) -> LogMean | None:
        """Returns log(time of ``one`` / time of ``other``) over the seeds that both have; None for fewer than two."""
        pairs = [(a, b) for seed, a in self.runs[one].items() if a and (b := self.runs[other].get(seed)) and (upto is None or seed < upto)]
        return _mean_of([math.log(a.steps * a.step_s / (b.steps * b.step_s)) for a, b in pairs], *self.times.apart(one, other))

    def time(self, arm: int) -> LogMean | None:
        """Returns the log seconds that an arm takes to the loss; the least of them if it was missed."""
        logs = [math.log(reach.steps * reach.step_s) for reach in self.reaches(arm)]
        return _mean_of(logs, float(self.times.mean[arm]), float(self.times.covariance[arm, arm]))

    def steps(self, arm: int) -> LogMean | None:
        """Returns the log of an arm's steps to the loss, likewise."""
        return _mean_of([math.log(reach.steps) for reach in self.reaches(arm)])

    def step_time(self, arm: int) -> float | None:
        """Returns the seconds of a step, geometric means of measured ones."""
        logs = [math.log(reach.step_s) for reach in self.reaches(arm)]
        return math.exp(fmean(logs) + float(self.times.mean[arm])) if logs else None

    def reaches(self, arm: int, upto: int | None = None) -> list[Reach]:
        """Returns the results of an arm's runs that say something, of the first ``upto`` seeds or all."""
        return [reach for seed, reach in self.runs[arm].items() if reach and (upto is None or seed < upto)]

    def misses(self, arm: int, upto: int | None = None) -> int:
        return sum(reach.missed for reach in self.reaches(arm, upto))

    def slower(self, one: int, other: int, level: float, upto: int | None = None) -> bool:
        """Returns whether arm ``one`` surely takes longer than ``other``."""
        lead = self.lead(one, other, upto)
        bounded = any(reach.most for reach in self.reaches(one, upto))
        return lead is not None and not bounded and not self.misses(other, upto) and lead.bounds(level)[0] > 0

    @cached_property
    def dropped(self) -> dict[int, int]:
        """Returns the arms that are out before the last seed, with the number of seeds after which they were told to be slower."""
        out: dict[int, int] = {}
        for seeds in range(LEAST_SEEDS, self.seeds):
            there = [arm for arm in range(len(self.runs)) if arm not in out]
            if any(seed not in self.runs[arm] for arm in there for seed in range(seeds)):
                break
            out |= {a: seeds for a in there if any(self.slower(a, b, self.early_level, seeds) for b in there if b != a)}
        return out

    @property
    def open(self) -> list[int]:
        """Returns the arms that are not dropped."""
        return [arm for arm in range(len(self.runs)) if arm not in self.dropped]

    @property
    def complete(self) -> bool:
        """Returns whether no further run is needed."""
        return len(self.open) == 1 or all(len(self.runs[arm]) >= self.seeds for arm in self.open)

    @cached_property
    def order(self) -> list[int]:
        """Returns the arms that have results: those with fewest misses first, then those that took least."""
        known = {arm: time.mean for arm in range(len(self.runs)) if (time := self.time(arm))}
        return sorted(known, key=lambda arm: (arm in self.dropped, self.misses(arm) / len(self.runs[arm]), known[arm]))

    @property
    def leader(self) -> int | None:
        """Returns the arm that took least; None if no run reached the loss."""
        first = next(iter(self.order), None)
        return first if first is not None and self.misses(first) < len(self.reaches(first)) else None

    @cached_property
    def rivals(self) -> list[int]:
        """Returns the arms that cannot be told from the leader."""
        first = self.leader
        return [] if first is None else [a for a in self.open if a != first and not self.slower(a, first, self.level)]

    @property
    def winner(self) -> int | None:
        """Returns the arm that is surely the fastest, once all runs are there."""
        return self.leader if self.complete and not self.rivals else None

    @property
    def seeds_wanted(self) -> int | None:
        """Returns with how many seeds all rivals would probably be told from the leader; None: with no number of them."""
        first = self.leader
        leads = [self.lead(arm, first) for arm in self.rivals if first is not None]
        wanted = [lead and lead.seeds_to_tell(self.level) for lead in leads]
        return None if None in wanted else max([seeds for seeds in wanted if seeds], default=None)


def _mean_of(logs: Sequence[float], more: float = 0.0, fixed: float = 0.0) -> LogMean | None:
    return LogMean(fmean(logs) + more, stdev(logs), len(logs), fixed) if len(logs) > 1 else None
