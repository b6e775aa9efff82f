"""Predictions of many rows at once: rows that share device, trainer and kind of model become one table of layouts."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from launcher.cost.inputs.case import Case
from launcher.cost.inputs.constants import Constants
from launcher.cost.inputs.device import Device
from launcher.cost.inputs.shape import Shape
from launcher.cost.memory.peak import CONTEXT, FRAGMENTS
from launcher.cost.model import estimate
from launcher.cost.uncertainty import columns
from launcher.tables.cases import TableCase

LEFT_OUT: dict[str | None, tuple[str, ...]] = {"device": (), "reserved": (CONTEXT,), "allocated": (CONTEXT, FRAGMENTS), None: ()}
"""Parts of the memory that a source's peak does not count."""


@dataclass(frozen=True)
class RowPrediction:
    """The cost model's prediction of one row."""

    step_time_s: float
    memory_bytes: float  # of the device, context and fragments included
    reported_bytes: float  # as the source counts it
    fits: float
    time: dict[str, float]
    memory: dict[str, float]
    causes: np.ndarray  # (k,) seconds by the part that they depend on


def predict_rows(rows: Sequence[TableCase]) -> list[RowPrediction]:
    """One prediction for each row, in order."""
    found: dict[int, RowPrediction] = {}
    for case, members in grouped(rows):
        result = estimate(case)
        causes = columns(result.causes, len(members))
        parts = [{name: np.broadcast_to(v, case.table.shape) for name, v in kind.items()} for kind in (result.time, result.memory)]
        for place, member in enumerate(members):
            time, memory = ({name: float(values[place]) for name, values in kind.items()} for kind in parts)
            left_out = LEFT_OUT[rows[member].row["memory_counts"]]
            reported = sum(size for name, size in memory.items() if name not in left_out)
            found[member] = RowPrediction(
                sum(time.values()), sum(memory.values()), reported, float(result.fits[place]), time, memory, causes[place]
            )
    return [found[i] for i in range(len(rows))]


def grouped(rows: Sequence[TableCase]) -> list[tuple[Case, list[int]]]:
    """The rows as few cases as possible, each with the positions of its rows."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for position, row in enumerate(rows):
        values = (getattr(row.shape, field.name) for field in dataclasses.fields(row.shape))
        switches = tuple(value for value in values if isinstance(value, (bool, tuple, str)))
        mixture = (row.shape.experts is not None, row.shape.latent is not None)
        groups[(repr(row.device), row.constants, row.trainer, row.precision, switches, mixture)].append(position)
    return [(_case([rows[i] for i in members]), members) for members in groups.values()]


def _case(rows: list[TableCase]) -> Case:
    first = rows[0]
    table = np.array([row.layout for row in rows], dtype=first.layout.dtype)
    batches = np.array([row.global_batch for row in rows], dtype=float)
    return Case(stacked([row.shape for row in rows]), table, batches, first.device, first.trainer, first.precision, first.constants)


def on_each(case: Case, machines: Sequence[tuple[Device, Constants]]) -> Case:
    """Repeats the layouts of ``case``, whose sizes are arrays, for each of several machines that differ in constants and sustained rates
    alone: one table, for the arrays of one prediction are hardly longer to compute than those of another."""
    count, (device, first) = len(case.table), machines[0]

    def column(values: Sequence[float]) -> Any:
        return np.repeat(values, count) if len({*values}) > 1 else values[0]

    constants = {field.name: column([getattr(each, field.name) for _, each in machines]) for field in dataclasses.fields(first)}
    sustained = {name: column([each.sustained[name] for each, _ in machines]) for name in device.sustained}
    return dataclasses.replace(
        case,
        shape=_repeated(case.shape, len(machines)),
        table=np.tile(case.table, len(machines)),
        global_batch=np.tile(case.global_batch, len(machines)),
        device=dataclasses.replace(device, sustained=sustained),
        constants=type(first)(**constants),
    )


def _repeated(shape: Any, times: int) -> Any:
    """A shape of arrays, one after the other."""
    values = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)}
    several = {name: _repeated(each, times) for name, each in values.items() if dataclasses.is_dataclass(each)}
    return dataclasses.replace(
        shape, **several, **{name: np.tile(each, times) for name, each in values.items() if isinstance(each, np.ndarray)}
    )


def stacked(shapes: Sequence[Any]) -> Shape:
    """Shapes of one kind as a single shape of arrays."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(shapes[0]):
        column = [getattr(shape, field.name) for shape in shapes]
        if dataclasses.is_dataclass(column[0]):
            values[field.name] = stacked(column)
        elif isinstance(column[0], (bool, tuple, str)) or column[0] is None:
            values[field.name] = column[0]
        else:
            values[field.name] = np.array(column, dtype=float)
    return type(shapes[0])(**values)
