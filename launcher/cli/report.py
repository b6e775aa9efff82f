"""``trireme report [SWEEP]``: one HTML page with everything that a sweep showed."""

from __future__ import annotations

from pathlib import Path

from launcher.cli.arguments import open_sweep, sweep_parser
from trainer.config import ConfigError


def main(argv: list[str]) -> int:
    """Write the page and print where it is."""
    parser = sweep_parser("report", "Write a sweep's report: one HTML page that needs no network.")
    parser.add_argument("-o", "--output", default="report.html", help="the page to write (default: %(default)s)")
    arguments = parser.parse_args(argv)
    sweep = open_sweep(arguments)

    from launcher.results.report import write_report

    path = Path(arguments.output).absolute()
    try:
        write_report(sweep, path)
    except OSError as error:
        raise ConfigError(f"-o {arguments.output} cannot be written: {error.strerror}; give a file in a folder that can be") from None
    print(path)
    return 0
