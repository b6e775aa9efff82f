"""A coordinate check: how the sizes of activations grow with the width of a model. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import ModelConfig

TOLERANCE = 0.25
"""Exponents up to this one count as none. Wrong factors of muP differ by powers of 1/2 or 1."""
LEAST = {"logits": -0.5}
"""Kinds of layer whose exponents may be below 0, and how far. Initial weights of the head, divided by the width, add up at random: they
give width^-1/2, whatever their inputs. The change of those weights gives width^0, and outweighs it in time."""


@dataclass(frozen=True)
class Growth:
    """How the activations of a kind of layer go with the width: as its power ``size`` after the steps, and ``change`` since before them."""

    kind: str
    sizes: tuple[float, ...]
    changes: tuple[float, ...]
    size: float
    change: float

    @property
    def fault(self) -> str:
        """Names the size that is not constant; empty if both are."""
        for name, power in (("size", self.size), ("change", self.change)):
            if not math.isfinite(power):
                return f"the {name} is 0 or not finite"
            if power > TOLERANCE:
                return f"the {name} grows"
            if power < LEAST.get(self.kind, 0.0) - TOLERANCE:
                return f"the {name} shrinks"
        return ""


def growths(widths: Sequence[int], measured: Sequence[Mapping[str, Mapping[str, float]]]) -> list[Growth]:
    """Returns the growth of each kind of layer, from the sizes ``last`` and ``change`` at each width."""
    found = []
    for kind in measured[0]:
        sizes, changes = (tuple(figures[kind][name] for figures in measured) for name in ("last", "change"))
        found.append(Growth(kind, sizes, changes, exponent(widths, sizes), exponent(widths, changes)))
    return found


def exponent(widths: Sequence[int], sizes: Sequence[float]) -> float:
    """Returns the power p of ``size ~ width^p``, by least squares over logarithms; nan if a size is 0 or not finite."""
    if not all(math.isfinite(size) and size > 0 for size in sizes):
        return math.nan
    x, y = [math.log(width) for width in widths], [math.log(size) for size in sizes]
    middle, level = sum(x) / len(x), sum(y) / len(y)
    return sum((a - middle) * (b - level) for a, b in zip(x, y)) / sum((a - middle) ** 2 for a in x)


def widened(model: ModelConfig, width: int) -> ModelConfig:
    """Returns ``model`` with another ``hidden``, more or fewer heads of the same width, and inner widths in proportion."""
    experts = dataclasses.replace(
        model.experts,
        ffn=None if model.experts.ffn is None else scaled(model, "experts.ffn", model.experts.ffn, width),
        shared_ffn=scaled(model, "experts.shared_ffn", model.experts.shared_ffn, width),
    )
    return dataclasses.replace(
        model,
        hidden=width,
        heads=scaled(model, "heads", model.heads, width),
        kv_heads=None if model.kv_heads is None else scaled(model, "kv_heads", model.kv_heads, width),
        ffn=None if model.ffn is None else scaled(model, "ffn", model.ffn, width),
        experts=experts,
    )


def scaled(model: ModelConfig, name: str, value: int, width: int) -> int:
    """Returns a number that grows with the width. Raises ``ConfigError`` if it is not whole."""
    if value * width % model.hidden:
        raise ConfigError(
            f"--widths: width {width} would have {value} x {width} / {model.hidden} for model.{name}, which is not whole; use multiples of "
            f"{model.hidden // math.gcd(model.hidden, value)}"
        )
    return value * width // model.hidden
