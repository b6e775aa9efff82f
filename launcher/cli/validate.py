"""``trireme validate CSV``: the cost model against a table of measured runs, the reader's own or published ones."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.console import wide_console
from launcher.cli.overrides import NamedOption, add_overrides, key_of
from launcher.cli.repeats import warn
from launcher.cost.thresholds import FITS
from launcher.labels import percent, plural, shown
from launcher.named_files import check_file, check_own, write_named
from trainer.shared.run.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from launcher.config.trainer import TrainerProfile
    from launcher.tables.validation import Judged, Summary

DESCRIPTION = """\
Predicts every row of a table of measured training runs and prints, per source, how far off step time and peak memory are, how well the
layouts of a sweep are ranked, how many measured times lie in the 80 % interval of the predicted ones, and whether shortages of memory are
foreseen. Rows that say too little are counted with the reason.

The table has canonical columns, every cell explicit, "unknown" where a source does not say; 'trireme validate --columns' lists them all.
'trireme rank --csv FILE' writes the trials of a sweep in that form; 'python -m benchmarks.published RAW.csv FILE' turns tables as they were
published into it, with a column that lists every assumption. Tables of inference (latency, time per token) are told by their columns.
trainer=NAME predicts all rows as if measured with that trainer.

example:
  trireme validate measured.csv --out predictions.csv
"""


def main(argv: list[str]) -> int:
    """0 when at least one row could be predicted, 1 when none."""
    arguments = parser().parse_intermixed_args(argv)
    if arguments.columns:
        return print_columns()
    if arguments.table is None:
        raise ConfigError("which table? give a CSV file of measured runs; 'trireme validate --columns' lists what it holds")
    from launcher.config.hardware import hardware_files
    from launcher.tables.canonical import read
    from launcher.tables.inference import is_inference
    from launcher.tables.repeats import of_rows
    from launcher.tables.validation import by_source, check_units, judge, summary, unanswered

    out = arguments.out
    if out is not None and check_file(out, "--out") == Path(arguments.table).resolve():
        raise ConfigError(f"--out={out} is the table itself, whose measurements would be lost; name another file")
    if out is not None:
        check_own(out, "--out", wrote)
    if is_inference(arguments.table):
        return inference(arguments)
    table = read(arguments.table)
    if not table:
        raise ConfigError(f"{arguments.table} has a line of column names and no row; add the runs that were measured")
    judged = judge(table, hardware_files(), trainer=trainer_of(arguments))
    check_units(judged)
    warn(of_rows(each.case for each in judged if each.case is not None), "each counts by itself; leave out the one that is wrong")
    if out is not None:
        write(judged, out)
    sources, everything = by_source(judged), summary(judged)
    selections = {name: summary([j for j in judged if chosen(j)]) for name, chosen in SELECTIONS.items()}
    if arguments.json:
        figures = {name: document(each) for name, each in {"all": everything, **selections}.items()}
        sources_ = {source: document(each) for source, each in sources.items()}
        print(json.dumps({**figures, "sources": sources_, "not predicted": unanswered(judged)}, indent=2, allow_nan=False))
    else:
        show({**sources, "all": everything, **selections}, arguments.sweeps)
        covered = [each.coverage for each in sources.values() if each.coverage is not None]
        if covered:
            print(
                f"inside of the 80 % interval: {percent(everything.coverage)} of rows, {percent(sum(covered) / len(covered))} "
                f"with each source counted once"
            )
        for reason, count in unanswered(judged).most_common():
            print(shown(f"{plural(count, 'row')} not predicted: {reason}"))
    return 0 if everything.predicted else 1


def inference(arguments: argparse.Namespace) -> int:
    """The same for a table of inference."""
    from launcher.cli.validate_inference import validate

    if arguments.overrides or arguments.sweeps:
        given = arguments.overrides[0] if arguments.overrides else "--sweeps"
        raise ConfigError(f"{given} has no meaning for a table of inference, whose rows name their engine; leave it out")
    return validate(arguments.table, arguments.out, arguments.json)


def print_columns() -> int:
    """What a table holds."""
    from launcher.tables.canonical import COLUMNS
    from launcher.tables.inference import COLUMNS as REQUESTS

    for title, columns in (("training:", COLUMNS), ("\ninference:", REQUESTS)):
        print(title)
        for column in columns.values():
            print(f"{column.name:22}{column.allowed}: {column.doc}")
    return 0


SELECTIONS: dict[str, Callable[[Judged], bool]] = {
    "dense rows with full configuration": lambda judged: judged.whole,
}
"""Groups of rows that have a line of their own."""


def trainer_of(arguments: argparse.Namespace) -> TrainerProfile | None:
    """The profile that replaces those of all rows, where ``trainer=NAME`` is given."""
    from launcher.config import compose

    if strange := [word for word in arguments.overrides if key_of(word).split(".")[0] != "trainer"]:
        raise ConfigError(f"{strange[0]} changes nothing in a table of measured runs; only trainer=NAME does, and keys of trainer")
    return compose(arguments.overrides, arguments.config_dir).trainer if arguments.overrides else None


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("trireme validate", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("table", nargs="?", metavar="CSV", help="table of measured runs")
    add_overrides(made, "trainer=NAME: predict all rows with this profile, instead of each with its own")
    made.add_argument("--columns", action="store_true", help="list the columns of a table, and stop")
    made.add_argument(
        "--out", action=NamedOption, metavar="CSV", help="write each row's prediction: row (from 1), step_time_s, peak_mem_gb, oom, reason"
    )
    made.add_argument("--sweeps", action="store_true", help="one line for each sweep too")
    made.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return made


def wrote(text: str) -> bool:
    """Whether a file that begins like this holds predictions, of either kind of table."""
    from launcher.cli.validate_inference import OUT as REQUESTS

    return text.splitlines()[0] in (",".join(OUT), ",".join(REQUESTS))


def write(judged: Sequence[Judged], path: str) -> None:
    """One line per row of the table, predicted or with the reason why not."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(OUT)
    lines.writerows((j.row.number, *_cells(j), j.reason) for j in judged)
    write_named(path, text.getvalue(), "--out")
    print(f"wrote {len(judged)} rows to {path}", file=sys.stderr)


def _cells(judged: Judged) -> tuple[str, str, str]:
    predicted = judged.prediction
    if predicted is None:
        return "", "", ""
    return f"{predicted.step_time_s:.6g}", f"{predicted.reported_bytes / 1e9:.6g}", "yes" if predicted.fits < FITS else "no"


def document(each: Summary) -> dict[str, Any]:
    """A summary as plain data."""
    found = dataclasses.asdict(each)
    if each.verdicts:
        found["verdicts"] |= {name: getattr(each.verdicts, name) for name in ("precision", "recall", "f1")}
    return found | {"correlation": each.correlation, "regret": each.regret}


def show(summaries: dict[str, Summary], with_sweeps: bool) -> None:
    """The tables for people."""
    console = wide_console()
    console.print(_table("step time", summaries, TIME, _times))
    console.print(_table("memory", summaries, MEMORY, _memory))
    if with_sweeps:
        console.print(_sweeps(summaries["all"]))


OUT = ("row", "step_time_s", "peak_mem_gb", "oom", "reason")
TIME = ("rows", "asked", "timed", "median error", "p90", "bias", "in 80 %", "sweeps", "rank corr.", "regret")
MEMORY = ("told", "out", "precision", "recall", "F1", "AUC by bytes", "AUC by share", "peaks", "median error")


def _times(each: Summary) -> list[str] | None:
    cells = [str(each.rows), str(each.predicted)]
    time = each.time
    cells += [str(time.count), _percent(time.median), _percent(time.p90), f"{time.bias:.2f}", _percent(each.coverage)] if time else [""] * 5
    return cells + ([str(len(each.sweeps)), _number(each.correlation), _percent(each.regret)] if each.sweeps else [""] * 3)


def _memory(each: Summary) -> list[str] | None:
    flags, memory = each.verdicts, each.memory
    if not flags and not memory:
        return None
    cells = [str(flags.count), str(flags.short)] if flags else [""] * 2
    short = flags is not None and flags.short > 0
    ratios = (
        [_percent(flags.precision), _percent(flags.recall), *map(_number, (flags.f1, flags.auc, flags.auc_of_shares))]
        if flags and short
        else [""] * 5
    )
    return cells + ratios + ([str(memory.count), _percent(memory.median)] if memory else [""] * 2)


def _table(title: str, summaries: dict[str, Summary], heads: Sequence[str], cells: Callable[[Summary], list[str] | None]) -> Table:
    """One line for each source that has something to say, then the selections. In a narrow terminal the names of sources wrap, figures
    never do."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    made.add_column("source", max_width=48, overflow="fold")
    for head in heads:
        made.add_column(head.replace(" ", "\n"), justify="right", no_wrap=True)
    short = Counter(name.split(" (")[0] for name in summaries)
    for name, each in summaries.items():
        if name == "all":
            made.add_section()
        if (line := cells(each)) is not None:
            brief = name.split(" (")[0]
            made.add_row(brief if short[brief] == 1 else name, *line)
    return made


def _sweeps(everything: Summary) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(title="sweeps", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    made.add_column("sweep", overflow="fold")
    for head in ("rows", "rank corr.", "regret", "median error", "bias"):
        made.add_column(head.replace(" ", "\n"), justify="right", no_wrap=True)
    for sweep in everything.sweeps:
        errors = sweep.errors
        made.add_row(
            sweep.name, str(sweep.count), _number(sweep.correlation), _percent(sweep.regret), _percent(errors.median), f"{errors.bias:.2f}"
        )
    return made


def _percent(value: float | None) -> str:
    return "" if value is None else percent(value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
