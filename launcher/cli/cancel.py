"""``trireme cancel SWEEP|TRIAL|STAGE``: stop a sweep, a pipeline, a trial or a stage, whether or not a launcher is running it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.cli.overrides import NamedOption
from launcher.cli.parser import VerbParser
from trainer.shared.records.outcome import Status

if TYPE_CHECKING:
    from launcher.trials.store import Record, Store


_PATIENCE_SECONDS = 60.0  # a rank may finish its step and write a checkpoint


def main(argv: list[str]) -> int:
    """0 when everything named has ended; 1 when a place, or a launcher that has been asked to stop trials, has not answered yet."""
    arguments = parser().parse_args(argv)
    from launcher.backends.contract import BackendError
    from launcher.backends.pool import Backends
    from launcher.sweep.reconcile import stop
    from launcher.trials.store import Store

    store = Store(arguments.dir)
    records = store.sweep(arguments.target).records if arguments.target in store.names() else [store.trial(arguments.target)]
    unended = [record for record in records if not record.status.final]
    ended = [record for record in records if record.status.final and record.left]
    if not unended and not ended:
        print(f"nothing to stop: {arguments.target} has ended")
        return 0
    with Backends() as backends:
        try:
            left = stop(store, [*unended, *ended], backends, _PATIENCE_SECONDS, arguments.forget)
        except BackendError as error:
            print(
                f"error: {error}; --forget gives up what never answers again; "
                "what runs there has not been stopped: repeat the command when it answers",
                file=sys.stderr,
            )
            return 1
    pending = _wait(store, left)
    stopped = sum(store.load(record.id).status is Status.STOPPED for record in unended)
    print(f"{stopped} stopped, {len(unended) - stopped - len(pending)} had ended, {len(pending)} not answered yet")
    return 1 if pending else 0


def parser() -> VerbParser:
    made = VerbParser("trireme cancel", "Stops a sweep, a pipeline, a trial or a stage.")
    made.add_argument(
        "target", metavar="SWEEP|TRIAL|STAGE", help="name of a sweep or pipeline, id of a trial or its first digits, or name of a stage"
    )
    made.add_argument("--dir", action=NamedOption, default="runs", help="folder of all trials and sweeps (default: %(default)s)")
    made.add_argument(
        "--forget", action="store_true", help="give up jobs on an unreachable backend without contacting it; they may still run there"
    )
    return made


def _wait(store: Store, records: Sequence[Record]) -> list[Record]:
    """Waits for the launchers that run ``records`` to obey; returns the trials that have not ended."""
    if records:
        holders = sorted({record.launcher for record in records if record.launcher})
        print(f"asked {', '.join(holders) or 'the launcher'} to stop {len(records)} trials", file=sys.stderr)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    pending = list(records)
    while pending and time.monotonic() < deadline:
        time.sleep(0.5)
        pending = [record for record in pending if not store.load(record.id).status.final]
    return pending
