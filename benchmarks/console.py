"""Commands of this folder whose output another program reads."""

from __future__ import annotations

import sys
from collections.abc import Callable

from launcher.cli.main import forget_output


def answered(main: Callable[[], int | None]) -> int:
    """The exit code of ``main``; 0 where the reader of its output went away, as in ``python -m benchmarks.fit TABLE.csv | head``."""
    try:
        code = main() or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        forget_output()
        return 0
