"""``trireme status [SWEEP]``: how a sweep's trials stand, asked of their queue where no launcher is following them."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.arguments import caught_up
from launcher.cli.console import Column, fitted_table, print_list, wide_console
from launcher.cli.overrides import NamedOption
from launcher.cli.parser import VerbParser
from launcher.labels import one_line
from trainer.shared.records.outcome import Status
from trainer.shared.run.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.trials.store import Record, Store, Sweep


_STYLES = {Status.DONE: "green", Status.RUNNING: "bold", Status.FAILED: "red", Status.STOPPED: "yellow", Status.PRUNED: "dim"}


EVERY_S = 2.0
"""Seconds between looks at a watched sweep."""
_SHARE = 10
"""Looks take at most one part in so many of the time."""


def main(argv: list[str]) -> int:
    """Prints the table; 0 however the trials stand."""
    arguments = parser().parse_args(argv)
    from launcher.backends.snapshot import CodeSnapshot
    from launcher.trials.store import Store

    store = Store(arguments.dir)
    if arguments.watch is not None and (arguments.all or arguments.json or not 0 < arguments.watch < 86400):
        raise ConfigError(f"--watch={arguments.watch:g} takes seconds above 0, and stands without --all and --json")
    if arguments.all:
        sweeps = [store.sweep(name) for name in store.names()]
        _print([_counts(sweep) for sweep in sweeps], lambda console: _show_all(console, sweeps), arguments.json)
        return 0
    if arguments.watch is not None:
        return watch(store, arguments.sweep, arguments.watch)
    sweep = caught_up(store, lambda: _asked_for(store, arguments.sweep))
    here = CodeSnapshot().digest if any(map(_code, sweep.records)) else None
    document = {"sweep": sweep.name, "code_here": here, "trials": [_as_json(r) for r in sweep.records]}
    _print(document, lambda console: _show(console, sweep), arguments.json)
    others = sorted({code for record in sweep.records if (code := _code(record))} - {here})
    if others and not arguments.json:
        print(
            f"the code has changed since these jobs were submitted: diff -r {Path(arguments.dir, 'code', others[0], 'trainer')} "
            f"{CodeSnapshot().project / 'trainer'}"
        )
    return 0


def parser() -> VerbParser:
    made = VerbParser("trireme status", "Tells how the trials of a sweep, or the stages of a pipeline, stand.")
    made.add_argument("sweep", nargs="?", metavar="SWEEP|STAGE", help="name of a sweep, a pipeline or a stage (default: the newest sweep)")
    made.add_argument("--all", action="store_true", help="list all sweeps, the newest first, instead of one sweep's trials")
    made.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=EVERY_S,
        metavar="SECONDS",
        help="until all trials have ended: a live table, read anew every 2 seconds; without a terminal a line for each change",
    )
    made.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    made.add_argument("--dir", action=NamedOption, default="runs", help="folder of all trials and sweeps (default: %(default)s)")
    return made


def watch(store: Store, name: str | None, every_s: float) -> int:
    """Shows a sweep until all its trials have ended and no command is at work on it: on a terminal a live table, elsewhere a line for each
    change of a trial's state. 0 however they end."""
    from launcher.sweep.at_work import at_work
    from launcher.sweep.progress import Watching

    name = name or store.sweep(None).name  # a newer sweep does not take its place
    sweep = caught_up(store, lambda: _asked_for(store, name))
    watching = Watching(sweep.name, sweep.records)
    try:
        took = 0.0
        while at_work(store, name) or not all(record.status.final for record in sweep.records):
            time.sleep(max(every_s, _SHARE * took))
            began = time.process_time()
            sweep = caught_up(store, lambda: _asked_for(store, name))
            watching.update(sweep.records)
            took = time.process_time() - began
    finally:
        watching.close()
    return 0


def _asked_for(store: Store, name: str | None) -> Sweep:
    """A sweep or a pipeline; or one of a stage alone, where a stage is named."""
    from launcher.trials.store import Sweep

    record = store.stage(name) if name is not None and name not in store.names() else None
    return (
        store.sweep(name) if record is None else Sweep(f"{record.sweep}.{record.stage}", record.created or 0.0, record.launcher, [record])
    )


def _code(record: Record) -> str | None:
    """The snapshot that a trial's job runs; None where it runs whatever is there, or the code of an image."""
    code = (record.handle or {}).get("code")
    return None if code == "image" else code


def _print(document: Any, show: Callable[[Console], None], as_json: bool) -> None:
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        show(wide_console())


def _as_json(record: Record) -> dict[str, Any]:
    from launcher.trials.labels import elapsed_s, left_s, step, total_steps

    return {
        "trial": record.id,
        "stage": record.stage or None,
        "status": record.status.value,
        "reason": record.reason.value if record.reason else None,
        "detail": record.detail,
        "expected_start": record.expected if record.status is Status.SUBMITTED else None,
        "attempt": record.attempt,
        "step": step(record),
        "steps": total_steps(record),
        "elapsed_s": elapsed_s(record),
        "left_s": left_s(record),
        "layout": record.config.get("layout"),
        "overrides": list(record.overrides),
        "nodes": list(record.nodes),
        "code": _code(record),
        "dir": str(record.directory),
    }


def _show(console: Console, sweep: Sweep) -> None:
    from launcher.trials.labels import expected_start, heading, trial_labels

    names = trial_labels(sweep.records)
    trials = [record for record in sweep.records if record.status is not Status.PRUNED]
    of_stages = any(record.stage for record in sweep.records)
    console.print(f"pipeline {sweep.name}" if of_stages else f"sweep {heading(sweep.name, sweep.records)}", markup=False)
    if trials:
        console.print(fitted_table(_columns(trials, names), console.width, [_STYLES.get(record.status, "") for record in trials]))
    details = [(record, "; ".join(filter(None, [one_line(record.detail), expected_start([record])]))) for record in trials]
    said = [(f"{record.id}  {names[record.id]}", words) for record, words in details if words]
    print_list(console, "Details:", said)
    pruned = [record for record in sweep.records if record.status is Status.PRUNED]
    print_list(console, "Pruned, and not run:", [(names[record.id], one_line(record.detail)) for record in pruned])


def _columns(trials: Sequence[Record], names: dict[str, str]) -> list[Column]:
    from launcher.trials.labels import duration, elapsed_s, left_s, state, step, total_steps

    left = [left_s(record) for record in trials]
    steps = [(step(record) or 0, total_steps(record)) for record in trials]
    return [
        Column("trial", [record.id for record in trials], keep=1),
        Column("stage" if any(record.stage for record in trials) else "layout", [names[record.id] for record in trials], least=18),
        Column("status", [state(record) for record in trials], least=12),
        Column("attempt", [str(record.attempt) for record in trials], keep=3, right=True),
        Column("step", [f"{made}/{total}" if total else "-" for made, total in steps], right=True),
        Column("elapsed", [duration(elapsed_s(record)) for record in trials], keep=2, right=True),
        *([Column("left", [duration(seconds) for seconds in left], keep=1, right=True)] if any(each is not None for each in left) else []),
    ]


def _show_all(console: Console, sweeps: Sequence[Sweep]) -> None:
    counts = [_counts(sweep) for sweep in sweeps]
    made = [Column("sweep", [sweep.name for sweep in sweeps], least=18)]
    for status in Status:
        cells = [str(count[status.value] or "-") for count in counts]
        made.append(Column(status.value, cells, keep=0 if status in (Status.RUNNING, Status.DONE) else 1, right=True))
    console.print(fitted_table(made, console.width, [""] * len(sweeps)))


def _counts(sweep: Sweep) -> dict[str, Any]:
    counts = Counter(record.status for record in sweep.records)
    return {"sweep": sweep.name, **{status.value: counts[status] for status in Status}}
