"""Turn a table of measured runs as it was published into a canonical one.

    python -m benchmarks.published RAW.csv CANONICAL.csv

Tables of training, of static batches (input_len) and of served load (isl) are told apart by their columns. Rows keep their order and
number. What a source does not say is filled with what its documentation, its notes or common use say, and listed in the column
``assumed``; what nothing says is ``unknown``, and so is the step time of a row that prints two. Sources
that are not known here pass with ``trainer=unknown``.
"""

from __future__ import annotations

import argparse
import os
import sys

from benchmarks.published.convert import converted
from launcher.tables.canonical import write
from trainer.shared.run.errors import ConfigError


def main(argv: list[str] | None = None) -> int:
    """0, or 2 for a table that cannot be read, or would be overwritten."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.published", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("raw", metavar="RAW.csv")
    parser.add_argument("canonical", metavar="CANONICAL.csv")
    given = parser.parse_args(argv)
    try:
        check_apart(given.raw, given.canonical)
        rows, columns = converted(given.raw)
        write(given.canonical, rows, columns)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return ConfigError.exit_code
    print(f"wrote {len(rows)} rows to {given.canonical}", file=sys.stderr)
    return 0


def check_apart(raw: str, canonical: str) -> None:
    """``ConfigError`` where both are one file, whatever links name it: what was published would be lost."""
    if os.path.exists(raw) and os.path.exists(canonical) and os.path.samefile(raw, canonical):
        raise ConfigError(f"CANONICAL.csv={canonical} is the raw table {raw} itself, which would be lost; name another file")


if __name__ == "__main__":
    sys.exit(main())
