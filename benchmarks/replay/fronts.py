"""The search for the front on tables of measured inference, in place of a cluster. Pure."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from launcher.config.schema import HardwareConfig
from launcher.cost.inference.constants import INFERENCE
from launcher.planning.serving.plan import front
from launcher.search.front import FrontSearch
from launcher.tables.canonical import MeasuredRun
from launcher.tables.inference import judge
from launcher.tables.validation import short

MIN_ROWS = 8
"""Rows of one model, device, engine and pair of lengths that make a grid worth searching."""
ORDERS = 31
"""Random orders that a search is compared with."""


@dataclass(frozen=True)
class FrontReplay:
    """``behind`` after each measurement, the first entry before any; ``random_order``: measurements that a random order needs until what it
    measured is within the tolerance of the front (median)."""

    name: str
    rows: int
    front: int
    named: int  # points that the search names in the end, those within the tolerance among them
    behind: list[float]
    random_order: float
    within: float

    @property
    def measured(self) -> int:
        return len(self.behind) - 1

    @property
    def until_within(self) -> int | None:
        """Measurements after which the named front is within the tolerance, and stays so; None: never."""
        good = [value <= self.within for value in self.behind]
        return next((i for i in range(len(good)) if all(good[i:])), None)


def grids(rows: Sequence[MeasuredRun]) -> dict[str, list[MeasuredRun]]:
    """Rows that differ in layout and batch alone, by a name."""
    groups: dict[tuple[Any, ...], list[MeasuredRun]] = defaultdict(list)
    for row in rows:
        measured = row["latency_ms"] if row["mode"] == "static" else row["tpot_ms"]
        if measured and row["engine"] and row["family"] and row["batch"] and row["input"] and row["output"] and not row["oom"]:
            groups[tuple(row[key] for key in ("source", "model", "hardware", "engine", "mode", "weights", "input", "output"))].append(row)
    found = {}
    for (source, model, hardware, name, mode, weights, read, made), group in groups.items():
        if len(group) >= MIN_ROWS and len({(row["tensor"], row["pipeline"]) for row in group}) > 1:
            found[f"{short(source)}: {model or '(no model)'} {weights} {read:g}/{made:g} on {hardware}, {name}, {mode}"] = group
    return found


def replay_front(
    name: str, rows: Sequence[MeasuredRun], hardware: dict[str, HardwareConfig], within: float, tolerance: float, most: int | None
) -> FrontReplay | None:
    """Search one grid; None where its rows cannot be predicted."""
    known = [(one, pair) for one in judge(rows, hardware) if (pair := one.pair)]
    if len(known) < MIN_ROWS:
        return None
    predicted, seconds = (np.array([pair[i] for _, pair in known]) for i in (0, 1))
    layout = np.array([[one.row[key] for key in ("tensor", "pipeline", "batch")] for one, _ in known], dtype=float)
    per_second = layout[:, 0] * layout[:, 1] / layout[:, 2]
    search = FrontSearch(predicted, per_second, np.log2(layout), INFERENCE.layout_spread, tolerance)
    cost = seconds * per_second
    behind = [behind_front(search.answer(), seconds, cost)]
    while (most is None or len(search.measured) < most) and (point := search.ask()) is not None:
        search.tell(point, float(seconds[point]))
        behind.append(behind_front(search.answer(), seconds, cost))
    true = len(FrontSearch(seconds, per_second, np.log2(layout), INFERENCE.layout_spread, tolerance).named())
    return FrontReplay(name, len(known), true, len(search.answer()), behind, _random_order(seconds, cost, within), within)


def _random_order(seconds: np.ndarray, cost: np.ndarray, within: float) -> float:
    """Median over random orders of the measurements until the measured points are within the tolerance."""
    needed = []
    for seed in range(ORDERS):
        order = np.array(random.Random(seed).sample(range(len(seconds)), len(seconds)))
        needed.append(next(n for n in range(1, len(order) + 1) if behind_front(order[:n], seconds, cost) <= within))
    return statistics.median(needed)


def behind_front(chosen: np.ndarray, seconds: np.ndarray, cost: np.ndarray) -> float:
    """How far ``chosen`` points are from the true front: the largest factor, over its points, by which the nearest chosen one is slower or
    dearer, less 1."""
    best = front(seconds, cost)
    factors = np.maximum(seconds[chosen][None] / seconds[best][:, None], cost[chosen][None] / cost[best][:, None])
    return float(factors.min(axis=1).max() - 1)
