"""The pipeline of one predicted step, action by action: the trainer's own schedule, simulated with the cost model's times. Slices of
sequences are of equal work, and take the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from launcher.cost import model
from launcher.cost.inputs import stages
from launcher.cost.inputs.case import Case
from launcher.cost.time import block, embedding_head, pipeline
from trainer.shared.parallel.schedule import build
from trainer.shared.parallel.simulate import Span, Times, simulate
from trainer.shared.run.schema import SCHEDULES

MOST_SPANS = 20_000
"""A timeline of more computations than this is shortened to fewer micro-batches: the steady state only repeats."""


@dataclass(frozen=True)
class SimulatedTimeline:
    """Spans per pipeline rank, in seconds from the start of the pipeline, of ``micro_batches`` of the step's ``of``."""

    ranks: list[list[Span]]
    chunks: int
    micro_batches: int
    of: int


def timeline(case: Case, split: Sequence[int] | None = None, most: int = MOST_SPANS) -> SimulatedTimeline:
    """Simulate the single layout of ``case``; at most about ``most`` computations of it, but the pipeline filled twice."""
    layout = case.table[0]
    p, v, m = int(layout["pipeline"]), int(layout["virtual_pipeline"]), int(case.micro_batches[0] / case.slices[0])
    slices = int(case.slices[0])
    shown = min(m, max(2, most // (2 * p * v * slices) // p) * p)  # whole rounds of the pipeline, so that its end looks as it does
    times = model.stage_times(case, stages.held(case, split), block.of_stacks(case))
    schedule = build(SCHEDULES[int(layout["schedule"])], p, v, shown, slices)
    return SimulatedTimeline(simulate(schedule, _per_stage(times, p, v, _head_at_once(case))), v, shown, m)


def _head_at_once(case: Case) -> float:
    """Seconds of the head's backward, if its weight gradient cannot be put off: each chunk of logits overwrites the one before
    (trainer/tensor/cross_entropy.py)."""
    late = case.trainer.kernels.late_loss and _number(case.chunk_tokens) < _number(case.tokens)
    return _number(embedding_head.head(case)[1]) if late else 0.0


def _per_stage(times: pipeline.StageTimes, p: int, v: int, at_once: float) -> Times:
    """Seconds of each global stage: a rank's blocks are spread evenly over its chunks; embedding and head are in the outermost stages. Of
    the last stage's backward ``at_once`` has no weight gradient that could wait."""
    forward, backward = (_column(_number(times.first[w]), _number(times.middle[w]), _number(times.last[w]), p, v) for w in (0, 1))
    weight = [times.weight_share * seconds for seconds in (*backward[:-1], backward[-1] - at_once)]
    rest = [whole - part for whole, part in zip(backward, weight)]
    return Times(forward, backward, rest, weight, [_number(times.send)] * (p * v))


def _column(first: float, middle: float, last: float, p: int, v: int) -> list[float]:
    """One way through all stages, given what whole ranks take."""
    others = middle * (v - 1) / v
    inner = [middle / v] * (p * v)
    return [last] if p == 1 else [first - others, *inner[1:-1], last - others]


def _number(value: object) -> float:
    return float(np.ravel(np.asarray(value, dtype=float))[0])
