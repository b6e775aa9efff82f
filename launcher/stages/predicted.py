"""Predicts stages: trainings by the cost model, readers of a model's weights by that of inference with this project's generator,
single-process ones by measured rates; None where the hardware has no rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.config import Config
from launcher.config.hardware import typed
from trainer.shared.families.block import weights
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.flops import matrices_of
from trainer.shared.run.schema import ModelConfig

BYTES_PER_TOKEN = 1
"""Least bytes per token of a prompt, which bound its tokens."""
START_S, LEARNT_PER_S, ENCODED_PER_S, CONVERTED_PER_S = 1.5, 4.4e6, 2.6e6, 65e6
"""One core's seconds to import torch; bytes per second to learn a tokenizer and to encode; weights per second to convert."""
RESTS_ON = (
    f"prepare and convert by rates of one core of an AMD EPYC: {START_S} s to start, {LEARNT_PER_S / 1e6:g} MB/s of "
    f"text for the tokenizer (of at most "
    f"64 MiB) and {ENCODED_PER_S / 1e6:g} to encode it, {CONVERTED_PER_S / 1e6:g} million weights/s; a slow disk or network takes longer"
)


@dataclass(frozen=True)
class Expected:
    """Seconds, bytes of the fullest rank, its capacity, and the probability that they fit."""

    seconds: float
    memory_bytes: float
    capacity: float
    fits: float


def of_preparation(size: int) -> float:
    """Seconds of ``size`` bytes of text: a tokenizer is learnt of at most 64 MiB of them, and all are encoded."""
    return START_S + min(size, 64 * 2**20) / LEARNT_PER_S + size / ENCODED_PER_S


def of_conversion(model: ModelConfig) -> float:
    """Seconds to read, write and hash a model's weights."""
    m = resolve_model(model)
    blocks = sum(weights(matrices_of(m, block)) for block in range(m.layers))
    numbers = blocks + m.vocab * m.hidden * (1 if m.tied else 2)
    return START_S + float(numbers) / CONVERTED_PER_S


def of_training(config: Config) -> Expected | None:
    """Predicts all steps of a training."""
    if not config.cluster.hardware.peak_tflops.get(config.run.precision) or config.cluster.network_unknown:
        return None
    from launcher.cost import predict  # numpy: only where something can be said

    found = predict(config.model, config.layout, config.run, config.cluster, config.trainer, config.tune, config.optimizer)
    return Expected(float(found.step_time_s) * config.run.steps, found.memory_bytes, found.capacity, found.fits)


def of_evaluation(config: Config) -> Expected | None:
    """``run.steps`` batches, each one pass over its sequences; there may be fewer."""
    layout, run = config.layout, config.run
    passes = run.steps * run.global_batch / ((layout.data or 1) * layout.micro_batch)
    return _expected(config, layout.micro_batch, config.model.seq, 1, passes)


def of_generation(config: Config, prompts: Sequence[str], tokens: int) -> Expected | None:
    """Until the longest prompt has its tokens."""
    longest = max(len(text.encode()) for text in prompts) // BYTES_PER_TOKEN
    return _expected(config, -(-len(prompts) // (config.layout.data or 1)), longest, tokens)


def fitting(config: Config, known: Expected | None, raised: str = "layout.tensor or layout.pipeline") -> float | None:
    """Returns the seconds of ``known`` stages. Raises ``ConfigError`` if one cannot fit into memory."""
    if known is None:
        return None
    from launcher.cost.thresholds import CANNOT_FIT

    if known.fits < CANNOT_FIT and not config.sweep.ignore_memory:
        raise ConfigError(
            f"the layout needs about {known.memory_bytes / 1e9:.1f} GB on its fullest rank, and {typed(config.cluster.hardware.name)} has "
            f"{known.capacity / 1e9:.1f}; raise {raised}, or set sweep.ignore_memory=true"
        )
    return known.seconds


def _expected(config: Config, batch: int, prompt: int, output: int, times: float = 1.0) -> Expected | None:
    if not config.cluster.hardware.peak_tflops.get(config.run.precision):
        return None
    import numpy as np

    from launcher.config.trainers import engine
    from launcher.cost.inference.case import SERVING_DTYPE, InferenceCase
    from launcher.cost.inference.requests import static
    from launcher.cost.inputs.device import Device
    from launcher.cost.inputs.shape import Shape
    from launcher.cost.parts import total

    device, precision = Device.of(config.cluster.hardware, config.cluster.gpus_per_node), config.run.precision
    table = np.array([(config.layout.tensor, config.layout.pipeline, config.layout.data or 1, batch)], SERVING_DTYPE)
    case = InferenceCase(
        Shape.of(config.model), table, float(prompt), float(output), device, engine("trireme"), weights=precision, kv=precision
    )
    found = static(case)
    return Expected(times * float(found.latency[0]), float(np.max(total(found.memory))), device.memory, float(found.fits[0]))
