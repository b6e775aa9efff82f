"""Runs planned stages as the trials of one sweep, in dependency order. A new launcher resumes where a killed one stopped: a trial's id is
its stage's, its job is found again by that name, and complete artifacts are reused.

    <root>/trials/ID/           the stage's record, configuration and logs, as of any trial
    <root>/stages/ID/artifact/  what it made; whole when it has its manifest
    <root>/stages/ID/lock       held by the process that makes it

The sweep is called like the pipeline: ``trireme status``, ``logs`` and ``cancel`` know both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.backends.pool import Backends
from launcher.config import SweepConfig
from launcher.config.rules import run_of
from launcher.stages.plan import PlannedStage
from launcher.sweep.observer import Observer
from launcher.sweep.run import check_follow, run_sweep
from launcher.trials.job import Job
from launcher.trials.labels import elapsed_s
from launcher.trials.store import UNDER_WAY, Record, Store
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.files import look_again
from trainer.shared.run.read import SECTION, to_dict

VISIBLE_SECONDS = 10.0
"""Seconds for which another node's artifact may stay invisible here (caches of NFS)."""


@dataclass
class Outcome:
    """Outcome of a stage: done, reused, failed, upstream failed, stopped; submitted where nobody waits for it."""

    planned: PlannedStage
    status: str
    detail: str = ""
    seconds: float = 0.0


def run_stages(pipeline: str, planned: Sequence[PlannedStage], observers: Sequence[Observer] = ()) -> list[Outcome]:
    """Runs ``planned`` stages that have no artifact. Stages behind a failed one are skipped; all others run."""
    made = {item.id for item in planned if item.made is not None}
    store = Store(planned[0].config.sweep.dir)
    if len(made) == len(planned) and not any(store.load(item.id).status in UNDER_WAY for item in planned):
        return [Outcome(item, "reused") for item in planned]
    _check_name(store, pipeline)
    first = planned[0].config.sweep
    settings = SweepConfig(dir=first.dir, max_parallel=0, retries=first.retries, follow=first.follow)
    with Backends() as backends:
        records = run_sweep(pipeline, [item.point for item in planned], settings, backends, observers)
    return [Outcome(item, "reused") if item.id in made else _outcome(item, record) for item, record in zip(planned, records)]


def check_inputs_there(planned: Sequence[PlannedStage], chosen: Sequence[PlannedStage]) -> None:
    """``ConfigError`` if a stage that is to be run takes something of one that is not, and that is not there."""
    left_out = {item.stage.name: item for item in planned if item not in chosen}
    for item in chosen:
        for name in item.stage.needs:
            if item.made is None and name in left_out and left_out[name].made is None:
                raise ConfigError(
                    f"stage {item.stage.name} takes what stage {name} makes, which is not there; run it first with --until {name}"
                )


def check_stages(pipeline: str, chosen: Sequence[PlannedStage]) -> None:
    """Raises ``ConfigError``, with the stage's name, if its request cannot be rendered here. Asks no cluster and leaves nothing behind."""
    first = chosen[0].config.sweep
    store, missing = Store(first.dir), [item for item in chosen if item.made is None]
    if missing:
        _check_name(store, pipeline)
    with Backends() as backends:
        for item in missing:
            try:
                backend = backends.of(item.config.cluster)
                check_follow(backend, first)
                backend.render(_job(pipeline, item, store))
            except ConfigError as error:
                raise ConfigError(f"stage {item.stage.name}: {error}") from None


def _job(pipeline: str, item: PlannedStage, store: Store) -> Job:
    """Its first attempt."""
    content = to_dict(run_of(item.config)) | {SECTION: to_dict(item.run)}
    size = item.ranks, 0
    return Job(item.id, pipeline, 0, store.trials / item.id, item.config.cluster, *size, content, stage=item.stage.name)


def _check_name(store: Store, pipeline: str) -> None:
    if pipeline in store.names() and any(not record.stage for record in store.sweep(pipeline).records):
        raise ConfigError(f"{store.root} has a sweep called {pipeline} already; name another folder with sweep.dir")


def _outcome(item: PlannedStage, record: Record) -> Outcome:
    seconds = elapsed_s(record) or 0.0
    if record.status is Status.DONE:
        return Outcome(item, "done", seconds=seconds) if _visible(item) else Outcome(item, "failed", _UNSEEN, seconds)
    if not record.status.final:
        return Outcome(item, "submitted", record.detail)
    if record.reason is Reason.UPSTREAM:
        return Outcome(item, "upstream failed", record.detail)
    reason = f"{record.reason.value}: " if record.reason else ""
    words = f"{reason}{record.detail or record.status.value}; see: trireme logs {item.stage.name}"
    return Outcome(item, record.status.value, words, seconds)


_UNSEEN = "its job is done, but its artifact is not visible here; share sweep.dir with the nodes, under one path"


def _visible(item: PlannedStage) -> bool:
    deadline = time.monotonic() + VISIBLE_SECONDS
    while item.made is None and time.monotonic() < deadline:
        look_again(item.artifact_folder)
        time.sleep(0.2)
    return item.made is not None
