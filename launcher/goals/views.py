"""Answers of verbs as plain data: the document that ``--json`` prints, and the lines and tables that people read instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.labels import percent, plural

Entry = Mapping[str, Any]
"""A row of a listing: a part of the document."""


@dataclass(frozen=True)
class GoalColumn:
    """A column of a listing. ``key`` names what of an entry it shows, the whole entry if it is empty, and ``form`` turns that into text.
    ``keep`` and ``least`` say what becomes of it in a narrow terminal, as in ``launcher.cli.console.Column``."""

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
    """Entries in as many columns as the terminal has room for, with their places in front."""

    columns: Sequence[GoalColumn]
    entries: Sequence[Entry]
    numbered: bool = True


@dataclass(frozen=True)
class Grid:
    """A table with all its columns. Of ``figures`` the first column names the row and the others are never wrapped; a ``compact`` grid
    breaks its heads and has less space between; a row that is None is a rule."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str] | None]
    title: str | None = None
    figures: bool = False
    compact: bool = False
    widest: int | None = None  # characters of the first column, from where it is wrapped


@dataclass(frozen=True)
class Line:
    """Text that is never wrapped, after a title if it has one."""

    text: str
    title: str = ""
    wraps: bool = False


View = str | Line | Listing | Grid
"""A ``str`` is text that is wrapped where the terminal ends."""


@dataclass(frozen=True)
class Answer:
    """Holds what a verb found. ``views`` may be made as they are shown. ``said`` goes to standard error where people read the answer."""

    document: Any
    views: Iterable[View]
    said: str = ""


def not_predicted(reasons: Counter[str]) -> Iterator[View]:
    """Yields how many rows of a table have no prediction, by reason."""
    yield from (Line(f"{plural(count, 'row')} not predicted: {reason}") for reason, count in reasons.most_common())


def shares_of(title: str, values: Mapping[str, float], form: Callable[[float], str]) -> Grid:
    """Returns parts with their shares of the whole, the largest first."""
    whole = sum(values.values())
    parts = sorted(values.items(), key=lambda item: -item[1])
    rows = [
        (name, form(value), percent(value / whole)) for name, value in parts if value > 1e-6 * whole
    ]  # what should be 0 leaves some bits
    return Grid((title, "", "share"), [*rows, ("all", form(whole), "")])
