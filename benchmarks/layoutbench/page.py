"""docs/layoutbench.md, of which programs write the tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from benchmarks.history.__main__ import ROOT
from trainer.shared.run.errors import ConfigError

PAGE = ROOT / "docs" / "layoutbench.md"


def between_marks(page: str, marks: tuple[str, str], text: str) -> str:
    """``page`` with ``text`` in the place of what stood between two marks."""
    before, _, rest = page.partition(marks[0])
    return f"{before}{marks[0]}\n{text}\n{marks[1]}{rest.partition(marks[1])[2]}"


def told(make: Callable[[], str], marks: tuple[str, str], write: bool) -> int:
    """Prints the tables that ``make`` returns, and writes them into the page if asked; the exit code: 2 where it raises ``ConfigError``."""
    try:
        text = make()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return ConfigError.exit_code
    if write:
        PAGE.write_text(between_marks(PAGE.read_text(), marks, text))
    print(text, end="")
    return 0


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown; cells that a row lacks are empty."""
    lines = [f"| {' | '.join([*cells, *[''] * (len(heads) - len(cells))])} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]]) + "\n"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
