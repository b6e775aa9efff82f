"""An attempt of a trial as a backend sees it: its configuration, the name by which it is found again, and its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.config.schema import ClusterConfig
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.records.trial_files import CONFIG

Handle = dict[str, Any]
"""Plain JSON data by which a backend finds a submitted job again: {"job_id": "12_3"}, {"namespace": ..., "name": ...}."""


@dataclass(frozen=True)
class Job:
    """A backend's input for a trial's attempt."""

    trial: str  # trial id
    sweep: str  # sweep name, for labels
    attempt: int  # 0, 1, ...; logs and results of an older attempt never overwrite those of a newer one
    directory: Path  # the trial's directory; holds config.yaml
    cluster: ClusterConfig
    world_size: int  # ranks the layout occupies; at most cluster.world_size
    max_parallel: int = 0  # jobs of the sweep that may run at once, 0 = any; for backends that throttle
    config: Mapping[str, Any] | None = field(default=None, compare=False)  # what config.yaml holds, for whoever sends it along
    avoid: tuple[str, ...] = ()  # nodes to be left out: they were at fault in earlier attempts
    after: tuple[Handle, ...] = ()  # jobs that have to succeed before it starts; only for backends that chain
    stage: str = ""  # its name in a pipeline, which ``sweep`` then names
    after_any: bool = False  # jobs of ``after`` need only have ended

    @property
    def name(self) -> str:
        """Deterministic job name, at most 50 characters: an orphan is recognised and adopted by it."""
        return f"{self.cluster.name_prefix}-{self.trial}-{self.attempt}"

    @property
    def config_path(self) -> Path:
        return self.directory / CONFIG

    @property
    def request_path(self) -> Path:
        return self.directory / "logs" / f"attempt{self.attempt}.submitted.txt"

    def log_path(self, rank: int) -> Path:
        return self.directory / "logs" / f"attempt{self.attempt}.rank{rank}.log"


@dataclass(frozen=True)
class JobState:
    """The state of a job according to its backend."""

    status: Status  # submitted, running, done, failed or stopped
    reason: Reason | None = None  # for failed and stopped; None: no more is known than that it ended, so the ranks' own words decide
    detail: str = ""  # the backend's own words: "NodeFail on n3", "0/4 nodes are available: ..."
    started: float | None = None  # unix seconds, when it is known
    nodes: tuple[str, ...] = ()
    ended: float | None = None  # unix seconds, when it is known
    attempt: int | None = None  # the attempt that runs, where the place itself starts jobs again (Slurm's requeue)
    earlier: tuple[JobState, ...] = ()  # how those of its attempts ended that the place itself followed by another
    clearing_up: bool = False  # its processes have ended, and the backend cleans up after them
    waits_for_room: bool = False  # a gang that is not placed whole: what it holds already is idle until the rest is placed
    yields: bool = False  # such a gang, that holds what one before it waits for
    expected: float | None = None  # unix seconds at which a queue expects a job to start that waits; it changes from poll to poll
    bad_nodes: tuple[str, ...] = ()  # those of ``nodes`` that are known to be at fault; the next attempts avoid them for a while
