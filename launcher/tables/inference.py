"""Tables of measured inference in canonical columns: read, predicted, compared with the cost model.

One line per measurement. ``static`` rows are judged by the latency of a batch, the others by the time per further token, since the time
to the first one is mostly that of the load generator's queue.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from launcher.config.engine import EngineProfile, released
from launcher.config.schema import HardwareConfig
from launcher.config.trainers import engine, engine_names
from launcher.cost.inference import SERVING_DTYPE, InferenceCase, InferenceEstimate, closed, opened, static
from launcher.cost.inference.case import NINE_OF_TEN
from launcher.cost.inputs.device import Device
from launcher.cost.inputs.shape import Shape, family_traits
from launcher.cost.thresholds import FITS
from launcher.tables import canonical
from launcher.tables.canonical import MeasuredRun, TableColumn, Unanswerable
from launcher.tables.cases import mixture_of
from launcher.tables.metrics import Errors, Verdicts, by_cell, check_unit
from launcher.tables.predictions import stacked
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.schema import RATED, ModelConfig

MODES = ("static", "closed", "open")
_SHARED = ("source", "model", "family", "layers", "hidden", "heads", "kv_heads", "head_width", "ffn", "vocab", "tied")
_MACHINE = ("hardware", "gpus_per_node")
_MIXTURE = ("experts", "experts_active", "experts_ffn", "experts_shared_ffn", "dense_layers", "latent_queries", "latent_keys")
COLUMNS: dict[str, TableColumn] = {
    **{name: canonical.COLUMNS[name] for name in _SHARED},
    **{name: replace(canonical.COLUMNS[name], absent="0") for name in _MIXTURE},
    **{name: canonical.COLUMNS[name] for name in _MACHINE},
    **{
        column.name: column
        for column in (
            TableColumn("engine", "profile of the engine, a file of conf/engine", "text"),
            TableColumn(
                "engine_version",
                "its release, where its profile tells releases apart; unknown = one of today",
                "text",
                absent=canonical.UNKNOWN,
            ),
            TableColumn("mode", "static batches, a closed loop of requests in flight, or open arrivals", "word", MODES),
            TableColumn("tensor", "tensor-parallel ranks"),
            TableColumn("pipeline", "pipeline ranks"),
            TableColumn("replicas", "copies of the model"),
            TableColumn("batch", "requests in flight per replica; open: unknown; closed: unknown = as many as the engine runs"),
            TableColumn("rate", "open: requests per second over all replicas", "number"),
            TableColumn("input", "tokens of a prompt", "number"),
            TableColumn("output", "tokens generated per request", "number"),
            TableColumn("weights", "number format of the weights", "word", RATED),
            TableColumn("kv", "number format of keys and values", "word", RATED),
            TableColumn("latency_ms", "milliseconds of a request", "number"),
            TableColumn("ttft_ms", "milliseconds to the first token", "number"),
            TableColumn("tpot_ms", "milliseconds per further token", "number"),
            TableColumn(
                "tokens_per_s", "generated tokens per second over all replicas, where no other time is told", "number", absent="unknown"
            ),
            TableColumn("oom", "the device had too little memory", "flag"),
            canonical.COLUMNS["assumed"],
        )
    },
}
UNITS = {"latency": ("latency_ms", "milliseconds"), "tpot": ("tpot_ms", "milliseconds"), "token": ("tokens_per_s", "tokens per second")}
"""The column that a row is judged by, and its unit, by ``judged_by``."""
NEEDED = ("hardware", "tensor", "pipeline", "input", "output")
"""Columns that a source must state for its row to count as fully described."""


@dataclass(frozen=True)
class JudgedRequest:
    """One row, and its prediction or the reason for none."""

    row: MeasuredRun
    latency_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    judged_s: float | None = None  # what the row is judged by (``judged_by``)
    fits: float | None = None
    memory_bytes: float | None = None
    capacity: float | None = None
    spread: float = 0.0  # relative standard error of its times
    reason: str = ""

    @property
    def pair(self) -> tuple[float, float] | None:
        """Returns (predicted, measured) seconds of the judged quantity."""
        measured = measured_seconds(self.row)
        return None if measured is None or self.judged_s is None else (self.judged_s, measured)

    @property
    def inside(self) -> bool | None:
        """Returns whether the measurement is in the interval that has nine of ten; None without both."""
        return None if (pair := self.pair) is None else abs(np.log(pair[0] / pair[1])) <= NINE_OF_TEN * self.spread

    @property
    def whole(self) -> bool:
        """Returns whether the source states the columns that matter most."""
        stated = not any(self.row[name] is None or name in self.row.assumed for name in NEEDED)
        return stated and self.row["layers"] is not None and self.row["hidden"] is not None


@dataclass(frozen=True)
class RequestSummary:
    """Figures of a selection of rows; ``median`` has every model count the same, however many rows it has, that of ``errors`` every row."""

    rows: int
    predicted: int
    errors: Errors | None
    median: float | None
    inside: float | None  # share of the rows in the interval that has nine of ten
    verdicts: Verdicts | None


def judged_by(row: MeasuredRun) -> str:
    """Returns the judged quantity: ``latency`` of a static batch, else the time per further token (``tpot``), or, from a rate alone, the
    time in which one ``token`` of any request is made."""
    if row["mode"] == "static":
        return "latency"
    return "token" if row["tpot_ms"] is None and row["tokens_per_s"] else "tpot"


def measured_seconds(row: MeasuredRun) -> float | None:
    """Returns the judged quantity in seconds; None for a row without it, or out of memory."""
    if row["oom"]:
        return None
    if (kind := judged_by(row)) == "token":
        return 1 / float(row["tokens_per_s"])
    milliseconds = row[f"{kind}_ms"]
    return None if milliseconds is None else float(milliseconds) / 1e3


def predicted_seconds(row: MeasuredRun, made: InferenceEstimate) -> np.ndarray:
    """Returns the same quantity of all predicted rows of a case, like ``row``."""
    kind = judged_by(row)
    return 1 / (made.throughput * made.output) if kind == "token" else getattr(made, kind)


def read(path: str | Path) -> list[MeasuredRun]:
    return canonical.read(path, COLUMNS)


def is_inference(path: str | Path) -> bool:
    """Returns whether a table is of inference, by columns that training lacks."""
    return not {"tpot_ms", "ttft_ms", "engine"}.isdisjoint(canonical.header(path))


def shape_of(row: MeasuredRun) -> Shape:
    """The model of a row."""
    traits = family_traits(ModelConfig(row.known("family"), seq=1))
    names = ("layers", "hidden", "heads", "kv_heads", "head_width", "ffn", "vocab")
    sizes = {name: row.known(name) for name in names}
    experts, latent = mixture_of(row)
    return Shape(**sizes, seq=1, gated=traits["gated"], tied=bool(row["tied"]), biases=traits["biases"], experts=experts, latent=latent)


def cases(rows: Sequence[MeasuredRun], hardware: dict[str, HardwareConfig]) -> tuple[list[tuple[InferenceCase, list[int]]], dict[int, str]]:
    """The rows as few cases, each with the positions of its rows; and the reasons of those that cannot be predicted."""
    groups: dict[Any, list[int]] = defaultdict(list)
    parts: dict[int, tuple[Shape, Device, EngineProfile]] = {}
    reasons: dict[int, str] = {}
    for position, row in enumerate(rows):
        try:
            parts[position] = _parts(row, hardware)
            key = _kind(row, *parts[position][:2])
        except Unanswerable as why:
            reasons[position] = str(why)
            continue
        groups[key].append(position)
    return [(_case([rows[i] for i in members], [parts[i] for i in members]), members) for members in groups.values()], reasons


def _kind(row: MeasuredRun, shape: Shape, device: Device) -> tuple[Any, ...]:
    """Rows of one kind are predicted together."""
    return (row["mode"], judged_by(row), repr(device), row["engine"], row["engine_version"], row["weights"], row["kv"], *_structure(shape))


def _structure(shape: Shape) -> tuple[Any, ...]:
    """Returns the traits of a model that are not numbers, in which the shapes of a case are alike."""
    return shape.gated, shape.tied, shape.biases, shape.experts is None, shape.latent is None


def _parts(row: MeasuredRun, hardware: dict[str, HardwareConfig]) -> tuple[Shape, Device, EngineProfile]:
    shape = shape_of(row)
    for name in ("input", "output", "tensor", "pipeline", "mode", "weights", *{"open": ["rate"], "static": ["batch"]}.get(row["mode"], [])):
        row.known(name)
    name = row.known("hardware")
    if name not in hardware:
        raise Unanswerable(f"hardware {name} is not described")
    if row.known("engine") not in engines():
        raise Unanswerable(f"engine {row['engine']} is not described")
    if row.known("tensor") > shape.heads or row.known("pipeline") > shape.layers:
        raise Unanswerable("more ranks than heads or layers")
    if shape.heads % row.known("tensor"):
        raise Unanswerable("tensor degree does not divide the heads")
    return shape, Device.of(hardware[name], row.known("gpus_per_node")), _engine(row.known("engine"), row["engine_version"] or "")


@cache
def _engine(name: str, version: str) -> EngineProfile:
    profile = engine(name)
    try:
        return released(replace(profile, version=version if profile.earlier else ""))
    except ConfigError as why:
        raise Unanswerable(str(why)) from None


@cache
def engines() -> frozenset[str]:
    return frozenset(engine_names())


def _case(rows: list[MeasuredRun], parts: list[tuple[Shape, Device, EngineProfile]]) -> InferenceCase:
    most = parts[0][2].most_requests if rows[0]["mode"] == "closed" else 1
    table = np.array([(r["tensor"], r["pipeline"], r["replicas"] or 1, r["batch"] or most) for r in rows], SERVING_DTYPE)
    lengths = {name: np.array([float(r[name]) for r in rows]) for name in ("input", "output")}
    shape, (_, device, profile) = stacked([part[0] for part in parts]), parts[0]
    weights, kv = rows[0]["weights"], rows[0]["kv"] or "bf16"
    return InferenceCase(shape, table, lengths["input"], lengths["output"], device, profile, weights, kv)


def estimated(case: InferenceCase, rows: Sequence[MeasuredRun]) -> InferenceEstimate:
    """Predicts the rows of a case."""
    if rows[0]["mode"] == "open":
        return opened(case, np.array([r["rate"] for r in rows]))
    return static(case) if rows[0]["mode"] == "static" else closed(case)


def judge(rows: Sequence[MeasuredRun], hardware: dict[str, HardwareConfig]) -> list[JudgedRequest]:
    """Every row with its prediction, or the reason why it has none."""
    known, reasons = cases(rows, hardware)
    found = {position: JudgedRequest(rows[position], reason=why) for position, why in reasons.items()}
    for case, members in known:
        made = estimated(case, [rows[i] for i in members])
        memory = sum(made.memory.values())
        judged = predicted_seconds(rows[members[0]], made)
        columns = np.stack(np.broadcast_arrays(made.latency, made.ttft, made.tpot, judged, made.fits, memory), axis=1)
        for place, position in enumerate(members):
            latency, ttft, tpot, seconds, fits, needed = map(float, columns[place])
            found[position] = JudgedRequest(
                rows[position], latency, ttft, tpot, seconds, fits, needed, case.device.memory, case.error_spread
            )
    return [found[i] for i in range(len(rows))]


def summary(judged: Sequence[JudgedRequest]) -> RequestSummary:
    """All figures of a selection."""
    timed = [(j.row["model"], pair) for j in judged if (pair := j.pair)]
    told = [flag for j in judged if (flag := _verdict(j)) is not None]
    models = [model for model, _ in timed]
    median = weighted_median([abs(p / m - 1) for _, (p, m) in timed], models) if timed else None
    inside = [found for j in judged if (found := j.inside) is not None]
    predicted = sum(j.latency_s is not None for j in judged)
    return RequestSummary(
        len(judged),
        predicted,
        Errors.of([pair for _, pair in timed]),
        median,
        sum(inside) / len(inside) if inside else None,
        Verdicts.of(told) if told else None,
    )


def _verdict(judged: JudgedRequest) -> tuple[bool, bool, float, float] | None:
    oom, fits, needed = judged.row["oom"], judged.fits, judged.memory_bytes
    if oom is None or fits is None or needed is None:
        return None
    return fits < FITS, oom, needed, needed / (judged.capacity or np.inf)


def check_units(judged: Sequence[JudgedRequest]) -> None:
    """Raises ``ConfigError`` where a source's measurements must be in other units."""
    for source, members in by_cell(judged, "source").items():
        for kind, (column, unit) in UNITS.items():
            pairs = [pair for j in members if judged_by(j.row) == kind and (pair := j.pair)]
            check_unit(Errors.of(pairs), source, column, unit, rate=kind == "token")


def weighted_median(errors: Sequence[float], models: Sequence[Any]) -> float:
    """The median where all rows of a model together weigh as much as those of any other."""
    counts = Counter(models)
    order = np.argsort(errors, kind="stable")
    weights = np.cumsum([1 / counts[models[i]] for i in order])
    return float(np.asarray(errors)[order][np.searchsorted(weights, weights[-1] / 2)])


def by_model(judged: Sequence[JudgedRequest]) -> dict[str, RequestSummary]:
    return {model: summary(members) for model, members in by_cell(judged, "model").items()}
