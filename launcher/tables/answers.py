"""Ask the cost model many published questions at once: rows that share device, trainer and kind of model become one table."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from launcher.cost.case import Case
from launcher.cost.constants import FITTED, Constants
from launcher.cost.memory import CONTEXT, FRAGMENTS
from launcher.cost.model import estimate
from launcher.cost.prediction import as_run
from launcher.cost.shape import Shape
from launcher.tables.questions import Question
from trainer.config import RunConfig


@dataclass(frozen=True)
class Answer:
    """What the cost model says of one row."""

    step_time_s: float
    memory_bytes: float  # of the device, context and fragments included
    reported_bytes: float  # as the source counts it
    fits: float
    time: dict[str, float]
    memory: dict[str, float]


def answers(questions: Sequence[Question], constants: Constants = FITTED) -> list[Answer]:
    """One answer for each question, in order."""
    found: dict[int, Answer] = {}
    for case, members in cases(questions):
        result = estimate(dataclasses.replace(case, constants=constants))
        parts = [{name: np.broadcast_to(v, case.table.shape) for name, v in kind.items()} for kind in (result.time, result.memory)]
        for place, member in enumerate(members):
            time, memory = ({name: float(values[place]) for name, values in kind.items()} for kind in parts)
            found[member] = Answer(
                sum(time.values()), sum(memory.values()), reported(questions[member], memory), float(result.fits[place]), time, memory
            )
    return [found[i] for i in range(len(questions))]


def reported(question: Question, memory: dict[str, float]) -> float:
    """Peak memory as the source of a row counts it."""
    left_out = {"device": (), "reserved": (CONTEXT,), "allocated": (CONTEXT, FRAGMENTS)}[question.publisher.reports]
    return sum(size for name, size in memory.items() if name not in left_out)


def cases(questions: Sequence[Question]) -> list[tuple[Case, list[int]]]:
    """The questions as few cases as possible, each with the places of its questions."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for place, q in enumerate(questions):
        switches = tuple(value for value in dataclasses.astuple(q.shape) if isinstance(value, bool))
        mixture = (q.shape.experts is not None, q.shape.latent is not None)
        groups[(repr(q.device), q.trainer, q.precision, switches, mixture)].append(place)
    return [(_case([questions[i] for i in members]), members) for members in groups.values()]


def _case(questions: list[Question]) -> Case:
    first = questions[0]
    table = np.array([q.layout for q in questions], dtype=first.layout.dtype)
    batches = np.array([q.global_batch for q in questions], dtype=float)
    trainer = as_run(first.trainer, RunConfig(), first.device)
    return Case(stacked([q.shape for q in questions]), table, batches, first.device, trainer, first.precision)


def stacked(shapes: Sequence[Any]) -> Shape:
    """Shapes of one kind as a single shape of arrays."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(shapes[0]):
        column = [getattr(shape, field.name) for shape in shapes]
        if dataclasses.is_dataclass(column[0]):
            values[field.name] = stacked(column)
        elif isinstance(column[0], bool) or column[0] is None:
            values[field.name] = column[0]
        else:
            values[field.name] = np.array(column, dtype=float)
    return type(shapes[0])(**values)
