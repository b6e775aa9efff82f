"""Finds repeats of one layout that contradict each other. Pure.

Rows with the same inputs of the cost model count once, with their median, which holds if they differ by measurement noise; otherwise one of
them is mislabelled, and only its owner can tell which.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

from launcher.tables.cases import TableCase

APART = 1.1
"""Largest over smallest step time at which repeats contradict: published ones differ by 0.1 to 1.2 %, noise between two is 0.7 %."""
Repeat = tuple[str, float]
"""A row's label, and its step time in seconds."""


def question(case: TableCase) -> tuple[Hashable, ...]:
    """Equal for rows that say the same of all that a prediction depends on."""
    asked = (case.shape, case.global_batch, case.device, case.constants, case.precision, case.trainer)
    return case.layout.tobytes(), repr(asked)


def contradictions(measured: Iterable[tuple[Hashable, str, float]]) -> list[list[Repeat]]:
    """Returns groups of one key wider than ``APART``, the widest first, each from the fastest. ``measured``: key, label and seconds."""
    groups: dict[Hashable, list[Repeat]] = defaultdict(list)
    for key, name, took in measured:
        groups[key].append((name, took))
    apart = [sorted(each, key=lambda repeat: repeat[1]) for each in groups.values()]
    return sorted((each for each in apart if _ratio(each) > APART), key=_ratio, reverse=True)


def of_rows(cases: Iterable[TableCase]) -> list[list[Repeat]]:
    """Finds contradicting repeats in a table, within each source and trainer."""
    own = ((case, (case.row["source"], case.row["trainer"], case.row["trainer_changes"])) for case in cases)
    return contradictions(
        ((stated, *question(case)), f"row {case.row.number}", took) for case, stated in own if (took := case.row.step_seconds)
    )


def _ratio(repeats: Sequence[Repeat]) -> float:
    return repeats[-1][1] / repeats[0][1]
