"""``trireme rank [SWEEP]``: the trials of a sweep, fastest first."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from launcher import labels
from launcher.cli.arguments import open_sweep, sweep_parser
from launcher.cli.console import wide_console
from launcher.results.measurements import measure
from launcher.results.ranking import Measurement, leaders, rank
from launcher.sweep.store import Sweep

if TYPE_CHECKING:
    from rich.table import Table

DESCRIPTION = """\
Trials that ran to the end come first, by median step time after warm-up. "=" marks trials that the measurements cannot tell
from the best: the 95 % intervals of the medians overlap. Trials that failed, were stopped or pruned follow, with the reason.
"""


def main(argv: list[str]) -> int:
    """Print the ranking; 0 even if nothing was measured, since the table then says why."""
    parser = sweep_parser("rank", DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="a JSON list of records instead of a table")
    arguments = parser.parse_args(argv)
    sweep = open_sweep(arguments)
    ranked = rank(measure(sweep.records))
    if arguments.json:
        print(json.dumps([m.as_json() for m in ranked], indent=2, allow_nan=False))
    else:
        show(sweep, ranked)
    return 0


def show(sweep: Sweep, ranked: list[Measurement]) -> None:
    """The ranking as a table for people."""
    console = wide_console()
    console.print(table(sweep.name, ranked))
    tied = leaders(ranked)[1:]
    if tied:
        console.print(f"= {len(tied)} more cannot be told from the best by these measurements; more steps (run.steps) may", style="dim")


def table(title: str, ranked: list[Measurement]) -> Table:
    """Prediction and measurement side by side once anything was predicted; MFU where the device's peak is known."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    predicted = any(m.predicted_step_time_s for m in ranked)
    utilised = any(m.mfu for m in ranked)
    grid = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "trial", "layout"):
        grid.add_column(name, no_wrap=True)
    names = ["step time", "spread", *(["predicted", "error"] if predicted else []), "tokens/s", "memory", *(["MFU"] if utilised else [])]
    for name in names:
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("outcome", overflow="fold")
    for m in ranked:
        cells = _cells(m, predicted, utilised)
        grid.add_row(*(Text(cell) for cell in cells), style="bold green" if m.place == 1 else "" if m.place else "dim")
    return grid


def _cells(m: Measurement, predicted: bool, utilised: bool) -> list[str]:
    error = labels.error_of(m.predicted_step_time_s, m.step_time_s)
    foreseen = [labels.seconds(m.predicted_step_time_s), labels.percent(error, signed=True)]
    return [
        f"{m.place or ''}{'=' if m.tied_with_best else ''}",
        m.trial,
        labels.layout_label(m.layout) if m.layout else " ".join(m.overrides),
        labels.seconds(m.step_time_s),
        labels.spread(m.step_time_spread_s, m.step_time_s),
        *(foreseen if predicted else []),
        labels.amount(m.tokens_per_s),
        labels.memory(m.peak_memory_bytes),
        *([labels.percent(m.mfu)] if utilised else []),
        outcome(m),
    ]


def outcome(m: Measurement) -> str:
    """``done``, ``failed: out of memory (what the trainer said)``: the first line of the detail only."""
    if m.place:
        return m.status.value
    reason = f": {m.reason.value}" if m.reason else ": no step time was measured" if m.status.value == "done" else ""
    detail = next(iter(m.detail.splitlines()), "")
    return f"{m.status.value}{reason}" + (f" ({detail})" if detail else "")
