"""What the stages that are no trainings are expected to take, by the cost model of inference with this project's own generator; None where
the hardware has no rate. Reading text and converting weights wait for disks of which nothing is known: they are not predicted."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.config import Config
from trainer.spec import ModelConfig

BYTES_PER_TOKEN = 1
"""Of a prompt: a token is at least a byte, so this is the most tokens that it can have."""


def of_evaluation(config: Config) -> float | None:
    """Seconds of ``run.steps`` batches, each one pass over its sequences; there may be fewer."""
    layout, run = config.layout, config.run
    batch = max(1, run.global_batch // (layout.data or 1))
    seconds = _seconds(config, config.model, (layout.tensor, layout.pipeline, layout.data or 1, batch), config.model.seq, 1)
    return None if seconds is None else run.steps * seconds


def of_generation(config: Config, model: ModelConfig, prompts: Sequence[str], tokens: int) -> float | None:
    """Seconds until the longest prompt has its tokens."""
    longest = max(len(text.encode()) for text in prompts) // BYTES_PER_TOKEN
    return _seconds(config, model, (1, 1, 1, len(prompts)), longest, tokens)


def _seconds(config: Config, model: ModelConfig, layout: tuple[int, int, int, int], prompt: int, output: int) -> float | None:
    if not config.cluster.hardware.peak_tflops.get(config.run.precision):
        return None
    import numpy as np

    from launcher.config.engines import engine
    from launcher.cost.inference.case import SERVING_DTYPE, InferenceCase
    from launcher.cost.inference.requests import static
    from launcher.cost.inputs.device import Device
    from launcher.cost.inputs.shape import Shape

    device, precision = Device.of(config.cluster.hardware, config.cluster.gpus_per_node), config.run.precision
    table = np.array([layout], SERVING_DTYPE)
    case = InferenceCase(Shape.of(model), table, float(prompt), float(output), device, engine("trireme"), weights=precision, kv=precision)
    return float(static(case).latency[0])
