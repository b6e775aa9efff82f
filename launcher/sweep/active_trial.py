"""A trial that this launcher runs: its record, its backend, and state that need not survive the launcher."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from launcher.backends.contract import Backend
from launcher.config.schema import ClusterConfig
from launcher.trials import exclusion
from launcher.trials.exclusion import Exclusion
from launcher.trials.job import Handle, Job
from launcher.trials.store import Record
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run import steady
from trainer.shared.run.errors import ConfigError


@dataclass(eq=False)
class ActiveTrial:
    """A trial of the running sweep, waiting to be submitted or submitted."""

    record: Record
    cluster: ClusterConfig
    backend: Backend
    rerun: bool = False  # measure it again although it has a result
    enough: tuple[Reason, ...] = ()  # reasons for which a search ended it that leave nothing to be done
    known_ends: int = field(init=False)  # attempts that had ended when this command began
    claimed: bool = False
    held_elsewhere: bool = False  # another launcher was running it when we first looked
    tries: int = 0  # attempts used up by infrastructure failures
    inherited: bool = False  # adopted from a previous launcher; does not consume a retry
    stop: tuple[Reason, str] | None = None  # why it is being ended
    first_step: int = 0  # last step known when the attempt began
    result_seen: float | None = None  # monotonic; when the attempt's result was first seen
    position: int = 0  # in the order of submission
    room_wanted: float | None = None  # monotonic; since when it has waited for room for all of its parts
    room_words: str = ""  # the last warning about that
    withdrawals: int = 0
    withdrawn: str = ""  # why its job is being ended, to be submitted again later
    needs: list[ActiveTrial] = field(default_factory=list)  # trials of this command that have to be done before it starts
    any_need: bool = False  # all of them have to have ended, and one to be done
    some_there: bool = False  # something else that it needs was done before this command

    def __post_init__(self) -> None:
        self.known_ends = len(self.record.history)

    def job(self, max_parallel: int) -> Job:
        record = self.record
        place = (record.directory, self.cluster, record.world_size)
        after = tuple(need.handle for need in self.needs if need.under_way and need.record.handle is not None)
        return Job(
            record.id, record.sweep, record.attempt, *place, max_parallel, record.config, record.avoided, after, record.stage, self.any_need
        )

    @property
    def handle(self) -> Handle:
        assert self.record.handle is not None, "a submitted trial has a handle"
        return self.record.handle

    def exclusions(self) -> list[Exclusion]:
        """Nodes that an attempt should leave out now."""
        now, history = time.time(), self.record.history
        aged = [entry if (age := steady.age(entry.get("clock"))) is None else entry | {"ended": now - age} for entry in history]
        return exclusion.exclusions(aged, self.cluster.avoid_s, now)

    @property
    def ended(self) -> bool:
        """It has, since this command began."""
        return self.record.status.final and len(self.record.history) > self.known_ends

    @property
    def settled(self) -> bool:
        """Nothing to run: the record has the answer, or another launcher ran the trial while this one waited."""
        return self.ended or (self.record.answered(self.enough) and not self.rerun)

    @property
    def under_way(self) -> bool:
        """Submitted, by this launcher or a previous one, and not known to have ended."""
        return self.record.status in (Status.SUBMITTED, Status.RUNNING)

    @property
    def unmet(self) -> list[ActiveTrial]:
        """Dependencies that are not done."""
        if self.any_need and (self.some_there or any(need.ended and need.record.status is Status.DONE for need in self.needs)):
            return [need for need in self.needs if not need.ended]
        return [need for need in self.needs if not (need.ended and need.record.status is Status.DONE)]

    @property
    def lost(self) -> ActiveTrial | None:
        """First dependency that will never be done."""
        lost = [need for need in self.unmet if need.ended]
        return None if self.any_need and len(lost) < len(self.needs) else next(iter(lost), None)

    @property
    def lost_words(self) -> str:
        """Name of the failed stage, directly before or further up; empty without one."""
        if self.lost is None:
            behind = [words for need in self.unmet if (words := need.lost_words)]
            return "" if not behind or (self.any_need and len(behind) < len(self.needs)) else behind[0]
        record = self.lost.record
        return record.detail if record.reason is Reason.UPSTREAM else f"stage {record.stage} failed"

    def read_last_step(self) -> int:
        step = (self.record.read_last_step() or {}).get("step", 0)
        return step if isinstance(step, int) else 0

    def check_fits(self) -> None:
        """``ConfigError`` when it has more ranks than its backend can ever hold."""
        capacity, needed = self.backend.capacity(), self.record.world_size
        if capacity is not None and needed > capacity:
            raise ConfigError(f"the layout needs {needed} ranks, and cluster.max_processes={capacity} allows fewer at once; raise it")

    def refresh(self, stored: Record) -> None:
        """Adopts another launcher's attempts at the trial."""
        for name in [f.name for f in dataclasses.fields(stored) if f.name not in _OF_PLAN]:
            setattr(self.record, name, getattr(stored, name))


_OF_PLAN = {"id", "directory", "overrides", "config", "cluster", "world_size", "sweep", "created", "predicted", "launcher", "commit"}
"""Fields of a record that describe the planned trial; the others describe its attempts."""


def by_backend(trials: Sequence[ActiveTrial]) -> list[tuple[Backend, list[ActiveTrial]]]:
    groups: dict[int, tuple[Backend, list[ActiveTrial]]] = {}
    for trial in trials:
        groups.setdefault(id(trial.backend), (trial.backend, []))[1].append(trial)
    return list(groups.values())
