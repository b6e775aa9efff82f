"""What step times amount to: their median and spread, throughput, and shares of the peak."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from trainer.spec.flops import model_flops
from trainer.spec.schema import ResolvedTrainConfig


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Median and interquartile range; the range of fewer than two values is 0."""
    if len(values) < 2:
        return (values[0] if values else 0.0), 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, high - low


def rates(config: ResolvedTrainConfig, step_time: float, ranks: int, recomputed_flops: float | None) -> dict[str, float | None]:
    """Tokens per second, TFLOP/s per rank, and shares of the peak: MFU counts the model's FLOPs, HFU also those of recomputation.

    None for what is not known: shares without ``run.peak_tflops``, HFU without ``recomputed_flops``.
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


def tokens_per_step(config: ResolvedTrainConfig) -> int:
    return config.run.global_batch * config.model.seq
