"""``trireme rank [SWEEP]``: the trials of a sweep, fastest first."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launcher.cli.arguments import open_sweep, sweep_parser
from launcher.cli.console import Column, fitted_table, print_list, wide_console
from launcher.cli.overrides import NamedOption
from launcher.cli.parser import VerbParser
from launcher.cli.repeats import warn, words
from launcher.named_files import check_own
from trainer.shared.records.outcome import Reason, Status
from trainer.shared.run.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from launcher.results.ranking import Measurement
    from launcher.tables.repeats import Repeat
    from launcher.trials.store import Record, Sweep


DESCRIPTION = """\
Trials that ran to the end come first, by median step time after warm-up. "=" marks trials that the measurements cannot tell
from the best: the intervals of their medians overlap. An interval lies between two of the measured steps that enclose the median
with 83 % confidence (order statistics), so that two that do not overlap differ at the 95 % level; of three steps or fewer it is
their range. Next to a predicted step time stands
the interval in which 80 % of such predictions lie. Trials that failed, were stopped or are under way follow; why, and what was pruned,
stands below the table. A terminal that is too narrow for all columns shows the most important ones; --json has everything.
"""


USE = "each has its own place; measure the layout again (sweep.rerun=true)"


def main(argv: list[str]) -> int:
    """Prints the ranking; 0 even if nothing was measured, since the table then says why."""
    arguments = parser().parse_args(argv)
    from launcher.results.measurements import measure
    from launcher.results.ranking import rank
    from launcher.tables.canonical import write

    if arguments.csv is not None:
        check_own(arguments.csv, "--csv", wrote_csv)
    sweep = open_sweep(arguments)
    ranked = rank(measure(sweep.records))
    contradictory = repeated(sweep, ranked)
    if arguments.csv is not None:
        write(arguments.csv, rows := table_rows(sweep, ranked))
        print(f"wrote {len(rows)} rows to {arguments.csv}", file=sys.stderr)
    if arguments.json:
        warn(contradictory, USE)
        print(json.dumps([m.as_json() for m in ranked], indent=2, allow_nan=False))
    else:
        show(console := wide_console(), sweep, ranked)
        if contradictory:
            console.print(words(contradictory, USE), style="dim")
    return 0


def parser() -> VerbParser:
    made = sweep_parser("rank", DESCRIPTION)
    made.add_argument("--json", action="store_true", help="a JSON list of records instead of a table")
    made.add_argument(
        "--csv",
        action=NamedOption,
        metavar="FILE",
        help="also write the trials as a table that 'trireme validate' and 'search --replay' read",
    )
    return made


def repeated(sweep: Sweep, ranked: Sequence[Measurement]) -> list[list[Repeat]]:
    """Trials of a sweep that differ in nothing which changes a step time, and contradict each other."""
    from launcher.tables.repeats import contradictions

    configs = {record.id: _timed(record) for record in sweep.records}
    return contradictions((configs[m.trial], m.trial, m.step_time_s) for m in ranked if m.place and m.step_time_s)


def _timed(record: Record) -> str:
    """Returns everything on which a trial's step time depends."""
    run = {key: value for key, value in record.config.get("run", {}).items() if key not in ("seed", "steps", "warmup_steps")}
    return json.dumps([record.config | {"run": run, "tracking": None}, record.cluster, record.reads], sort_keys=True, default=str)


def wrote_csv(text: str) -> bool:
    """Returns whether a file's first lines hold trials: canonical columns, and this project's trainer in the first row."""
    from launcher.config.trainers import OWN
    from launcher.tables.canonical import COLUMNS

    rows = csv.DictReader(text.splitlines())
    return list(rows.fieldnames or ()) == list(COLUMNS) and next(rows, {}).get("trainer", OWN) == OWN


def table_rows(sweep: Sweep, ranked: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Each trial that was measured or ran out of memory as cells of a canonical table."""
    from launcher import labels
    from launcher.config.hardware import hardware_files
    from launcher.tables.own import own_row
    from launcher.trials.store import recorded_cluster, recorded_run

    hardware, records, rows = hardware_files(), {record.id: record for record in sweep.records}, []
    for m in ranked:
        short = m.reason is Reason.OUT_OF_MEMORY
        if m.place is None and not short:
            continue
        peak = None if m.peak_memory_bytes is None else m.peak_memory_bytes / 1e9
        measured = {"step_time_s": None if short else m.step_time_s, "peak_memory_gb": peak, "oom": short}
        try:
            config, cluster = recorded_run(records[m.trial]), recorded_cluster(records[m.trial])
            rows.append(own_row(sweep.name, config, cluster, hardware, measured))
        except ConfigError as error:  # a configuration that this version would refuse
            print(f"trial {m.trial} is left out: {labels.shown(error)}", file=sys.stderr)
    return rows


def show(console: Console, sweep: Sweep, ranked: Sequence[Measurement]) -> None:
    """The ranking for people: a table of the trials, and a list of those that have no place, with the reason."""
    from launcher import labels
    from launcher.results.ranking import leaders
    from launcher.trials.labels import heading, trial_labels

    names = trial_labels(sweep.records)
    trials = [m for m in ranked if m.status is not Status.PRUNED]
    console.print(heading(sweep.name, sweep.records), markup=False)
    if trials:
        styles = ["bold green" if m.place == 1 else "" if m.place else "dim" for m in trials]
        console.print(fitted_table(columns(trials, names), console.width, styles))
    console.print(labels.spent([(m.gpu_hours, m.price) for m in trials]), style="dim")
    tied = leaders(ranked)[1:]
    if tied:
        console.print(f"= {len(tied)} more cannot be told from the best by these measurements; more steps (run.steps) may", style="dim")
    print_list(
        console,
        "Does not train the same model as the others, and cannot win:",
        [
            (f"{m.trial}  {names[m.trial]}", f"losses of the first steps differ by {labels.percent(m.loss_gap)}")
            for m in ranked
            if m.other_model
        ],
    )
    print_list(
        console,
        "Measured, with a remark:",
        [(f"{m.trial}  {names[m.trial]}", first_line(m.detail)) for m in trials if m.place and m.detail and m.reason is None],
    )
    print_list(
        console,
        "GPUs with a fault, which makes a trial slower than its layout:",
        [(f"{m.trial}  {names[m.trial]}", fault) for m in trials for fault in map(first_line, m.gpu_faults)],
    )
    unplaced = [m for m in trials if not m.place and m.detail]
    print_list(
        console, "Not measured to the end:", [(f"{m.trial}  {names[m.trial]}", f"{outcome(m)}: {first_line(m.detail)}") for m in unplaced]
    )
    print_list(console, "Pruned, and not run:", [(names[m.trial], first_line(m.detail)) for m in ranked if m.status is Status.PRUNED])


def columns(trials: Sequence[Measurement], names: dict[str, str]) -> list[Column]:
    """Prediction and measurement side by side once anything was predicted; MFU where the device's peak is known."""
    from launcher import labels

    errors = [labels.error_of(m.predicted_step_time_s, m.step_time_s) for m in trials]
    made = [
        Column("", [f"{m.place or ''}{'=' if m.tied_with_best else ''}" for m in trials]),
        Column("trial", [m.trial for m in trials], keep=2),
        Column("layout", [names[m.trial] for m in trials], least=18),
        Column("step time", [labels.seconds(m.step_time_s) for m in trials], right=True),
        Column("spread", [labels.spread(m.step_time_spread_s, m.step_time_s) for m in trials], keep=1, right=True),
        Column("predicted", [labels.seconds(m.predicted_step_time_s) for m in trials], keep=3, right=True),
        Column("80 %", [labels.interval(m.predicted_interval_s) for m in trials], keep=5, right=True),
        Column("error", [labels.percent(error, signed=True) for error in errors], keep=4, right=True),
        Column("tokens/s", [labels.amount(m.tokens_per_s) for m in trials], keep=5, right=True),
        Column("memory", [labels.memory(m.peak_memory_bytes) for m in trials], keep=5, right=True),
        Column("MFU", [labels.percent(m.mfu) for m in trials], keep=5, right=True),
        Column("J/step", [labels.amount(m.energy_per_step_j) for m in trials], keep=6, right=True),
        *cost_columns(trials),
        Column("outcome", [outcome(m) for m in trials], keep=1),
    ]
    known = {"predicted": any(m.predicted_step_time_s for m in trials), "MFU": any(m.mfu for m in trials)}
    known["J/step"] = any(m.energy_per_step_j for m in trials)
    known["error"] = known["predicted"]
    known["80 %"] = any(m.predicted_interval_s for m in trials)
    return [column for column in made if known.get(column.name, True)]


def cost_columns(trials: Sequence[Measurement]) -> list[Column]:
    """Costs of 1e9 tokens and of each trial: in money where GPU-hours have a price."""
    from launcher import labels

    if any(m.price for m in trials):
        return [
            Column("1e9 tokens", [labels.money(m.price_per_billion_tokens) for m in trials], keep=4, right=True),
            Column("cost", [labels.money(m.price) for m in trials], keep=5, right=True),
        ]
    return [
        Column("GPU-h/1e9 tokens", [labels.amount(m.gpu_hours_per_billion_tokens) for m in trials], keep=6, right=True),
        Column("GPU-hours", [labels.amount(m.gpu_hours) for m in trials], keep=6, right=True),
    ]


def outcome(m: Measurement) -> str:
    """``done``, ``failed: out of memory``."""
    if m.place:
        return m.status.value + (", other losses" if m.other_model else "")
    return m.status.value + (f": {m.reason.value}" if m.reason else ": no step time" if m.status is Status.DONE else "")


def first_line(detail: str) -> str:
    """Returns the first line of a trial's message: the rest is in its logs."""
    from launcher import labels

    return labels.one_line(next(iter(detail.splitlines()), ""))
