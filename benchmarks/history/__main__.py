"""Take the cost model's figures, keep them, and write them into the documentation.

    python -m benchmarks.history [--leave-out] [RAW.csv ...]

Predicts the published tables of benchmarks/published/data, and those that are given, in the form in which they were published. Writes
benchmarks/history/DATE.json (commit, tables with their hash, figures) and the tables of docs/figures.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.console import answered
from benchmarks.history.figures import FOLDER, PAGE, block, figures_of, sources_block, unseen_by, with_block
from trainer.shared.run.errors import ConfigError

ROOT = FOLDER.parent.parent
SHIPPED = ROOT / "benchmarks" / "published" / "data"


def main(argv: list[str] | None = None) -> int:
    """0, or 2 for a table that cannot be read."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.history", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="RAW.csv", type=Path)
    parser.add_argument(
        "--leave-out", action="store_true", help="also what is predicted of each source with constants fitted to all others (minutes)"
    )
    given = parser.parse_args(argv)
    try:
        paths = [*sorted(SHIPPED.glob("*.csv")), *given.tables]
        apart = unseen_by(paths) if given.leave_out else None
        tables = [figures_of(path, apart) for path in paths]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return ConfigError.exit_code
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    record = {"commit": commit, "tables": tables}
    (FOLDER / f"{datetime.date.today().isoformat()}.json").write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(with_block(PAGE.read_text(), record))
    print(block(record) + sources_block(record), end="")
    return 0


if __name__ == "__main__":
    sys.exit(answered(main))
