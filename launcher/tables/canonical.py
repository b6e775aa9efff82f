"""Tables of measured runs in canonical columns: one line per run, every cell explicit, words from closed lists, ``unknown`` where it is
not known.

``trireme rank --csv`` writes the trials of a sweep in this form. Tables of other forms are turned into it before they get here.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher.cost.inputs.layouts import BALANCES
from launcher.cost.inputs.shape import CHOSEN
from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.errors import ConfigError, listed, nearest
from trainer.shared.run.schema import RATED, RECOMPUTE, SCHEDULES, TARGETS

UNKNOWN = "unknown"
MOST = 1e9
"""Whole numbers are below this."""
TINY, HUGE = 1e-18, 1e18
"""Numbers that can have been measured lie between these, far from where floating point ends."""


@dataclass(frozen=True)
class TableColumn:
    """A column: its meaning and valid cells."""

    name: str
    doc: str
    kind: str = (
        "count"  # count (1, 2, ...), size (0, 1, ...), number (above 0), flag (yes, no), word (of choices), words (some, or none), text
    )
    choices: tuple[str, ...] = ()
    absent: str | None = None  # the cell of a table without the column; None: every table has it

    @property
    def allowed(self) -> str:
        return {
            "count": f"a whole number of 1 or more, below {MOST:g}",
            "size": f"a whole number of 0 or more, below {MOST:g}",
            "number": f"a number above 0, below {HUGE:g}",
            "flag": "yes or no",
            "word": listed(self.choices),
            "words": f"none, or some of {', '.join(self.choices)} with blanks between",
            "text": "text",
        }[self.kind]

    def read(self, text: str) -> Any:
        """Parses a cell; None for ``unknown``. Raises ``ValueError`` if it is invalid."""
        if text == UNKNOWN:
            return None
        match self.kind:
            case "count" | "size":
                value = float(text)
                if value != int(value) or not (self.kind == "count") <= value < MOST:
                    raise ValueError(text)
                return int(value)
            case "number":
                value = float(text)
                if not TINY < value < HUGE:
                    raise ValueError(text)
                return value
            case "flag":
                return {"yes": True, "no": False}[text]
            case "word":
                return self.choices[self.choices.index(text)]
            case "words":
                words = [] if text == "none" else text.split()
                if not set(words) <= set(self.choices) or not text:
                    raise ValueError(text)
                return tuple(word for word in self.choices if word in words)
        return text


COLUMNS = {
    column.name: column
    for column in (
        TableColumn("source", "who measured: rows of one source are summed up together", "text"),
        TableColumn("model", "name of the model", "text"),
        # the model
        TableColumn("family", "family of its blocks (a mixture of experts is llama with experts)", "word", tuple(FAMILIES)),
        TableColumn("layers", "transformer blocks"),
        TableColumn("hidden", "width of the residual stream"),
        TableColumn("heads", "attention heads"),
        TableColumn("kv_heads", "key/value heads"),
        TableColumn("head_width", "width of one head", "number"),
        TableColumn("ffn", "inner width of the MLP"),
        TableColumn("vocab", "vocabulary"),
        TableColumn("seq", "sequence length in tokens"),
        TableColumn("tied", "input embedding and head share their matrix", "flag"),
        TableColumn("dropout", "dropout is on", "flag"),
        TableColumn("adapters", "only small adapters are trained (LoRA)", "flag"),
        TableColumn("adapter_rank", "rank of the low-rank products added to its matrices; 0 = none", "size", absent="0"),
        TableColumn("adapter_targets", "matrices with low-rank products", "words", TARGETS, absent="none"),
        TableColumn(
            "text", "tokens of one of the texts packed into a sequence, each seen alone; 0 = a sequence is one text", "size", absent="0"
        ),
        TableColumn("experts", "experts of a block; 0 = a dense model", "size"),
        TableColumn("experts_active", "experts that a token visits", "size"),
        TableColumn("experts_ffn", "inner width of one expert", "size"),
        TableColumn("experts_shared_ffn", "inner width of the experts that every token visits", "size"),
        TableColumn("dense_layers", "leading blocks with an ordinary MLP", "size"),
        TableColumn("latent_queries", "rank of the latent of queries (multi-head latent attention); 0 = none", "size"),
        TableColumn("latent_keys", "rank of the latent of keys and values", "size"),
        TableColumn("encoder_layers", "of the blocks, those of an encoder, which reads seq tokens; 0 = one stack", "size", absent="0"),
        TableColumn("decoder_seq", "tokens that the blocks behind an encoder write; 0 = one stack", "size", absent="0"),
        TableColumn(
            "model_changes",
            f"keys of the model ({', '.join(CHOSEN)}) in which it differs from its family: norm=layer biases=[qkv,output] ..., or none",
            "text",
            absent="none",
        ),
        # the machine
        TableColumn("hardware", "device: a file of conf/hardware, or of runs/hardware", "text"),
        TableColumn("gpus", "devices"),
        TableColumn("gpus_per_node", "devices of a node"),
        TableColumn("memory_gb", "memory of a device in 1e9 bytes; unknown = the hardware file's", "number"),
        TableColumn("memory_bandwidth_gbs", "its bandwidth in 1e9 bytes/s; unknown = the hardware file's", "number"),
        TableColumn(
            "link_gbs", "bandwidth inside a node, per device and direction, in 1e9 bytes/s; unknown = the hardware file's", "number"
        ),
        TableColumn("link_domain", "devices joined by links; unknown = the hardware file's"),
        TableColumn(
            "network_gbs", "bandwidth between nodes, per device and direction, in 1e9 bytes/s; unknown = the hardware file's", "number"
        ),
        TableColumn("network_latency_us", "time of one message between nodes; unknown = the hardware file's", "number", absent=UNKNOWN),
        # the trainer
        TableColumn("trainer", "profile of the trainer, a file of conf/trainer; unknown = conf/trainer/unknown.yaml", "text"),
        TableColumn("trainer_changes", "keys of the profile in which this run differs: overlap.gradients=false ..., or none", "text"),
        # the layout
        TableColumn("tensor", "tensor-parallel ranks"),
        TableColumn("pipeline", "pipeline ranks"),
        TableColumn("virtual_pipeline", "model chunks per pipeline rank"),
        TableColumn("data", "data-parallel replicas"),
        TableColumn("context", "context-parallel ranks"),
        TableColumn("expert", "expert-parallel ranks"),
        TableColumn("micro_batch", "sequences of a micro-batch"),
        TableColumn("global_batch", "sequences of a step"),
        TableColumn("schedule", "pipeline schedule", "word", SCHEDULES),
        TableColumn("balance", "how blocks are dealt out to stages", "word", BALANCES),
        TableColumn("sequence_parallel", "sequence parallelism", "flag"),
        TableColumn("recompute", "recomputation of activations", "word", RECOMPUTE),
        TableColumn("recompute_layers", "with recompute=full: first blocks of a chunk that are recomputed; 0 = all", "size"),
        TableColumn("recompute_every", "with recompute=full: every so many of them"),
        TableColumn("shard_params", "shards of the parameters, over data x context ranks"),
        TableColumn("shard_grads", "shards of the gradients, likewise"),
        TableColumn("shard_optimizer", "shards of the optimizer states, likewise"),
        TableColumn("precision", "number format of matrix products", "word", RATED),
        # measurements
        TableColumn("step_time_s", "seconds of a step", "number"),
        TableColumn("peak_memory_gb", "peak memory of the fullest rank in 1e9 bytes", "number"),
        TableColumn("memory_counts", "what that counts", "word", ("device", "reserved", "allocated")),
        TableColumn("oom", "the run had too little memory", "flag"),
        TableColumn("assumed", "columns of this row that its source does not say, each with the reason in brackets; or none", "text"),
    )
}
HOW = "python -m benchmarks.published TABLE.csv CANONICAL.csv"


class Unanswerable(ValueError):
    """A row that cannot be predicted; the message is the reason, the same for all rows of its kind."""


@dataclass(frozen=True)
class MeasuredRun:
    """One line: its number (from 1, the header not counted) and the values of its cells, None where unknown."""

    number: int
    cells: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.cells[name]

    def known(self, name: str) -> Any:
        """A cell that a prediction needs; ``Unanswerable`` where it is not known."""
        if self.cells[name] is None:
            raise Unanswerable(f"{name} is not known")
        return self.cells[name]

    @cached_property
    def assumed(self) -> set[str]:
        words = self.cells["assumed"] or "none"
        return set() if words == "none" else {word.split(" (")[0].strip() for word in words.split("; ")}

    def stated(self, name: str) -> Any:
        """A cell, None where it is assumed: rows of which one says nothing are not taken for runs of the same model."""
        return None if name in self.assumed else self.cells[name]

    @property
    def step_seconds(self) -> float | None:
        """Returns the measurement; None for a run out of memory, whatever it printed."""
        return None if self.cells["oom"] else self.cells["step_time_s"]

    @property
    def peak_bytes(self) -> float | None:
        peak = self.cells["peak_memory_gb"]
        return None if peak is None else peak * 1e9


def read(path: str | Path, columns: Mapping[str, TableColumn] = COLUMNS) -> list[MeasuredRun]:
    """Reads a table, of training unless other ``columns`` are given. Raises ``ConfigError`` for an invalid file, header or cell."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            _check_columns(path, reader.fieldnames, columns)
            return [MeasuredRun(number, _cells(path, number, record, columns)) for number, record in enumerate(reader, 1)]
    except OSError as error:
        raise ConfigError(f"cannot read the table {path}: {error.strerror}; give the path of a CSV file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read the table {path}: it is not UTF-8; unpack it, or save it as CSV in UTF-8") from None
    except csv.Error as error:
        raise ConfigError(f"cannot read the table {path}: {error}") from None


def write(path: str | Path, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, TableColumn] = COLUMNS) -> None:
    """A table of ``rows``, None as ``unknown``. ``ConfigError`` when it cannot be written."""
    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            lines = csv.writer(file, lineterminator="\n")
            lines.writerow(columns)
            lines.writerows([written(row[name]) for name in columns] for row in rows)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def written(value: Any) -> str:
    """A cell."""
    match value:
        case None:
            return UNKNOWN
        case bool():
            return "yes" if value else "no"
        case tuple():
            return " ".join(value) or "none"
        case float():
            return f"{value:.12g}"
    return str(value)


def header(path: str | Path) -> list[str]:
    """Names of a table's columns; empty where it cannot be read."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            return next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return []


def _check_columns(path: str | Path, columns: Sequence[str] | None, wanted: Mapping[str, TableColumn]) -> None:
    if not columns:
        raise ConfigError(f"{path} is empty; a table of measurements starts with a line of column names")
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise ConfigError(f"{path} has the column {twice[0]} more than once; keep one")
    if len(columns) == 1 and ";" in columns[0]:
        raise ConfigError(f"{path} has semicolons between its columns; use commas")
    if missing := [name for name, column in wanted.items() if name not in columns and column.absent is None]:
        hint = nearest(missing[0], [name for name in columns if name not in wanted])
        named = [*missing[:3], f"{len(missing) - 3} more"] if len(missing) > 4 else missing
        words = listed(named).replace(" or ", " and ")
        raise ConfigError(
            f"{path} has no column {words}{hint} (all: trireme validate --columns); a table as published becomes canonical with: {HOW}"
        )


def _cells(path: str | Path, number: int, record: Mapping[str, str | None], columns: Mapping[str, TableColumn]) -> dict[str, Any]:
    if any(text.strip() for text in record.get(None, ())):  # type: ignore[call-overload]  # what DictReader has left over
        raise ConfigError(f"row {number} of {path} has more cells than there are columns; write 1.5, not 1,5, and quote text with commas")
    cells = {}
    for name, column in columns.items():
        text = (record.get(name, column.absent) or "").strip()
        try:
            if not text:
                raise ValueError(name)
            cells[name] = column.read(text)
        except (ValueError, KeyError, OverflowError):
            given = f"{name}={text}" if text else f"no {name}"
            raise ConfigError(f"row {number} of {path} has {given}; give {column.allowed}, or {UNKNOWN}") from None
    return cells
