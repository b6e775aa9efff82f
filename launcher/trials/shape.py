"""Whether what was read from ``trial.json`` has the types that a record promises: asked once, so that no reader has to. Pure."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from launcher.config.clusters import cluster_class
from trainer.shared.records.stage_run import StageRun
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import SECTION
from trainer.shared.run.schema import TrainConfig

LATEST = 1e11
"""Unix seconds, some time in the year 5138: what is later is not the time of a trial."""


@dataclass
class HandleShape:
    """What handles hold, of whichever backend."""

    job: str
    job_id: str
    array: str
    namespace: str
    name: str
    host: str
    directory: str
    code: str | None
    attempt: int
    pods: int
    since: float
    clock: str
    pids: list[int]


@dataclass
class AttemptShape:
    """An earlier attempt, or what it has left at its place."""

    attempt: int
    status: str
    reason: str | None
    detail: str
    started: float | None
    ended: float | None
    clock: str | None
    nodes: list[str]
    bad_nodes: list[str]
    handle: HandleShape | None


@dataclass
class PredictedShape:
    """What was expected of the trial."""

    step_time_s: float | None
    interval_s: list[float] | None
    memory_bytes: float | None
    parts: dict[str, float] | None


@dataclass
class RecordShape:
    """``Record`` as its file has it, but for its cluster: that is of the class that its backend names."""

    id: str
    status: str
    reason: str | None
    detail: str
    attempt: int
    handle: HandleShape | None
    overrides: list[str]
    config: TrainConfig
    world_size: int
    sweep: str
    created: float | None
    submitted: float | None
    started: float | None
    ended: float | None
    queue_clock: str | None
    end_clock: str | None
    nodes: list[str]
    predicted: PredictedShape | None
    history: list[AttemptShape]
    avoided: list[str]
    avoided_words: str
    left: list[AttemptShape]
    launcher: str
    reads: dict[str, str]
    commit: str | None


def is_record(data: Mapping[str, Any]) -> bool:
    """Whether every value has its type. Keys may be missing, and there may be more."""
    if not fits(RecordShape, data):
        return False
    cluster, stage = data.get("cluster", {}), data.get("config", {}).get(SECTION)
    try:
        placed = isinstance(cluster, Mapping) and fits(cluster_class(cluster.get("backend", "local")), cluster)
    except ConfigError:  # no backend of that name
        return False
    times = [data.get(name) for name in ("created", "submitted", "started", "ended")]
    counted = data.get("attempt", 0) >= 0 and data.get("world_size", 1) >= 1
    return placed and counted and (stage is None or fits(StageRun, stage)) and all(time is None or is_time(time) for time in times)


def is_time(value: Any) -> bool:
    """Whether ``value`` can be the unix seconds of something that happened."""
    return fits(float, value) and 0 <= value < LATEST


def fits(hint: Any, value: Any) -> bool:
    """Whether plain data ``value`` has the type ``hint``. Of a dataclass any keys may be missing, and others be there."""
    if hint is Any:
        return True
    if dataclasses.is_dataclass(hint):
        hints = _hints(typing.cast(Any, hint))
        return isinstance(value, Mapping) and all(fits(hints[name], entry) for name, entry in value.items() if name in hints)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(option, value) for option in inner)
    if origin is list:
        return isinstance(value, list) and all(fits(inner[0], entry) for entry in value)
    if origin is dict:
        return isinstance(value, Mapping) and all(fits(inner[1], entry) for entry in value.values())
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)
