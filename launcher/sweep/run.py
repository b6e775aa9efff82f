"""From points to records: plans the sweep on disk, runs unanswered trials, and returns every point's state."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

from launcher.backends.contract import Backend, BackendError
from launcher.backends.pool import Backends
from launcher.config.schema import SweepConfig
from launcher.console import say
from launcher.interrupt import WORDS, Interrupted, asked, part_from_terminal
from launcher.sweep.active_trial import ActiveTrial
from launcher.sweep.loop import Loop
from launcher.sweep.observer import Observer
from launcher.sweep.progress import progress_for
from launcher.trials.identity import contents
from launcher.trials.job import Job
from launcher.trials.lock import Locks
from launcher.trials.store import UNDER_WAY, Point, Record, Store, check_name, cluster_of
from trainer.shared.run.derived import world_size_of
from trainer.shared.run.errors import ConfigError

__all__ = ["Point", "Record", "run_sweep"]


def run_sweep(
    name: str, points: Sequence[Point], settings: SweepConfig, backends: Backends, observers: Sequence[Observer] = ()
) -> list[Record]:
    """Runs ``points`` as sweep ``name`` and returns their records, in order. ``backends`` are left open for their owner.

    Trials that are answered already, in whichever sweep, are not run again unless ``settings.rerun``. One failing trial
    does not hide the others. Ctrl-C, SIGTERM or a closed terminal stop submitting and end the trials that run on this machine; trials
    in a queue continue and are found again by the same command. ``Interrupted`` is raised then, once all that has ended is recorded.
    ``ConfigError``, with nothing written or submitted, when a cluster cannot be used.
    """
    store = Store(settings.dir)
    check_name(name)
    check_clusters(store, points, settings, backends)
    points = _accepted(store, name, points, settings, backends)
    locks = Locks(store.root / "locks")
    try:
        _enter(store, locks, name)
        records = _plan(store, locks, name, points, settings.rerun)
        _say_what_changed(points, records, settings)
        active = _active_trials(points, records, settings, backends)
        _drop_stale_requests(store, locks, active)
        watchers = [progress_for(name, records, active, lambda: store.sweep(name).records), *observers]
        for watcher in watchers:
            watcher.begin()
        loop = Loop(store, locks, settings, name, launcher_name(), watchers)
        try:
            with _interruptible(loop, name, backends):
                loop.run(active)
        except BackendError as error:
            say(f"{error}; submitted jobs continue, and the same command follows them again")
        finally:
            for watcher in watchers:
                watcher.close()
    finally:
        locks.close()
    return records


def launcher_name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def check_clusters(store: Store, points: Sequence[Point], settings: SweepConfig, backends: Backends) -> None:
    """Checks every cluster on which something is to be run, before anything is written: a command that is refused leaves nothing behind."""
    trials = [(point, point.config, store.load(point.trial)) for point in points if point.config is not None]
    wanted = [cluster_of(record, config.cluster) for point, config, record in trials if _to_do(point, record, settings)]
    for cluster in sorted(wanted, key=lambda cluster: -cluster.world_size):  # the largest makes the backend
        check_follow(backends.checked(cluster), settings)


def check_follow(backend: Backend, settings: SweepConfig) -> None:
    """``ConfigError`` where trials would end with a launcher that is not to wait for them."""
    if not backend.outlives_launcher and not settings.follow:
        raise ConfigError(
            f"sweep.follow=false requires a backend that queues jobs (slurm, kubernetes), not cluster.backend={backend.cluster.backend}; "
            "use sweep.follow=true"
        )


def _to_do(point: Point, record: Record, settings: SweepConfig) -> bool:
    """Returns whether a trial must run, or leaves objects to remove."""
    return settings.rerun or not _answered(point, record) or bool(record.left)


def starts(point: Point, record: Record, settings: SweepConfig) -> bool:
    """Returns whether a sweep submits a trial: it is neither answered nor under way."""
    return point.config is not None and record.status not in UNDER_WAY and (settings.rerun or not _answered(point, record))


def _answered(point: Point, record: Record) -> bool:
    return record.answered(point.enough) if point.stage is None else point.stage.made is not None and record.status not in UNDER_WAY


def _accepted(store: Store, name: str, points: Sequence[Point], settings: SweepConfig, backends: Backends) -> list[Point]:
    """``points``, of which those that their place would refuse are pruned; ``ConfigError`` when nothing is left."""
    words: dict[str, str] = {}
    for backend, jobs in _fresh_jobs(store, name, points, settings, backends):
        refused = backend.refusals(jobs)
        for remark in backends.remarks(jobs[0].cluster, [job for job in jobs if job.name not in refused]):
            say(remark)
        words |= {job.trial: refused[job.name] for job in jobs if job.name in refused}
    if not words:
        return list(points)
    accepted = [
        replace(point, config=None, error=words[point.trial]) if point.config is not None and point.trial in words else point
        for point in points
    ]
    for point in points:
        if point.stage is not None and point.trial in words:
            raise ConfigError(f"stage {point.stage.name}: {words[point.trial]}")
    if all(point.config is None for point in accepted):
        raise ConfigError(next(iter(words.values())))
    return accepted


def _fresh_jobs(
    store: Store, name: str, points: Sequence[Point], settings: SweepConfig, backends: Backends
) -> list[tuple[Backend, list[Job]]]:
    """Returns jobs to submit, by backend, without configuration: backends accept or refuse their requests."""
    groups: dict[int, tuple[Backend, list[Job]]] = {}
    for point, config in [(point, point.config) for point in points if point.config is not None]:
        record = store.load(point.trial)
        if not starts(point, record, settings):
            continue
        backend = backends.of(config.cluster)
        job = Job(record.id, name, 0, record.directory, config.cluster, world_size_of(config.layout), settings.max_parallel or 0)
        groups.setdefault(id(backend), (backend, []))[1].append(job)
    return list(groups.values())


def _enter(store: Store, locks: Locks, name: str) -> None:
    """Locks the sweep, waiting for another launcher that runs it."""
    key = f"sweep {name}"
    if not locks.take(key):
        holder = store.sweep(name).launcher if name in store.names() else ""
        say(f"sweep {name} is being run by {holder or 'another launcher'}; waiting for it (Ctrl-C leaves it alone)")
        while not locks.take(key):
            time.sleep(0.5)


def _plan(store: Store, locks: Locks, name: str, points: Sequence[Point], rerun: bool) -> list[Record]:
    """The record of each point. Points that are the same trial share one record; those that another launcher holds are only read."""
    commit = _commit()
    records: list[Record] = []
    known: dict[str, Record] = {}
    for point in points:
        mine = point.config is not None and locks.take(point.trial)
        record = store.plan(point, name, commit, rerun)
        if mine:
            store.save(record, durable=False)
            locks.free(point.trial)
        records.append(known.setdefault(record.id, record))
    store.write_sweep(name, list(known.values()), launcher_name())
    return records


def _say_what_changed(points: Sequence[Point], records: Sequence[Record], settings: SweepConfig) -> None:
    """Names the inputs of measured trials whose content has changed since, under the same name."""
    changed: dict[str, list[str]] = {}
    for point, record in zip(points, records, strict=True):
        if point.config is not None and point.stage is None and record.reads and record.answered(point.enough) and not settings.rerun:
            now = contents(point.config)
            for name in [name for name, known in record.reads.items() if now.get(name, known) != known]:
                changed.setdefault(name, []).append(record.id)
    for name, trials in changed.items():
        which = ", ".join(trials[:3]) + (" ..." if len(trials) > 3 else "")
        say(f"{name} has changed since {which} was measured; sweep.rerun=true measures it again")


def _active_trials(points: Sequence[Point], records: Sequence[Record], settings: SweepConfig, backends: Backends) -> list[ActiveTrial]:
    todo: dict[str, ActiveTrial] = {}
    for point, record in zip(points, records, strict=True):
        if point.config is not None and _to_do(point, record, settings):
            cluster = cluster_of(record, point.config.cluster)
            again = settings.rerun or point.stage is not None
            todo[record.id] = ActiveTrial(record, cluster, backends.of(cluster), again, point.enough)
    for point in points:
        if point.trial in todo:
            todo[point.trial].needs = [todo[need] for need in point.needs if need in todo]
            todo[point.trial].any_need, todo[point.trial].some_there = point.any_need, any(need not in todo for need in point.needs)
    return list(todo.values())


def _drop_stale_requests(store: Store, locks: Locks, active: Sequence[ActiveTrial]) -> None:
    """Drops stop requests that were left for a launcher that has died since."""
    for identifier in store.stop_requests():
        for trial in active:
            if trial.record.id == identifier and not locks.held(identifier):
                store.forget_stop(trial.record)


@contextmanager
def _interruptible(loop: Loop, name: str, backends: Backends) -> Iterator[None]:
    """Makes the first signal stop the loop and backends' waits, and a second act by default. Raises ``Interrupted`` at the end."""
    requests: list[int] = []

    def interrupt(number: int, _frame: object) -> None:
        requests.append(number)
        loop.interrupt(WORDS[signal.Signals(number)])
        backends.hurry()
        for each, handler in before.items():
            signal.signal(each, handler)
        part_from_terminal()
        say(f"stopping; the same command continues where sweep {name} stopped")

    with asked(interrupt) as before:
        yield
    if requests:
        raise Interrupted(requests[0])


@cache
def _commit() -> str | None:
    """The git commit of the code that is run, with "+" when it has changes; None outside a checkout. Asked once: git looks at every file,
    and a search runs a sweep for each of its trials."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
