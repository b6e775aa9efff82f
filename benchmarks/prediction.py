"""How fast the cost model predicts, on one core.

    python -m benchmarks.prediction

The fastest public model makes 2,800 predictions a second (Calculon). Here: the whole space of GPT-3 175B on 1,024 GPUs at once, a single
layout at a time, and ``trireme plan``'s whole answer, for which the space is enumerated and judged as well.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from launcher.config import compose, resolve
from launcher.cost import CostModel
from launcher.cost.inputs.layouts import to_layout
from launcher.planning.plan import Plan, plan

REPEATS = 5
FASTEST_PUBLIC = 2_800

T = TypeVar("T")


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    config = resolve(compose(["recipe=gpt3_175b"]))
    seconds, found = timed(lambda: plan(config))
    print(f"plan of 175B on {config.cluster.world_size} GPUs: {len(found.case.table)} layouts in {seconds:.2f} s")

    table, cost = found.case.table, CostModel(config.cluster, config.trainer)
    seconds, _ = timed(lambda: cost.predict_table(config.model, table, config.run))
    rate = len(table) / seconds
    print(f"as a table: {rate:,.0f} predictions/s, {rate / FASTEST_PUBLIC:.0f} times the fastest public model")

    seconds, _ = timed(lambda: with_intervals(plan(config)))
    print(f"the same plan with an 80 % interval and the probability of being the fastest for every layout: {seconds:.2f} s")

    layouts = [to_layout(record) for record in table[:: max(1, len(table) // 200)]]
    seconds, _ = timed(lambda: [cost.predict(config.model, layout, config.run) for layout in layouts])
    print(f"one at a time: {len(layouts) / seconds:,.0f} predictions/s")


def with_intervals(found: Plan) -> tuple[np.ndarray, ...]:
    """Intervals and chances of all layouts."""
    return (*found.believed.interval, found.chances)


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """The best of some repetitions, in seconds, and what the work gives."""
    best, result = float("inf"), work()
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - start)
    return best, result


if __name__ == "__main__":
    main()
