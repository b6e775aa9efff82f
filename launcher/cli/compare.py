"""``trireme compare A B``: two sweeps, trial by trial: step times as ratios, losses as differences, and changes of the configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.arguments import caught_up
from launcher.cli.console import Column, fitted_table, print_list, wide_console
from launcher.cli.overrides import NamedOption
from launcher.cli.parser import VerbParser
from launcher.labels import one_line, seconds

if TYPE_CHECKING:
    from launcher.results.comparison import MatchedTrial, SweepComparison
    from launcher.trials.store import Sweep


DESCRIPTION = """\
Compares two sweeps: before and after a change of the code, one cluster and another, one precision and another. Trials match that
have the same values of all keys that vary inside the sweeps. B/A is the ratio of their median step times, below 1 where B is
faster, with the interval that holds it with 95 % by the scatter of the measured steps; losses are compared by their difference
after the last step. Below stands what differs between the configurations, the code and the versions.

examples:
  trireme compare sweep-1f2e3d4c sweep-5a6b7c8d
  trireme compare before/runs/nightly runs/nightly
"""
SHOWN = 40
"""Characters of a value that are shown."""


def main(argv: list[str]) -> int:
    """0 when trials could be compared, 1 when none match."""
    arguments = parser().parse_args(argv)
    from launcher.results.comparison import compare
    from launcher.results.measurements import measure
    from launcher.trials.labels import trial_labels

    sweeps = [opened(name, arguments.dir) for name in (arguments.first, arguments.second)]
    both = [[*zip(s.records, measure(s.records), (r.read_result() or {} for r in s.records), strict=True)] for s in sweeps]
    labels = trial_labels(sweeps[1].records) | trial_labels(sweeps[0].records)
    found = compare(both[0], both[1], labels)
    if arguments.json:
        print(json.dumps(document(sweeps, found), indent=2, allow_nan=False))
    else:
        show(sweeps, found)
    return 0 if found.matched else 1


def parser() -> VerbParser:
    made = VerbParser("trireme compare", DESCRIPTION)
    for name, metavar in (("first", "A"), ("second", "B")):
        made.add_argument(name, metavar=metavar, help="name of a sweep, or FOLDER/NAME of one in another folder of trials")
    made.add_argument("--dir", action=NamedOption, default="runs", help="folder of all trials and sweeps (default: %(default)s)")
    made.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    return made


def opened(name: str, folder: str) -> Sweep:
    """Returns the sweep ``NAME`` of ``folder``, or ``FOLDER/NAME``."""
    from launcher.trials.store import Store

    path = Path(name)
    store = Store(path.parent if len(path.parts) > 1 else folder)
    return caught_up(store, lambda: store.sweep(path.name))


def document(sweeps: Sequence[Sweep], found: SweepComparison) -> dict[str, Any]:
    """Returns the comparison as plain data."""

    def entry(each: MatchedTrial) -> dict[str, Any]:
        return {
            "label": each.label, "trials": [each.first.trial, each.second.trial],
            "step_time_s": [each.first.step_time_s, each.second.step_time_s],
            "ratio": each.ratio, "interval": list(each.interval), "loss_difference": each.loss_difference,
            "layout": dict(each.first.layout),
        }  # fmt: skip

    return {
        "sweeps": [sweep.name for sweep in sweeps],
        "matched": [entry(each) for each in found.matched],
        "overall": found.overall and dict(zip(("ratio", "low", "high"), found.overall)),
        "changed": {key: list(values) for key, values in found.changed.items()},
        "only": [list(found.only_first), list(found.only_second)],
    }


def show(sweeps: Sequence[Sweep], found: SweepComparison) -> None:
    """The comparison for people."""
    console, rows = wide_console(), found.matched
    console.print(f"A {sweeps[0].name}    B {sweeps[1].name}")
    if rows:
        columns = [
            Column("layout", [each.label for each in rows], least=18),
            Column("A", [seconds(each.first.step_time_s) for each in rows], right=True),
            Column("B", [seconds(each.second.step_time_s) for each in rows], right=True),
            Column("B/A", [f"{each.ratio:.3f}" for each in rows], right=True),
            Column("95 %", ["{:.3f}-{:.3f}".format(*each.interval) for each in rows], keep=1, right=True),
            Column("loss", ["-" if (d := each.loss_difference) is None else f"{d:+.2g}" for each in rows], keep=2, right=True),
        ]
        console.print(fitted_table(columns, console.width, [style(each) for each in rows]))
    console.print(verdict(found))
    changes = [(key, f"{one_line(a, SHOWN)} -> {one_line(b, SHOWN)}") for key, (a, b) in found.changed.items()]
    print_list(console, "Changed from A to B:", changes)
    for which, labels in (("A", found.only_first), ("B", found.only_second)):
        print_list(console, f"Only in {which}, or not measured in both:", [(label, "") for label in labels])


def style(each: MatchedTrial) -> str:
    low, high = each.interval
    return "green" if high < 1 else "red" if low > 1 else ""


def verdict(found: SweepComparison) -> str:
    """One sentence on all matched trials."""
    if found.overall is None:
        return "no trial of one matches a measured one of the other: they differ in keys that vary inside the sweeps"
    ratio, low, high = found.overall
    faster = f"B takes {ratio:.3f} of A's time ({low:.3f}-{high:.3f} with 95 %)"
    undecided = "" if high < 1 or low > 1 else "; these steps do not tell which is faster, more of them (run.steps) may"
    return f"{len(found.matched)} matched: {faster}{undecided}"
