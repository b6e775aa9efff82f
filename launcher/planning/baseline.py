"""Initial hyper-parameters by family and size: those of published runs, interpolated between them.

Rules: the peak learning rate and the batch (in tokens) are interpolated linearly over logarithms between the published runs and constant
outside of them; the batch is rounded to a power of two of sequences, times the factor that lets the cluster's size divide it.
Final learning rate a tenth of the peak, held for the last 0.166 of a GPT run's steps as the NeMo tool does; init std
0.64 / sqrt(hidden); warm-up 0.15 % of the steps (GPT), 2,000 steps of 4 M tokens (LLaMA), 375 M tokens (BLOOM).
With ``model.transfer`` rate and init std are those of the base.
AdamW betas 0.9 and 0.95, weight decay 0.1, clip 1, dropout by family, bf16.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from launcher.planning.shapes import count, family_defaults, interpolate, log_interpolate
from launcher.planning.transfer import base_of
from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.optimizer import OptimizerConfig
from trainer.shared.run.schema import ModelConfig, RunConfig


@dataclass(frozen=True)
class Baseline:
    """Initial settings of a run, without its layout."""

    model: ModelConfig
    optimizer: OptimizerConfig
    run: RunConfig


def baseline(model: ModelConfig, tokens: float, gpus: int = 1) -> Baseline:
    """Returns hyper-parameters for ``model`` trained on ``tokens``; ``gpus`` only rounds the batch."""
    if tokens < model.seq:
        raise ConfigError(f"tokens={tokens:g} is less than one sequence of model.seq={model.seq}")
    defaults = family_defaults(model.family)
    parameters = count(model)
    batch_tokens = log_interpolate(list(defaults.batch_tokens), parameters)
    batch = round_batch(batch_tokens / model.seq, gpus)
    steps = max(1, round(tokens / (batch * model.seq)))
    base = base_of(model)  # the batch is not transferred
    lr = _two_digits(interpolate(model.family, count(base), lambda reference: reference.lr))
    warmup = 0.0015 * steps if defaults.warmup_tokens is None else defaults.warmup_tokens / (batch * model.seq)
    decay = steps - round(defaults.constant_end * steps)
    return Baseline(
        dataclasses.replace(model, dropout=defaults.dropout, init_std=round(FAMILIES[model.family].init_scale / math.sqrt(base.hidden), 6)),
        OptimizerConfig(
            lr=lr,
            min_lr=_two_digits(lr / 10),
            warmup_steps=min(math.ceil(warmup), steps - 1),
            decay_steps=max(1, decay),
            weight_decay=defaults.weight_decay,
        ),
        RunConfig(steps=steps, warmup_steps=min(10, steps - 1), global_batch=batch, precision="bf16"),
    )


def round_batch(sequences: float, gpus: int) -> int:
    """Returns the power of two times the odd part of ``gpus`` nearest to ``sequences`` (over logarithms), so that replicas divide it."""
    odd = gpus
    while odd % 2 == 0:
        odd //= 2
    return int(odd * 2 ** max(0, round(math.log2(max(sequences, 1) / odd))))


def _two_digits(value: float) -> float:
    return float(f"{value:.1e}")
