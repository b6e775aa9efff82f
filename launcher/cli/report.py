"""``trireme report [SWEEP]``: one HTML page with everything that a sweep showed."""

from __future__ import annotations

import argparse
from pathlib import Path

from launcher.sweep.store import Store
from trainer.config import ConfigError

HELP = "write a sweep's HTML report"


def main(argv: list[str]) -> int:
    """Write the page and print where it is."""
    parser = argparse.ArgumentParser("trireme report", description="Write a sweep's report: one HTML page that needs no network.")
    parser.add_argument("sweep", nargs="?", metavar="SWEEP", help="name of the sweep (default: the newest)")
    parser.add_argument("-o", "--output", default="report.html", help="the page to write (default: %(default)s)")
    parser.add_argument("--dir", default="runs", help="folder of all trials and sweeps (default: %(default)s)")
    arguments = parser.parse_args(argv)
    sweep = Store(arguments.dir).sweep(arguments.sweep)

    from launcher.results.report import write_report

    path = Path(arguments.output).absolute()
    try:
        write_report(sweep, path)
    except OSError as error:
        raise ConfigError(f"-o {arguments.output} cannot be written: {error.strerror}; give a file in a folder that can be") from None
    print(path)
    return 0
