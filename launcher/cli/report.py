"""``trireme report [SWEEP]``: one HTML page with everything that a sweep showed; ``--export``: copies of its
measurements for other programs."""

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
    from launcher.tracking.loggers import check_loggers, open_logger

    loggers = arguments.export.split(",") if arguments.export else []
    check_loggers(loggers, "--export")
    output = arguments.output or (None if loggers else "report.html")
    if output is not None:
        check_own(output, "--output", lambda text: "· Trireme</title>" in text)
    sweep = open_sweep(arguments)
    for name in loggers:
        logger = open_logger(name, Path(arguments.dir).absolute(), sweep.name)
        logger.update(sweep)
        print(logger.folder)
    if output is not None:
        write_named(output, render(sweep), "--output")
        print(Path(output).absolute())
    return 0


def parser() -> VerbParser:
    made = sweep_parser("report", "Writes a sweep's report: one HTML page that needs no network.")
    made.add_argument("-o", "--output", action=NamedOption, help="the page to write (default: report.html)")
    made.add_argument(
        "--export", action=NamedOption, metavar="LOGGER,...", help="not the page but copies of the sweep: csv, parquet, tensorboard, wandb"
    )
    return made
