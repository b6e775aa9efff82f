"""Answers of verbs as plain data: the document that ``--json`` prints, and lines and tables for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.labels import percent, plural

Entry = Mapping[str, Any]
"""One row of a listing, a part of the document."""


@dataclass(frozen=True)
class GoalColumn:
    """A column of a listing. ``key`` is the key of an entry that it shows, or the whole entry if empty; ``form`` turns the value into text.
    ``keep`` and ``least`` control it in a narrow terminal, as in ``launcher.cli.console.Column``."""

    name: str
    key: str = ""
    form: Callable[[Any], str] = str
    keep: int = 0
    least: int | None = None
    right: bool = True

    def cell(self, entry: Entry) -> str:
        """Returns the text of one entry."""
        return self.form(entry[self.key] if self.key else entry)


@dataclass(frozen=True)
class Listing:
    """Entries in as many columns as fit the terminal, preceded by their places."""

    columns: Sequence[GoalColumn]
    entries: Sequence[Entry]
    numbered: bool = True


@dataclass(frozen=True)
class Grid:
    """A table with all its columns. In ``figures`` the first column names the row and the others are never wrapped; a ``compact`` grid
    breaks its heads and has less space between columns; a row that is None is a horizontal rule."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str] | None]
    title: str | None = None
    figures: bool = False
    compact: bool = False
    widest: int | None = None  # width at which the first column wraps, in characters


@dataclass(frozen=True)
class Line:
    """Text after its title, wrapped only if ``wraps``."""

    text: str
    title: str = ""
    wraps: bool = False


View = str | Line | Listing | Grid
"""A ``str`` is text that wraps at the width of the terminal."""


@dataclass(frozen=True)
class Answer:
    """The result of a verb. ``views`` may be generated lazily. ``said`` goes to standard error if people read the answer."""

    document: Any
    views: Iterable[View]
    said: str = ""


def not_predicted(reasons: Counter[str]) -> Iterator[View]:
    """Yields the number of rows of a table without a prediction, by reason."""
    yield from (Line(f"{plural(count, 'row')} not predicted: {reason}") for reason, count in reasons.most_common())


def shares_of(title: str, values: Mapping[str, float], form: Callable[[float], str]) -> Grid:
    """Returns parts with their shares of the whole, the largest first."""
    whole = sum(values.values())
    parts = sorted(values.items(), key=lambda item: -item[1])
    rows = [
        (name, form(value), percent(value / whole)) for name, value in parts if value > 1e-6 * whole
    ]  # rounding leaves a remainder of values that should be 0
    return Grid((title, "", "share"), [*rows, ("all", form(whole), "")])
