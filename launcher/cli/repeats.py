"""One line on repeats of a layout that contradict each other, for the verbs that learn from them or show them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.labels import seconds, shown

if TYPE_CHECKING:
    from launcher.tables.repeats import Repeat


SHOWN = 4
"""Repeats shown per layout; the rest is counted."""
MEDIAN = "their median is learnt from; leave out the one that is wrong"


def warn(found: Sequence[Sequence[Repeat]], use: str) -> None:
    """Warns of contradicting repeats on standard error. ``use``: their use and the remedy."""
    if found:
        print(shown(f"warning: {words(found, use)}"), file=sys.stderr)


def words(found: Sequence[Sequence[Repeat]], use: str) -> str:
    """The furthest apart by name and value, the others by their number."""
    worst = found[0]
    shown = [*worst[: SHOWN - 1], worst[-1]] if len(worst) > SHOWN else worst
    between = f" ({len(worst) - len(shown)} between)" if len(worst) > len(shown) else ""
    listed = ", ".join(f"{name} {seconds(took)}" for name, took in shown)
    others = f"; so do those of {len(found) - 1} more" if len(found) > 1 else ""
    return f"repeats of one layout contradict each other: {listed}{between}{others}; {use}"
