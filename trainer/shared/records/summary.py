"""Summarises step times: their median and spread, throughput, and shares of the peak."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.flops import model_flops
from trainer.shared.run.phases import phases_of
from trainer.shared.run.read import to_dict
from trainer.shared.run.resolved import ResolvedTrainConfig

RATES = ("tokens_per_s", "tflops_per_gpu", "mfu", "hfu")


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Returns median and interquartile range; the range of fewer than two values is 0."""
    if len(values) < 2:
        return (values[0] if values else 0.0), 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, high - low


def rates(config: ResolvedTrainConfig, step_time: float, ranks: int, recomputed_flops: float | None) -> dict[str, float | None]:
    """Returns tokens per second, TFLOP/s per rank, and shares of the peak: MFU counts the model's FLOPs, HFU also those of recomputation.

    Unknown values are None: shares without ``run.peak_tflops``, HFU without ``recomputed_flops``.
    """
    if not step_time:
        return {"tokens_per_s": 0.0, "tflops_per_gpu": 0.0, "mfu": None, "hfu": None}
    flops = model_flops(config.model, config.run.global_batch)
    per_rank, peak = 1e12 * step_time * ranks, config.run.peak_tflops
    return {
        "tokens_per_s": tokens_per_step(config) / step_time,
        "tflops_per_gpu": flops / per_rank,
        "mfu": flops / per_rank / peak if peak else None,
        "hfu": (flops + recomputed_flops) / per_rank / peak if peak and recomputed_flops is not None else None,
    }


@dataclass(frozen=True)
class TimedPhase:
    """The step times of a phase of a run; those of a run without phases are one."""

    config: ResolvedTrainConfig  # as if all of the run was of it
    steps: range  # their numbers in the run, from 1, as far as they are measured
    share: float  # in the steps of all phases that are measured
    median: float
    spread: float

    def rates(self, ranks: int, recomputed_flops: Callable[[ResolvedTrainConfig], float] | None) -> dict[str, float | None]:
        return rates(self.config, self.median, ranks, None if recomputed_flops is None else recomputed_flops(self.config))

    def told(self) -> dict[str, Any]:
        """Returns what a result says of it, but for its rates."""
        return {
            "measured_steps": [self.steps.start, self.steps.stop - 1],
            "share_of_steps": self.share,
            "global_batch": self.config.run.global_batch,
            "seq": self.config.model.seq,
            "step_time_s": self.median,
            "step_time_spread_s": self.spread,
        }


def timed_phases(config: ResolvedTrainConfig, measured: Mapping[int, float]) -> list[TimedPhase]:
    """Returns the phases of a run of which there are ``measured`` step times, by number of the step, from 1. The first ``run.warmup_steps``
    of each are left out, where there are more."""
    if not config.run.phases:
        times = [seconds for step, seconds in measured.items() if step > config.run.warmup_steps] or list(measured.values())
        return [TimedPhase(config, range(config.run.warmup_steps + 1, config.run.steps + 1), 1.0, *spread(times))]
    found = []
    for phase, steps in phases_of(config).reached(config.run.steps):
        skipped = min(config.run.warmup_steps, steps - 1)
        numbers = range(phase.first + skipped + 1, phase.first + steps + 1)
        if times := [measured[step] for step in numbers if step in measured]:
            found.append((phase.of(config), numbers, steps, *spread(times)))
    whole = sum(steps for _, _, steps, *_ in found)
    return [TimedPhase(own, numbers, steps / whole, *times) for own, numbers, steps, *times in found]


def result_of(
    config: ResolvedTrainConfig,
    status: Status,
    attempt: int,
    series: Mapping[str, Sequence[float | None]],
    measured: Mapping[int, float],
    ranks: int,
    recomputed_flops: Callable[[ResolvedTrainConfig], float] | None = None,
) -> dict[str, Any]:
    """Returns the content of every ``result.json``, for any trainer. ``series``: losses, grad_norms and step_times_s by step; ``measured``:
    step times by number of the step, from 1, of which the warm-up is left out; ``recomputed_flops`` of a step, if they are known.

    The step time of a run with phases is its total time over its steps."""
    phases = timed_phases(config, measured)
    step_time, step_spread = (sum(each.share * getattr(each, name) for each in phases) for name in ("median", "spread"))
    each_rates = [each.rates(ranks, recomputed_flops) for each in phases]
    stopped = status is Status.STOPPED
    return {
        "status": status.value,
        "reason": Reason.PREEMPTED.value if stopped else None,
        "message": "stopped on request" if stopped else "",
        "attempt": attempt,
        **series,
        "step_time_s": step_time,
        "step_time_spread_s": step_spread,
        **_mean([each.share * each.median / (step_time or 1.0) for each in phases], each_rates),
        **({"phases": [each.told() | own for each, own in zip(phases, each_rates)]} if config.run.phases else {}),
        "world_size": ranks,
        "layout": to_dict(config.layout),
        "model": to_dict(config.model),
    }


def _mean(weights: Sequence[float], every: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Returns the mean of rates, each with its share of the time; None where one is."""
    means: dict[str, float | None] = {}
    for name in RATES:
        values = [each[name] for each in every]
        means[name] = None if None in values else sum(weight * value for weight, value in zip(weights, values) if value is not None)
    return means


def ends_short(numbers: Sequence[int], steps: int) -> bool:
    """Returns whether a log with the steps ``numbers``, in order, ends before the last of ``steps``. It may report every tenth only, and
    count from 0 or from 1."""
    apart = numbers[-1] - numbers[-2] if len(numbers) > 1 else 1
    return not numbers or numbers[-1] + apart < steps


def tokens_per_step(config: ResolvedTrainConfig) -> int:
    return config.run.global_batch * config.model.seq
