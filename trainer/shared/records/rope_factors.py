"""Llama 3.1's scaling of rotary positions as the divisors of frequencies that a GGUF file holds, and back."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from trainer.shared.run.schema import RopeConfig


def divisors(rope: RopeConfig, width: int, theta: float) -> list[float]:
    """Returns the divisors of the frequencies of ``rope.kind=llama3``, one for each pair of the ``width`` dimensions that turn."""
    turns = [(rope.original or 1) * frequency / (2 * math.pi) for frequency in _frequencies(width, theta)]
    shares = [min(max((each - rope.low) / (rope.high - rope.low or 1e-9), 0.0), 1.0) for each in turns]
    return [1 / ((1 - share) / rope.factor + share) for share in shares]


def stretching(given: Sequence[float], width: int, theta: float) -> dict[str, Any] | None:
    """Inverts ``divisors``: keys of ``model.rope``; None if no such scaling has them.

    Shares of the pairs between short and long waves are a line over their frequencies, whose two numbers follow from two pairs; from one,
    with ``high`` as published. ``low`` is 1, as in all published models: another one is the same angles by other values of ``original`` and
    ``high``.
    """
    if len(given) != width // 2 or min(given) < 1 or max(given) == 1:
        return None
    factor = shortest(max(given))
    shares = [(1 / each - 1 / factor) / (1 - 1 / factor) for each in given]
    between = [(at, share) for at, share in zip(_frequencies(width, theta), shares) if 1e-5 < share < 1 - 1e-5]
    found = {"factor": factor, "original": 8192, "low": 1.0, "high": 4.0}
    if len(between) > 1:
        (near, most), *_, (far, least) = between
        slope = (most - least) / (near - far)
        reach = 1 / max(slope * far - least, 1e-9)  # high - low
        found |= {"original": round(slope * reach * 2 * math.pi), "high": float(f"{1 + reach:.4g}")}
    elif between:
        ((at, share),) = between
        found["original"] = round((1 + 3 * share) / at * 2 * math.pi)
    again = divisors(RopeConfig("llama3", **found), width, theta)  # type: ignore[arg-type]
    return found if all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(again, given)) else None


def shortest(value: float) -> float:
    """Returns the shortest number that is the same in single precision: the one that was written."""
    single = struct.pack("<f", value)
    return next(short for digits in range(1, 18) if struct.pack("<f", short := float(f"{value:.{digits}g}")) == single)


def _frequencies(width: int, theta: float) -> list[float]:
    return [theta ** (-i / width) for i in range(0, width, 2)]
