"""The one error type for wrong input: plain words, no traceback, exit code 2."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable


class ConfigError(ValueError):
    """Wrong input. ``str(error)`` is the whole message: key, given value, allowed values, remedy.

    Example: ``layout.tensor=3 does not divide model.heads=16; use 1, 2, 4, 8 or 16``.
    """

    exit_code = 2


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns ``"; did you mean 'x'?"`` for the closest of ``known``, or an empty string."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{match[0]}'?" if match else ""


def listed(values: Iterable[object]) -> str:
    """Lists values as a person would: ``1, 2 or 4``."""
    words = [str(v) for v in values]
    if len(words) < 2:
        return "".join(words)
    return ", ".join(words[:-1]) + " or " + words[-1]


def options_listed(names: Iterable[object], most: int = 20) -> str:
    """Lists names as ``listed`` does; of very many the first, and how many more there are."""
    words = [str(name) for name in names]
    return listed(words) if len(words) <= most else f"{', '.join(words[:most])} and {len(words) - most} more"


def divisors(n: int) -> list[int]:
    """Returns all positive divisors of ``n``, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
