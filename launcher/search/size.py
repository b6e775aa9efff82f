"""How large a model GPUs, days and tokens allow, and what the same work could buy instead.

The work of a run is counted as it is executed: 6 FLOPs per matrix parameter and token (8 when blocks are fully recomputed),
plus attention, which the usual 6 N leaves out. "Achieved" TFLOP/s are executed FLOPs over time, so that a rate printed for a run
with recomputation (SC21's 140 per A100) is used with the recomputation that it was measured with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from launcher.cost.shape import Shape
from launcher.search.shapes import LARGEST, SMALLEST, count, shape_for
from trainer.config import ConfigError, ModelConfig
from trainer.config.errors import listed
from trainer.config.schema import RECOMPUTE

DAY = 86400.0
TOKENS_PER_PARAMETER = 20.0
"""Compute-optimal training (Hoffmann et al. 2022, "Chinchilla", table 3)."""

OPTIMAL = "compute-optimal"


@dataclass(frozen=True)
class Budget:
    """What there is to spend."""

    gpus: int
    days: float

    def __post_init__(self) -> None:
        for name in ("gpus", "days"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be more than 0")

    @property
    def gpu_seconds(self) -> float:
        return self.gpus * self.days * DAY


@dataclass(frozen=True)
class Choice:
    """One way to spend a budget. ``loss``: nats per token by Chinchilla's parametric fit."""

    name: str
    model: ModelConfig
    tokens: float
    days: float

    @property
    def parameters(self) -> float:
        return count(self.model)

    @property
    def loss(self) -> float:
        return chinchilla_loss(self.parameters, self.tokens)


Seconds = Callable[[ModelConfig, float], float]
"""Wall-clock seconds to train a model on so many tokens."""


def executed_flops(model: ModelConfig, recompute: str = "none") -> float:
    """FLOPs of one token: forward and backward, plus the attention core (selective) or all blocks (full) forward once more."""
    if recompute not in RECOMPUTE:
        raise ConfigError(f"recompute={recompute!r} is not one of {listed(RECOMPUTE)}")
    shape = Shape.of(model)
    head = 2 * shape.seq * shape.vocab * shape.hidden
    again = {"none": 0.0, "selective": shape.attention_flops(), "full": shape.forward_flops() - head}[recompute]
    return float((shape.model_flops() + again) / shape.seq)


def seconds_at(gpus: int, tflops: float, recompute: str) -> Seconds:
    """Training time when every GPU executes ``tflops`` TFLOP/s, whatever the model."""
    if tflops <= 0:
        raise ConfigError(f"tflops={tflops:g} must be more than 0")
    return lambda model, tokens: executed_flops(model, recompute) * tokens / (gpus * tflops * 1e12)


def largest(family: str, budget: Budget, tokens: float | None, seconds: Seconds, vocab: int | None = None, seq: int = 2048) -> Choice:
    """The largest model that is trained on ``tokens`` within the budget; ``tokens=None``: on 20 tokens per parameter.

    Time grows smoothly with size, so that a few steps of the secant method over logarithms find it; shapes are discrete, which
    leaves an error of up to their spacing (a few per cent).
    """
    if tokens is not None and tokens <= 0:
        raise ConfigError(f"tokens={tokens:g} must be more than 0")

    def choice(parameters: float) -> Choice:
        model = shape_for(family, parameters, vocab, seq)
        planned = count(model) * TOKENS_PER_PARAMETER if tokens is None else tokens
        name = OPTIMAL if tokens is None else "asked"
        return Choice(name, model, planned, seconds(model, planned) / DAY)

    guess = 1e9
    slope = 2.0 if tokens is None else 1.0
    tried: list[Choice] = []
    for _ in range(8):
        tried.append(choice(guess))
        misses = math.log(budget.days / tried[-1].days)
        if abs(misses) < 0.01:
            break
        guess = min(max(count(tried[-1].model) * math.exp(misses / slope), SMALLEST), LARGEST)
    return min(tried, key=lambda c: abs(math.log(c.days / budget.days)))


def chinchilla_loss(parameters: float, tokens: float) -> float:
    """E + A / N^0.34 + B / D^0.28, in nats per token (Hoffmann et al. 2022, equation 10). Good for comparing, not for promising."""
    return float(1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28)


def alternatives(choice: Choice, budget: Budget, seconds: Seconds) -> list[Choice]:
    """Other ways to spend the same budget: compute-optimal, and models of a half and a quarter of the size, trained for longer."""
    family, vocab, seq = choice.model.family, choice.model.vocab, choice.model.seq
    choices = [] if choice.name == OPTIMAL else [largest(family, budget, None, seconds, vocab, seq)]
    for part, name in ((2, "half the size"), (4, "a quarter of the size")):
        if choice.parameters / part < SMALLEST:
            continue
        model = shape_for(family, choice.parameters / part, vocab, seq)
        billion = seconds(model, 1e9) / DAY
        choices.append(Choice(name, model, budget.days / billion * 1e9, budget.days))
    return choices
