"""``trireme validate CSV``: the cost model against a table of measured runs, the reader's own or published ones."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.console import emit
from launcher.cli.overrides import NamedOption, add_overrides, key_of
from launcher.cli.parser import VerbParser
from launcher.cli.repeats import warn
from launcher.named_files import check_file, check_own, write_named
from trainer.shared.run.errors import ConfigError

if TYPE_CHECKING:
    from launcher.config.trainer import TrainerProfile
    from launcher.goals.goal import Goal


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
    from launcher.goals.goal import goal_of
    from launcher.tables.inference import is_inference

    if arguments.columns:
        return print_columns()
    if arguments.table is None:
        raise ConfigError("which table? give a CSV file of measured runs; 'trireme validate --columns' lists what it holds")

    out = arguments.out
    if out is not None and check_file(out, "--out") == Path(arguments.table).resolve():
        raise ConfigError(f"--out={out} is the table itself, whose measurements would be lost; name another file")
    if out is not None:
        check_own(out, "--out", wrote)
    goal = goal_of("inference" if is_inference(arguments.table) else "train")
    check_options(goal, arguments)
    table = goal.table(arguments.table, trainer_of(arguments), arguments.sweeps)
    if not table.lines:
        raise ConfigError(f"{arguments.table} has a line of column names and no row; add the {goal.measured} that were measured")
    warn(table.repeats, "each counts by itself; leave out the one that is wrong")
    if out is not None:
        write(goal, table.lines, out)
    emit(table.answer, arguments.json)
    return 0 if table.predicted else 1


def check_options(goal: Goal, arguments: argparse.Namespace) -> None:
    """Raises ``ConfigError`` for options that change nothing in a table that says all itself."""
    if goal.fixed and (arguments.overrides or arguments.sweeps):
        given = arguments.overrides[0] if arguments.overrides else "--sweeps"
        raise ConfigError(f"{given} has no meaning for {goal.fixed}; leave it out")


def print_columns() -> int:
    """Returns a table's document and text."""
    from launcher.tables.canonical import COLUMNS
    from launcher.tables.inference import COLUMNS as REQUESTS

    for title, columns in (("training:", COLUMNS), ("\ninference:", REQUESTS)):
        print(title)
        for column in columns.values():
            print(f"{column.name:22}{column.allowed}: {column.doc}")
    return 0


def trainer_of(arguments: argparse.Namespace) -> TrainerProfile | None:
    """The profile that replaces those of all rows, where ``trainer=NAME`` is given."""
    from launcher.config import compose

    if strange := [word for word in arguments.overrides if key_of(word).split(".")[0] != "trainer"]:
        raise ConfigError(f"{strange[0]} changes nothing in a table of measured runs; only trainer=NAME does, and keys of trainer")
    return compose(arguments.overrides, arguments.config_dir).trainer if arguments.overrides else None


def parser() -> VerbParser:
    made = VerbParser("trireme validate", DESCRIPTION)
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
    """Returns whether a file's first lines hold predictions, of any kind of table."""
    from launcher.goals.goal import FOLDERS, goal_of

    return text.splitlines()[0] in {",".join(goal_of(*each).columns) for each in FOLDERS}


def write(goal: Goal, rows: Sequence[Sequence[Any]], path: str) -> None:
    """Writes one line per row of the table, predicted or with the reason why not."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(goal.columns)
    lines.writerows(rows)
    write_named(path, text.getvalue(), "--out")
    print(f"wrote {len(rows)} rows to {path}", file=sys.stderr)
