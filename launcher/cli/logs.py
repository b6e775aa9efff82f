"""``trireme logs TRIAL``: prints the logs of a trial's ranks, at rest or while they run."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.overrides import NamedOption
from launcher.cli.parser import VerbParser
from trainer.shared.run.errors import ConfigError, listed

if TYPE_CHECKING:
    from launcher.backends.contract import Backend
    from launcher.trials.job import Job
    from launcher.trials.store import Record, Store


_WAIT_SECONDS = 0.5


def main(argv: list[str]) -> int:
    """Prints the log of the newest attempt; with ``-f`` also of attempts that follow, until the trial ends."""
    arguments = parser().parse_args(argv)
    from launcher.trials.store import Store

    record = newest(Store(arguments.dir)) if arguments.trial is None else Store(arguments.dir).trial(arguments.trial)
    if arguments.rank is not None and not 0 <= arguments.rank < record.world_size:
        raise ConfigError(f"--rank {arguments.rank} is not a rank of trial {record.id}; use 0 to {record.world_size - 1}")
    lines = _follow(Store(arguments.dir), record) if arguments.follow and arguments.attempt is None else _newest(record, arguments.attempt)
    prefix = f"[{arguments.rank}] " if arguments.rank is not None and record.world_size > 1 else ""
    for line in lines:
        if line.startswith(prefix):
            print(line.removeprefix(prefix), flush=arguments.follow)
    return 0


def parser() -> VerbParser:
    made = VerbParser("trireme logs", "Prints the logs of a trial's ranks.")
    made.add_argument(
        "trial",
        nargs="?",
        metavar="TRIAL|STAGE",
        help="id of the trial or its first digits, or name of a stage (STAGE, PIPELINE.STAGE); default: that which was started last",
    )
    made.add_argument("-f", "--follow", action="store_true", help="continue until the trial has ended")
    made.add_argument("--rank", type=int, metavar="R", help="only this rank")
    made.add_argument("--attempt", type=int, metavar="N", help="only this attempt (default: the newest)")
    made.add_argument("--dir", action=NamedOption, default="runs", help="folder of all trials and sweeps (default: %(default)s)")
    return made


def newest(store: Store) -> Record:
    """Returns the trial of the newest sweep that was submitted last."""
    sweep = store.sweep(None)
    submitted = [record for record in sweep.records if record.submitted is not None]
    if not submitted:
        raise ConfigError(f"no trial of sweep {sweep.name} has been submitted yet; 'trireme status' says how they stand")
    return max(submitted, key=lambda record: record.submitted or 0.0)


def _newest(record: Record, attempt: int | None) -> Iterator[str]:
    from launcher.backends.logs import log_attempts

    attempts = log_attempts(record.directory)
    current = record.handle is not None and attempt in (None, record.attempt)
    chosen = record.attempt if current else attempt if attempt is not None else max(attempts, default=record.attempt)
    if attempt is not None and attempt not in attempts and not current:
        raise ConfigError(f"trial {record.id} has no log of attempt {attempt}" + (f"; there is {listed(attempts)}" if attempts else ""))
    with_backend = _open(record)
    try:
        yield from with_backend.logs(_job(record, chosen), record.handle if current else None)
    finally:
        with_backend.close()


def _follow(store: Store, record: Record) -> Iterator[str]:
    shown = -1
    backend = _open(record)
    try:
        while True:
            record = store.load(record.id)
            if record.attempt > shown and record.handle is not None:
                print(f"-- attempt {record.attempt} --", file=sys.stderr)
                yield from backend.logs(_job(record, record.attempt), record.handle, follow=True)
                shown = record.attempt
            elif record.status.final:
                return
            else:
                time.sleep(_WAIT_SECONDS)
    finally:
        backend.close()


def _open(record: Record) -> Backend:
    from launcher.backends import backend_for
    from launcher.trials.store import recorded_cluster

    if not record.cluster:
        raise ConfigError(f"the record of trial {record.id} is gone; its logs are in {Path(record.directory, 'logs')}")
    return backend_for(recorded_cluster(record))


def _job(record: Record, attempt: int) -> Job:
    from launcher.trials.job import Job
    from launcher.trials.store import recorded_cluster

    return Job(record.id, record.sweep, attempt, record.directory, recorded_cluster(record), record.world_size)
