"""A trace of requests: when each arrived, how many tokens it had, how many it was given."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from trainer.shared.run.errors import ConfigError
from trainer.shared.run.keys import MOST

COLUMNS = {"arrival": 10**15, "input": MOST, "output": MOST}
"""The columns, and the largest value of a cell."""


@dataclass(frozen=True)
class Trace:
    """Mean lengths in tokens and requests per second; tokens of the longest request, prompt and answer together, and its row (from 1)."""

    input: int
    output: int
    rate: float
    longest: int
    row: int


def read_trace(path: str | Path) -> Trace:
    """Summarises a file of requests. Raises ``ConfigError`` for invalid columns or cells, or too few requests for a rate."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or []
            if missing := [name for name in COLUMNS if name not in names]:
                raise ConfigError(
                    f"workload.trace={path} has no column {missing[0]} (it has: {', '.join(names) or 'nothing'}); give {', '.join(COLUMNS)}"
                )
            if twice := [name for name in COLUMNS if names.count(name) > 1]:
                raise ConfigError(f"workload.trace={path} has the column {twice[0]} more than once; keep one")
            rows = [_row(path, number, record) for number, record in enumerate(reader, 1)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read workload.trace={path} ({error}); give a CSV file with columns {', '.join(COLUMNS)}") from None
    times = [row[0] for row in rows]
    if len(rows) < 2 or max(times) == min(times):
        raise ConfigError(f"workload.trace={path} has no two requests at different times, so no rate; give a longer one")
    inputs, outputs = (max(round(sum(row[i] for row in rows) / len(rows)), 1) for i in (1, 2))
    sizes = [math.ceil(row[1] + row[2]) for row in rows]
    longest = max(sizes)  # of short requests, rounded means can be longer than any
    rate = (len(rows) - 1) / (max(times) - min(times))
    return Trace(inputs, outputs, rate, max(longest, inputs + outputs), sizes.index(longest) + 1)


def _row(path: str | Path, number: int, record: dict[str, str | None]) -> tuple[float, float, float]:
    if any(text.strip() for text in record.get(None, ())):  # type: ignore[call-overload]  # what DictReader has left over
        raise ConfigError(f"row {number} of workload.trace={path} has more cells than there are columns; write 1.5, not 1,5")
    values = []
    for name, most in COLUMNS.items():
        text = record[name] or ""
        try:
            value = float(text)
            if not 0 <= value <= most or "_" in text:  # only Python takes 1_000 for a number
                raise ValueError(name)
        except ValueError:
            given = repr(text[:40]) if text else "nothing"
            raise ConfigError(f"row {number} of workload.trace={path} has {name}={given}; give a number from 0 to {most}") from None
        values.append(value)
    return values[0], values[1], values[2]
