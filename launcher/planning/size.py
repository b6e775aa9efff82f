"""The largest model that GPUs, days and tokens allow, and other ways to spend the same work.

The work of a run is counted as it is executed: 6 FLOPs per matrix parameter and token (8 when blocks are fully recomputed),
plus attention, which the usual 6 N leaves out. "Achieved" TFLOP/s are executed FLOPs over time, so a rate published for a run with
recomputation (SC21's 140 per A100) goes with the recomputation it was measured with.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from launcher.cost.inputs.shape import Shape
from launcher.labels import plural
from launcher.planning.shapes import LARGEST, SMALLEST, count, shape_for
from trainer.shared.run.errors import ConfigError, listed
from trainer.shared.run.schema import RECOMPUTE, ModelConfig

DAY = 86400.0
TOKENS_PER_PARAMETER = 20.0
"""Compute-optimal training (Hoffmann et al. 2022, "Chinchilla", table 3)."""

LARGEST_OF_BUDGET, OPTIMAL = "largest", "compute-optimal"
DAYS, MEMORY = "days", "memory"


@dataclass(frozen=True)
class Budget:
    """The GPUs and days that a run may take."""

    gpus: int
    days: float

    def __post_init__(self) -> None:
        for name in ("gpus", "days"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be more than 0")


@dataclass(frozen=True)
class ModelSizeOption:
    """One way to spend a budget. ``loss``: nats per token by Chinchilla's parametric fit."""

    name: str
    model: ModelConfig
    tokens: float
    days: float
    limit: str = DAYS  # the part of the budget that a larger model would exceed

    @property
    def parameters(self) -> float:
        return count(self.model)

    @property
    def loss(self) -> float:
        return chinchilla_loss(self.parameters, self.tokens)


Seconds = Callable[[ModelConfig, float], float]
"""Wall-clock seconds to train a model on that many tokens; infinite if it does not fit into memory."""
PRECISION = 1.005
"""Ratio of two sizes at which the bisection ends: shapes are further apart."""
BEYOND = (1.02, 1.04, 1.06, 1.08, 1.1)
"""Sizes tried beyond the first that exceeds the budget."""


def executed_flops(model: ModelConfig, recompute: str = "none") -> float:
    """Returns the FLOPs of one token: forward and backward, and a second forward of the attention core (selective) or all blocks (full)."""
    if recompute not in RECOMPUTE:
        raise ConfigError(f"recompute={recompute!r} is not one of {listed(RECOMPUTE)}")
    shape = Shape.of(model)
    head = 2 * shape.seq * shape.vocab * shape.hidden
    again = {"none": 0.0, "selective": shape.attention_flops(), "full": shape.forward_flops() - head}[recompute]
    return float((shape.model_flops() + again) / shape.seq)


def seconds_at(gpus: int, tflops: float, recompute: str) -> Seconds:
    """Returns the training time as a function of model and tokens if every GPU executes ``tflops`` TFLOP/s."""
    if tflops <= 0:
        raise ConfigError(f"tflops={tflops:g} must be more than 0")
    return lambda model, tokens: executed_flops(model, recompute) * tokens / (gpus * tflops * 1e12)


def largest(
    family: str, budget: Budget, tokens: float | None, seconds: Seconds, vocab: int | None = None, seq: int | None = None
) -> ModelSizeOption:
    """Returns the largest model that can be trained on ``tokens`` within the budget; ``tokens=None``: on 20 tokens per parameter.

    Bisects, since time and memory grow with size, and tries a few larger sizes, since some shapes divide the GPUs better than others.
    Shapes are discrete: up to their spacing (a few per cent) of the budget remains. ``ConfigError`` if no model is small enough, or the
    largest known one does not use up the budget.
    """
    if tokens is not None and tokens <= 0:
        raise ConfigError(f"tokens={tokens:g} must be more than 0")
    name = OPTIMAL if tokens is None else LARGEST_OF_BUDGET
    impossible: list[ConfigError] = []

    def attempt(parameters: float) -> ModelSizeOption | None:
        """Returns a model of about that size; None if that is smaller than its embeddings, or too small for so many GPUs to share."""
        try:
            model = shape_for(family, parameters, vocab, seq)
            planned = count(model) * TOKENS_PER_PARAMETER if tokens is None else tokens
            return ModelSizeOption(name, model, planned, seconds(model, planned) / DAY)
        except ConfigError as error:
            impossible.append(error)
            return None

    found: ModelSizeOption | None = None
    beyond: ModelSizeOption | None = None
    low, high = SMALLEST, LARGEST
    while high / low > PRECISION:
        size = math.sqrt(low * high)
        tried = attempt(size)
        if tried is None or tried.days <= budget.days:
            low, found = size, tried or found
        else:
            high, beyond = size, tried
    if found is None and beyond is None:
        raise impossible[-1]
    if found is not None and beyond is not None:
        within = [odd for factor in BEYOND if (odd := attempt(low * factor)) and odd.days <= budget.days]
        found = max((found, *within), key=lambda choice: choice.parameters)
    return _answer(family, budget, found, beyond)


def _answer(family: str, budget: Budget, found: ModelSizeOption | None, beyond: ModelSizeOption | None) -> ModelSizeOption:
    """Returns ``found`` with the limit that ``beyond`` exceeds."""
    spent = f"{budget.days:g} days on {plural(budget.gpus, 'GPU')}"
    if beyond is None:
        raise ConfigError(f"no {family} that is known fills {spent}; give more --tokens, fewer --days or fewer --gpus")
    if found is not None:
        return dataclasses.replace(found, limit=DAYS if math.isfinite(beyond.days) else MEMORY)
    takes = f"takes {beyond.days:.3g} days" if math.isfinite(beyond.days) else "does not fit into their memory"
    raise ConfigError(
        f"no {family} is small enough for {spent}: one of {beyond.parameters:.3g} parameters {takes}; "
        "give more --gpus, more --days or fewer --tokens"
    )


def chinchilla_loss(parameters: float, tokens: float) -> float:
    """Returns E + A / N^0.34 + B / D^0.28, in nats per token (Hoffmann et al. 2022, equation 10): for comparison, not as a forecast."""
    return float(1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28)


def alternatives(choice: ModelSizeOption, budget: Budget, seconds: Seconds) -> list[ModelSizeOption]:
    """Returns other ways to spend the same budget: compute-optimal, and models of half and a quarter of the size, trained for longer."""
    family, vocab, seq = choice.model.family, choice.model.vocab, choice.model.seq
    choices = [] if choice.name == OPTIMAL else [largest(family, budget, None, seconds, vocab, seq)]
    for part, name in ((2, "half the size"), (4, "a quarter of the size")):
        try:
            model = shape_for(family, choice.parameters / part, vocab, seq)
        except ConfigError:  # smaller than its embeddings
            continue
        billion = seconds(model, 1e9) / DAY
        choices.append(ModelSizeOption(name, model, budget.days / billion * 1e9, budget.days))
    return choices


@dataclass(frozen=True)
class Provision:
    """One number of GPUs for a given run, with the days that it takes there."""

    name: str
    gpus: int
    days: float

    @property
    def gpu_hours(self) -> float:
        return self.gpus * self.days * 24


FEWEST, CHEAPEST, FASTEST = "fewest GPUs", "cheapest", "fastest"
_ROUND = (1.0, 1.25, 1.5, 1.75)
"""Multiples of a power of two that clusters come in, and that layouts divide well."""


def provisions(days_at: Callable[[int], float], deadline: float, node: int, most: int) -> list[Provision]:
    """Returns the fewest GPUs that end within ``deadline`` days, the cheapest and the fastest of the numbers that were tried.

    Numbers are whole nodes of ``node`` GPUs, ``most`` at most. One node less than the fewest misses the deadline; round numbers that do so
    with fewer are found as well, although step times are not monotone in the number. The fastest is where twice as many GPUs gain nothing.
    ``days_at`` may be infinite. ``ConfigError`` if no number is enough.
    """
    known: dict[int, float] = {}

    def days(nodes: int) -> float:
        if nodes not in known:
            known[nodes] = days_at(nodes * node)
        return known[nodes]

    largest = most // node
    ladder = sorted({2**power for power in range(largest.bit_length()) if 2**power <= largest} | {largest} - {0})
    high = next((nodes for nodes in ladder if days(nodes) <= deadline or _saturated(known, nodes)), 0)
    if not high or days(high) > deadline:
        raise ConfigError(f"no number of GPUs up to {most:,} ends within {deadline:g} days: {_closest(known, node)}")
    while True:
        low = max((nodes for nodes in known if nodes < high and known[nodes] > deadline), default=0)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if days(middle) <= deadline else (middle, high)
        fewer = [nodes for nodes in _round_numbers(high / 2, high) if nodes < high and days(nodes) <= deadline]
        if not fewer:
            break
        high = min(fewer)
    for nodes in sorted({*_round_numbers(high, 2 * high), *(nodes for nodes in ladder if nodes > high)}):
        if nodes <= largest and not _saturated(known, nodes // 2):
            days(nodes)
    enough = {nodes: took for nodes, took in known.items() if took <= deadline}
    chosen = {
        FEWEST: min(enough),
        CHEAPEST: min(enough, key=lambda n: (n * enough[n], n)),
        FASTEST: min(enough, key=lambda n: (enough[n], n)),
    }
    return [Provision(name, nodes * node, enough[nodes]) for name, nodes in chosen.items()]


def _closest(known: dict[int, float], node: int) -> str:
    best = min(known, key=known.__getitem__, default=0)
    if not math.isfinite(known.get(best, math.inf)):
        return "the model fits into the memory of none of them; give more GPUs, or fewer --parameters"
    return f"the fastest of those tried, {best * node:,}, takes {known[best]:.3g} days; give more --days or fewer --tokens"


def _saturated(known: dict[int, float], nodes: int) -> bool:
    """Returns whether twice as many nodes, ``nodes``, gained nothing."""
    half, whole = known.get(nodes // 2, math.inf), known.get(nodes, 0.0)
    return math.isfinite(half) and whole >= half


def _round_numbers(low: float, high: float) -> list[int]:
    """Returns the numbers from ``low`` to ``high`` that are a power of two times one of ``_ROUND``."""
    powers = range(math.floor(math.log2(max(low, 1))), math.ceil(math.log2(max(high, 1))) + 1)
    found = {2**power * part for power in powers for part in _ROUND}
    return sorted(int(number) for number in found if number.is_integer() and low <= number <= high)
