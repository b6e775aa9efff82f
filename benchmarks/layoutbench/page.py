"""docs/layoutbench.md, of which programs write the tables."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.history.__main__ import ROOT

PAGE = ROOT / "docs" / "layoutbench.md"


def between_marks(page: str, marks: tuple[str, str], text: str) -> str:
    """``page`` with ``text`` in the place of what stood between two marks."""
    before, _, rest = page.partition(marks[0])
    return f"{before}{marks[0]}\n{text}\n{marks[1]}{rest.partition(marks[1])[2]}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown; cells that a row lacks are empty."""
    lines = [f"| {' | '.join([*cells, *[''] * (len(heads) - len(cells))])} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]]) + "\n"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
