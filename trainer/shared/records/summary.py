"""Summarises step times: their median and spread, throughput, and shares of the peak."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.flops import model_flops
from trainer.shared.run.read import to_dict
from trainer.shared.run.schema import ResolvedTrainConfig


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


def result_of(
    config: ResolvedTrainConfig,
    status: Status,
    attempt: int,
    series: Mapping[str, Sequence[float | None]],
    measured: Sequence[float],
    ranks: int,
    recomputed_flops: float | None,
) -> dict[str, Any]:
    """Returns the content of every ``result.json``, for any trainer. ``series``: losses, grad_norms and step_times_s by step; ``measured``:
    the step times after the warm-up."""
    step_time, step_spread = spread(measured)
    stopped = status is Status.STOPPED
    return {
        "status": status.value,
        "reason": Reason.PREEMPTED.value if stopped else None,
        "message": "stopped on request" if stopped else "",
        "attempt": attempt,
        **series,
        "step_time_s": step_time,
        "step_time_spread_s": step_spread,
        **rates(config, step_time, ranks, recomputed_flops),
        "world_size": ranks,
        "layout": to_dict(config.layout),
        "model": to_dict(config.model),
    }


def ends_short(numbers: Sequence[int], steps: int) -> bool:
    """Returns whether a log with the steps ``numbers``, in order, ends before the last of ``steps``. It may report every tenth only, and
    count from 0 or from 1."""
    apart = numbers[-1] - numbers[-2] if len(numbers) > 1 else 1
    return not numbers or numbers[-1] + apart < steps


def tokens_per_step(config: ResolvedTrainConfig) -> int:
    return config.run.global_batch * config.model.seq
