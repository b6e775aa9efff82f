"""Angles of rotary positions, in plain numbers: the dimensions of a head that turn and their frequencies, by kind of scaling.

Kinds and formulas are those of Hugging Face's ``modeling_rope_utils.py``: linear (Chen et al. 2023, arXiv 2306.15595), dynamic (NTK by
length), llama3 (Dubey et al. 2024), yarn (Peng et al. 2023, arXiv 2309.00071), longrope (Ding et al. 2024, arXiv 2402.13753).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import RopeConfig


class Angles(NamedTuple):
    """Radians per position of each pair of dimensions, and the factor of sines and cosines."""

    frequencies: tuple[float, ...]
    magnitude: float = 1.0


def angles(model: ResolvedModelConfig, block: int) -> Angles:
    """Returns the angles for the queries and keys of a block."""
    rope, width = model.rope, round(model.turning)
    if rope.local_theta is not None and model.window_of(block) is not None:
        return Angles(_plain(width, rope.local_theta))
    return _SCALED[rope.kind](rope, width, model.rope_theta, model.seq)


def _plain(width: int, theta: float) -> tuple[float, ...]:
    return tuple(theta ** (-i / width) for i in range(0, width, 2))


def _default(rope: RopeConfig, width: int, theta: float, seq: int) -> Angles:
    return Angles(_plain(width, theta))


def _linear(rope: RopeConfig, width: int, theta: float, seq: int) -> Angles:
    return Angles(tuple(each / rope.factor for each in _plain(width, theta)))


def _dynamic(rope: RopeConfig, width: int, theta: float, seq: int) -> Angles:
    original = rope.original or seq
    longer = rope.factor * max(seq, original) / original - (rope.factor - 1)
    return Angles(_plain(width, theta * longer ** (width / (width - 2)) if width > 2 else theta))


def _llama3(rope: RopeConfig, width: int, theta: float, seq: int) -> Angles:
    assert rope.original is not None

    def scaled(frequency: float) -> float:
        """Keeps short waves, stretches long ones by the factor, and those between in part."""
        turns = rope.original * frequency / (2 * math.pi)  # type: ignore[operator]
        share = min(max((turns - rope.low) / (rope.high - rope.low or 1e-9), 0.0), 1.0)
        return (1 - share) * frequency / rope.factor + share * frequency

    return Angles(tuple(map(scaled, _plain(width, theta))))


def _yarn(rope: RopeConfig, width: int, theta: float, seq: int) -> Angles:
    original = rope.original
    assert original is not None

    def dimension(turns: float) -> float:
        """Returns the pair that makes this many turns over the original length."""
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(rope.fast), dimension(rope.slow)
    if rope.rounded:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0
    shares = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(width // 2)]
    scaled = (share * each / rope.factor + (1 - share) * each for share, each in zip(shares, _plain(width, theta)))
    return Angles(tuple(scaled), 0.1 * math.log(rope.factor) + 1 if rope.magnitude is None else rope.magnitude)


def _longrope(rope: RopeConfig, width: int, theta: float, seq: int) -> Angles:
    assert rope.original is not None
    factors = rope.long if seq > rope.original else rope.short
    usual = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original)) if rope.factor > 1 else 1.0
    scaled = tuple(each / factor for each, factor in zip(_plain(width, theta), factors))
    return Angles(scaled, usual if rope.magnitude is None else rope.magnitude)


_SCALED = {"default": _default, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
"""Scaling functions by ``model.rope.kind``."""
