"""``trireme report [SWEEP]``: one HTML page with everything that a sweep showed."""

from __future__ import annotations

from pathlib import Path

from launcher.cli.arguments import open_sweep, sweep_parser
from launcher.cli.overrides import NamedOption
from launcher.cli.parser import VerbParser
from launcher.named_files import check_own, write_named


def main(argv: list[str]) -> int:
    """Writes the page and prints its path."""
    arguments = parser().parse_args(argv)
    from launcher.results.report import render

    check_own(arguments.output, "--output", lambda text: "· Trireme</title>" in text)
    sweep = open_sweep(arguments)

    write_named(arguments.output, render(sweep), "--output")
    print(Path(arguments.output).absolute())
    return 0


def parser() -> VerbParser:
    made = sweep_parser("report", "Writes a sweep's report: one HTML page that needs no network.")
    made.add_argument("-o", "--output", action=NamedOption, default="report.html", help="the page to write (default: %(default)s)")
    return made
