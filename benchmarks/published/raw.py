"""Tables in the form in which published measurements are collected: one line per run, columns by name, blank where a source prints nothing.

``read`` is strict: what is no number in a column of numbers is an error, since a cell that was mistyped would pass for one that the source
left blank. A range ("64-256") is a number that is not known. What a row means is decided in ``cells``.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.shared.run.errors import ConfigError, listed, nearest

REQUIRED = ("model", "layers", "hidden", "seq", "gpu", "gpus", "tp", "pp", "mbs", "gbs")
"""Columns that a table must have; of some, such as ``mbs``, a row's cell may be blank."""

COUNTS = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "vocab",
    "seq",
    "gpus",
    "nodes",
    "tp",
    "pp",
    "virtual_pp",
    "dp",
    "cp",
    "ep",
    "mbs",
    "gbs",
)
"""Columns of positive whole numbers."""
NUMBERS = (
    *COUNTS,
    *("step_time_s", "samples_per_s", "tokens_per_s_total", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct", "peak_mem_gb"),
    *("batch", "input_len", "output_len", "latency_ms", "throughput"),
    *("isl", "osl", "batch_size", "tp_size", "pp_size", "attention_dp_size", "moe_ep_size", "silicon_ttft_ms", "silicon_tpot_ms"),
)
"""Columns whose cells are numbers, ranges of them, 0 for none, or blank."""
_NUMBER = re.compile(r"\+?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?(\s*-\s*\d+(\.\d+)?)?")


@dataclass(frozen=True)
class RawRow:
    """One line: its number (from 1, the header not counted) and its cells, blank ones left out."""

    number: int
    cells: dict[str, str]

    def text(self, name: str) -> str:
        """A cell, or an empty string."""
        return self.cells.get(name, "")

    def number_of(self, name: str) -> float | None:
        """A cell as a positive number that can have been measured (1e-18 to 1e18, far from where floating point ends), or None."""
        try:
            value = float(self.cells[name])
        except (KeyError, ValueError):
            return None
        return value if 1e-18 < value < 1e18 else None

    def whole(self, name: str) -> int | None:
        """A cell as a positive whole number below 1e9, or None."""
        value = self.number_of(name)
        return int(value) if value is not None and value < 1e9 and value == int(value) else None

    def yes(self, name: str) -> bool | None:
        """A cell that says yes or no."""
        return {"yes": True, "no": False}.get(self.text(name).lower())

    def filled(self, cells: Mapping[str, str]) -> RawRow:
        """The row with ``cells`` where its own are blank."""
        return RawRow(self.number, {**cells, **self.cells})

    @property
    def source(self) -> str:
        return self.text("source")

    @property
    def notes(self) -> str:
        return self.text("notes")

    @property
    def sharding(self) -> str:
        """The sharding column in lower case, ZeRO's stages as "zero-N" however they are spelled."""
        return re.sub(r"zero[\s_-]*(?:stage)?[\s_-]*([0-3])\b", r"zero-\1", self.text("zero_stage_or_sharding").lower())

    @property
    def schedule(self) -> str:
        """The pipeline schedule that model, table or notes name first: "1f1b", "gpipe", "zb", "zb-1p", "zb-2p", "zb-h1" ..., or an empty
        string."""
        words = " ".join(map(self.text, ("model", "table_or_file", "notes"))).lower()
        found = re.search(r"\b(?:(gpipe|afab)|(1f1b)|zb-?(h?[12]p?|v)?|zero.?bubble)\b", words)
        if not found:
            return ""
        together, plain, kind = found.groups()
        return "gpipe" if together else plain or (f"zb-{kind}" if kind else "zb")

    @property
    def kernel(self) -> str:
        """The attention kernel that the notes name ("kernel: NAME;"), or an empty string."""
        found = re.search(r"kernel: ([^;]+)", self.notes)
        return found.group(1).strip() if found else ""


def read(path: str | Path, required: Sequence[str] = REQUIRED) -> list[RawRow]:
    """All rows of a table, of training unless other columns are ``required``. ``ConfigError`` when it cannot be read or its columns are
    not those of the format."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            _check_columns(path, reader.fieldnames, required)
            return [RawRow(number, _cells(path, number, record)) for number, record in enumerate(reader, 1)]
    except OSError as error:
        raise ConfigError(f"cannot read the table {path}: {error.strerror}; give the path of a CSV file") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"cannot read the table {path}: {error}") from None


def _check_columns(path: str | Path, columns: Sequence[str] | None, required: Sequence[str]) -> None:
    if not columns:
        raise ConfigError(f"{path} is empty; a table of measurements starts with a line of column names")
    twice = [name for name in columns if columns.count(name) > 1]
    if twice:
        raise ConfigError(f"{path} has the column {twice[0]} more than once; keep one")
    missing = [name for name in required if name not in columns]
    if missing and len(columns) == 1 and ";" in columns[0]:
        raise ConfigError(f"{path} has semicolons between its columns; use commas")
    if missing:
        hint = nearest(missing[0], columns)
        raise ConfigError(f"{path} has no column {listed(missing).replace(' or ', ' and ')}{hint} (it has: {', '.join(columns)})")


def _cells(path: str | Path, number: int, record: dict[str, str | None]) -> dict[str, str]:
    if any(text.strip() for text in record.get(None, ())):  # type: ignore[call-overload]  # what DictReader has left over
        raise ConfigError(f"row {number} of {path} has more cells than there are columns; write 1.5, not 1,5, and quote text with commas")
    cells = {name: value.strip() for name, value in record.items() if isinstance(value, str) and value.strip()}
    if wrong := [name for name in NUMBERS if name in cells and not _NUMBER.fullmatch(cells[name])]:
        name = wrong[0]
        raise ConfigError(f"row {number} of {path} has {name}={cells[name]}; give a number above 0, or leave the cell blank")
    return cells
