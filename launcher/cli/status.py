"""``trireme status [SWEEP]``: how a sweep's trials stand, asked of their queue where no launcher is following them."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.backends.base import BackendError
from launcher.backends.pool import Backends
from launcher.backends.snapshot import Snapshot
from launcher.config.compose import project_dir
from launcher.labels import layout_label
from launcher.sweep.attend import catch_up
from launcher.sweep.labels import duration, elapsed_s, state, step, total_steps
from launcher.sweep.store import Record, Store, Sweep
from trainer.config import Status

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {Status.DONE: "green", Status.RUNNING: "bold", Status.FAILED: "red", Status.STOPPED: "yellow", Status.PRUNED: "dim"}


def main(argv: list[str]) -> int:
    """Print the table; 0 however the trials stand."""
    parser = argparse.ArgumentParser("trireme status", description="How the trials of a sweep stand.")
    parser.add_argument("sweep", nargs="?", metavar="SWEEP", help="name of the sweep (default: the newest)")
    parser.add_argument("--all", action="store_true", help="list all sweeps, the newest first, instead of one sweep's trials")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--dir", default="runs", help="folder of all trials and sweeps (default: %(default)s)")
    arguments = parser.parse_args(argv)
    store = Store(arguments.dir)
    if arguments.all:
        sweeps = [store.sweep(name) for name in store.names()]
        _print([_counts(sweep) for sweep in sweeps], _all_table(sweeps), arguments.json)
        return 0
    sweep = store.sweep(arguments.sweep)
    try:
        with Backends() as backends:
            catch_up(store, sweep.records, backends)
    except (BackendError, PermissionError) as error:
        print(f"as last recorded, since the queue cannot be asked: {error}", file=sys.stderr)
    here = _code_here(sweep)
    _print({"sweep": sweep.name, "code_here": here, "trials": [_as_json(r) for r in sweep.records]}, _table(sweep), arguments.json)
    others = sorted({code for record in sweep.records if (code := _code(record))} - {here})
    if others and not arguments.json:
        print(f"the code has changed since these jobs were submitted: diff -r {Path(arguments.dir, 'code', others[0])} {project_dir()}")
    return 0


def _code(record: Record) -> str | None:
    """The snapshot that a trial's job runs; None where it runs whatever is there, or the code of an image."""
    code = (record.handle or {}).get("code")
    return None if code == "image" else code


def _code_here(sweep: Sweep) -> str | None:
    """What a snapshot of the launcher's code would be called now; None where no trial runs one."""
    return Snapshot().digest if any(map(_code, sweep.records)) else None


def _print(document: Any, table: Table, as_json: bool) -> None:
    from rich.console import Console

    if as_json:
        print(json.dumps(document, indent=2))
        return
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 160)  # a pipe or file has no width to fit into
    console.print(table)


def _as_json(record: Record) -> dict[str, Any]:
    return {
        "trial": record.id,
        "status": record.status.value,
        "reason": record.reason.value if record.reason else None,
        "detail": record.detail,
        "attempt": record.attempt,
        "step": step(record),
        "steps": total_steps(record),
        "elapsed_s": elapsed_s(record),
        "layout": record.config.get("layout"),
        "overrides": list(record.overrides),
        "nodes": list(record.nodes),
        "code": _code(record),
        "dir": str(record.directory),
    }


def _table(sweep: Sweep) -> Table:
    grid = _grid(f"sweep {sweep.name}", "trial", "layout", "status", "attempt", "step", "elapsed", "detail")
    for record in sweep.records:
        steps = total_steps(record)
        cells = (
            record.id,
            layout_label(record.config["layout"]) if record.config else " ".join(record.overrides),
            state(record),
            str(record.attempt),
            f"{step(record) or 0}/{steps}" if steps else "-",
            duration(elapsed_s(record)),
            next(iter(record.detail.splitlines()), ""),
        )
        _row(grid, cells, _STYLES.get(record.status, ""))
    return grid


def _all_table(sweeps: list[Sweep]) -> Table:
    grid = _grid(None, "sweep", *(status.value for status in Status))
    for sweep in sweeps:
        _row(grid, [str(value or "-") for value in _counts(sweep).values()])
    return grid


def _counts(sweep: Sweep) -> dict[str, Any]:
    counts = Counter(record.status for record in sweep.records)
    return {"sweep": sweep.name, **{status.value: counts[status] for status in Status}}


def _grid(title: str | None, *names: str) -> Table:
    from rich import box
    from rich.table import Table

    grid = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        grid.add_column(name, no_wrap=name not in ("layout", "detail"), overflow="fold")
    return grid


def _row(grid: Table, cells: Any, style: str = "") -> None:
    from rich.text import Text

    grid.add_row(*(Text(cell) for cell in cells), style=style)
