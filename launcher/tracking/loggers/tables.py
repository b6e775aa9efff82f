"""Two tables of a sweep: ``trials`` and ``steps``, as CSV or as Parquet."""

from __future__ import annotations

import csv
import io
import json
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.results.rows import step_rows, trial_rows
from launcher.tracking.loggers import SweepLogger
from launcher.trials.store import Sweep


class TableLogger(SweepLogger):
    """Writes both tables whole whenever a trial has changed its state; steps of a trial are read once per state."""

    ending: str

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._state: dict[str, str] = {}
        self._steps: dict[str, list[dict[str, Any]]] = {}

    @abstractmethod
    def encoded(self, columns: dict[str, list[Any]]) -> bytes:
        """Returns the file of a table."""

    def update(self, sweep: Sweep) -> None:
        state = {record.id: f"{record.status.value} {record.attempt} {record.ended}" for record in sweep.records}
        if state == self._state and self._state:
            return
        changed = [record for record in sweep.records if state[record.id] != self._state.get(record.id)]
        self._steps |= {record.id: step_rows(record) for record in changed}
        self.folder.mkdir(parents=True, exist_ok=True)
        steps = [row for record in sweep.records for row in self._steps[record.id]]
        for name, rows in (("trials", trial_rows(sweep)), ("steps", steps)):
            file = self.folder / f"{name}{self.ending}"
            work = file.with_name(f".{file.name}")
            work.write_bytes(self.encoded(columns_of(rows)))
            work.replace(file)
        self._state = state


class CsvLogger(TableLogger):
    """``trials.csv`` and ``steps.csv``; an unknown value is an empty cell."""

    ending = ".csv"

    def encoded(self, columns: dict[str, list[Any]]) -> bytes:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values()))
        return text.getvalue().encode()


class ParquetLogger(TableLogger):
    """``trials.parquet`` and ``steps.parquet``."""

    ending = ".parquet"

    def encoded(self, columns: dict[str, list[Any]]) -> bytes:
        import pyarrow
        from pyarrow import parquet

        sink = pyarrow.BufferOutputStream()
        parquet.write_table(pyarrow.table(columns), sink)
        return bytes(sink.getvalue())


def columns_of(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Turns rows into columns of one type each, in order of appearance: numbers, truth values or texts; all else becomes JSON."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _typed([row.get(name) for row in rows]) for name in names}


def _typed(values: list[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return [None if value is None else float(value) for value in values]
    if len(kinds) < 2 and kinds <= {int, float, bool, str}:
        return values
    return [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
