"""Checks the types of ``trial.json`` once, so that readers need not. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.config.clusters import cluster_class
from trainer.shared.records.stage_run import StageRun
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import SECTION
from trainer.shared.run.value_types import fits

LATEST = 1e11
"""Latest valid unix seconds, some time in the year 5138."""


@dataclass
class HandleShape:
    """Fields of handles, of all backends."""

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
    """An earlier attempt, or its remaining objects."""

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
    """The prediction of the trial."""

    step_time_s: float | None
    interval_s: list[float] | None
    memory_bytes: float | None
    parts: dict[str, float] | None


def is_whole(data: Mapping[str, Any]) -> bool:
    """Returns whether a record is consistent: the cluster's class is its backend's, dates are dates, and a stage is one."""
    cluster, stage = data.get("cluster", {}), data.get("config", {}).get(SECTION)
    try:
        placed = isinstance(cluster, Mapping) and fits(cluster_class(cluster.get("backend", "local")), cluster)
    except ConfigError:  # no backend of that name
        return False
    times = [data.get(name) for name in ("created", "submitted", "started", "ended")]
    counted = data.get("attempt", 0) >= 0 and data.get("world_size", 1) >= 1
    return placed and counted and (stage is None or fits(StageRun, stage)) and all(time is None or is_time(time) for time in times)


def is_time(value: Any) -> bool:
    return fits(float, value) and 0 <= value < LATEST
