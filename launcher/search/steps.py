"""Judges the steps of a trial: how well its step time is known, and whether it can still win. Pure.

Steps are those after the warm-up. The warm-up's, except the first (``warm``), must agree with them: the first does one-time work, the
others are like later ones in most logs (``benchmarks/step_times.csv``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median, quantiles, stdev

from launcher.config.search import SearchConfig
from launcher.config.uncertainty import shipped_widths
from trainer.shared.records.outcome import Reason

FEW_STEPS = 3
"""Steps whose median is robust against an outlier; fewer do not tell their scatter."""
OWN_STEPS = 4
"""Steps whose quartiles say how much they scatter."""
SURELY, LEAST_ABOVE = 3.0, 1.01
"""Standard errors, and how much at least, by which a step has to be slower for its trial to be given up."""
USUAL_SCATTER = 0.009
"""Relative standard error of a single step where no trial told: half of published runs are off by less (``benchmarks.step_scatter``)."""


def enough_of(settings: SearchConfig) -> float:
    """Returns the relative standard error at which a step time is known: ``search.enough``, or half of the tolerance."""
    return settings.tolerance / 2 if settings.enough is None else settings.enough


def expected_steps(settings: SearchConfig, steps: int, warmup_steps: int) -> int:
    """Steps of a trial as its price counts them: all, or as few as its time is known after where they scatter as usual."""
    enough = enough_of(settings)
    return min(steps, warmup_steps + math.ceil((USUAL_SCATTER / enough) ** 2)) if enough else steps


def ending(
    steps: Sequence[float], warm: Sequence[float], prune_above_s: float | None, scatter: float | None, enough: float
) -> Reason | None:
    """Returns why a trial may end after ``steps``; None: it goes on. ``scatter``: relative standard error of one step."""
    if cannot_win(steps, prune_above_s, scatter, warm):
        return Reason.CANNOT_WIN
    return Reason.MEASURED if enough and known_to(steps, scatter, warm) <= enough else None


def noise_of(steps: Sequence[float], scatter: float | None = None) -> float:
    """Returns the relative standard error of the median of ``steps``: 1.25 standard deviations over root n, from the quartiles.

    Fewer than ``OWN_STEPS`` do not tell their scatter: their range is added to the error by earlier trials (``scatter_of``), else to that
    of published repeats. Where the halves differ by more than that, the machine's speed drifts, and half of their difference is an error
    that more steps of the same moment would not lower.
    """
    if not steps:
        return 0.0  # of nothing
    if len(steps) < OWN_STEPS:
        known = shipped_widths().noise * math.sqrt(OWN_STEPS) if scatter is None else scatter
        return math.hypot(known, _off(steps)) / math.sqrt(len(steps))
    halves = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    if len(steps) < 8:
        return _error_of_median(steps, len(steps))
    drift = abs(math.log(median(halves[0]) / median(halves[1]))) / 2
    within = sum(_error_of_median(half, len(steps)) for half in halves) / 2
    return max(drift, _error_of_median(steps, len(steps))) if drift > 2 * within else _error_of_median(steps, len(steps))


def scatter_of(trials: Iterable[Sequence[float]]) -> float | None:
    """Relative standard error of a single step, by that trial whose steps scattered most; None where none had enough of them to say."""
    return max((noise_of(steps) * math.sqrt(len(steps)) for steps in trials if len(steps) >= OWN_STEPS), default=None)


def known_to(steps: Sequence[float], scatter: float | None, warm: Sequence[float] = ()) -> float:
    """Relative standard error of the median of ``steps``; infinite where they are too few to say.

    Fewer than ``OWN_STEPS`` say nothing unless earlier trials told how much steps scatter (``scatter_of``), and are not trusted to scatter
    less than those did. One or two are asked together with the last ones of the warm-up, so that no step stands for a trial alone: where
    these differ by more, so do they.
    """
    if not steps or (scatter is None and len(steps) < OWN_STEPS):
        return math.inf
    recent = [*warm, *steps][-FEW_STEPS:] if len(steps) < FEW_STEPS else steps
    if len(recent) < 2:
        return math.inf
    root = math.sqrt(len(steps))
    own = noise_of(steps) if len(steps) >= OWN_STEPS else _off(recent) / root
    return max(own, (scatter or 0.0) / root)


def cannot_win(steps: Sequence[float], prune_above_s: float | None, scatter: float | None = None, warm: Sequence[float] = ()) -> bool:
    """Returns whether the measured ``steps`` prove that a trial cannot win: even the fastest is above ``prune_above_s`` and the median 1 %
    more.

    Fewer than ``FEW_STEPS`` count if earlier trials told the scatter and all of them, with the warm-up but its first (``warm``), are
    ``SURELY`` times that above. A hiccup would have to last for several steps.
    """
    if prune_above_s is None or not steps:
        return False
    if len(steps) >= FEW_STEPS:
        return min(steps) > prune_above_s and median(steps) > LEAST_ABOVE * prune_above_s
    return scatter is not None and min([*steps, *warm]) > prune_above_s * max(LEAST_ABOVE, math.exp(SURELY * scatter))


def _off(steps: Sequence[float]) -> float:
    """Relative standard error of one of a few steps, as far as they differ; 0 of a single one."""
    return 1.25 * stdev(map(math.log, steps)) if len(steps) > 1 else 0.0


def _error_of_median(steps: Sequence[float], count: int) -> float:
    """Relative standard error of the median of ``count`` steps that scatter as ``steps`` do."""
    low, middle, high = quantiles(steps, n=4)
    return 1.25 * (high - low) / 1.35 / math.sqrt(count) / middle
