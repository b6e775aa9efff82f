"""Tables and lists for people: they fit a narrow terminal, and are neither folded nor cut in a pipe or a file."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

from launcher.goals.views import Answer, Grid, Line, Listing, View
from launcher.labels import shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


WIDE = 1000
GAP = 2
"""Spaces between two columns."""
READABLE = 40
"""Characters of a line in which words of a wrapped column read well: columns that can be missed are not shown at its expense."""


@dataclass(frozen=True)
class Column:
    """A column with all its cells. ``keep`` says when a narrow terminal shows it: 0 always, 1 where the columns before it leave room, 2 and
    more only where nothing has to be wrapped tightly for it. With ``least`` the column may be wrapped down to so many characters."""

    name: str
    cells: Sequence[str]
    keep: int = 0
    least: int | None = None
    right: bool = False

    @cached_property
    def natural(self) -> int:
        return max(cell_len(shown(words)) for words in (self.name, *self.cells))


def wide_console() -> Console:
    """Returns standard output as a console without markup: printed names are data. A pipe has no width, unless COLUMNS gives it one."""
    from rich.console import Console

    class Output(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(shown(text), **options)

        def on_broken_pipe(self) -> None:
            raise  # main ends a verb whose reader went away with code 0; by itself the library exits with 1

    console = Output(highlight=False, markup=False, emoji=False)
    columns = os.environ.get("COLUMNS", "")
    if not (columns.isdecimal() and int(columns)):  # some shells without a terminal say 0
        console.width = shutil.get_terminal_size().columns if console.is_terminal else WIDE
    return console


def titled(title: str, text: str) -> Text:
    """``title: text``, the title in bold."""
    from rich.text import Text

    return Text.assemble((shown(title), "bold"), shown(f": {text}"))


def emit(answer: Answer, as_json: bool) -> None:
    """Prints the document of an answer, or shows it to people."""
    if as_json:
        print(json.dumps(answer.document, indent=2, allow_nan=False))
        return
    show(answer.views)
    if answer.said:
        print(answer.said, file=sys.stderr)


def show(views: Iterable[View]) -> None:
    """Prints lines and tables for people."""
    console = wide_console()
    for view in views:
        if isinstance(view, Line):
            console.print(titled(view.title, view.text) if view.title else view.text, soft_wrap=not view.wraps)
        else:
            console.print(view if isinstance(view, str) else _listing(view, console.width) if isinstance(view, Listing) else _grid(view))


def _listing(view: Listing, width: int) -> Table:
    places = [Column("#", [str(place) for place in range(1, len(view.entries) + 1)])] if view.numbered else []
    columns = [Column(c.name, [c.cell(entry) for entry in view.entries], c.keep, c.least, c.right) for c in view.columns]
    return fitted_table([*places, *columns], width, [""] * len(view.entries))


def _grid(view: Grid) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(title=view.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=view.compact)
    for place, head in enumerate(view.heads):
        if not view.figures:
            made.add_column(head)
        elif place == 0:
            made.add_column(head, overflow="fold", max_width=view.widest)
        else:
            made.add_column(head.replace(" ", "\n") if view.compact else head, justify="right", no_wrap=True)
    for row in view.rows:
        made.add_section() if row is None else made.add_row(*row)
    return made


def chosen_columns(columns: Sequence[Column], width: int) -> list[Column]:
    """Returns the leading columns that fit into ``width`` characters."""
    chosen = [column for column in columns if column.keep == 0]
    for column in sorted((c for c in columns if c.keep), key=lambda c: c.keep):
        widths = [_wanted(c, tight=column.keep == 1) for c in (*chosen, column)]
        if sum(widths) + GAP * len(chosen) <= width:
            chosen.append(column)
    return [column for column in columns if column in chosen]


def _wanted(column: Column, tight: bool) -> int:
    if column.least is None:
        return column.natural
    return min(column.natural, column.least if tight else READABLE)


def fitted_table(columns: Sequence[Column], width: int, styles: Sequence[str]) -> Table:
    """A table of the columns that fit. ``styles`` are those of the rows."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    kept = chosen_columns(columns, width)
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    for column, room in zip(kept, _widths(kept, width), strict=True):
        wraps = column.least is not None
        grid.add_column(column.name, justify="right" if column.right else "left", no_wrap=not wraps, overflow="fold", width=room)
    for row, style in enumerate(styles):
        grid.add_row(*(Text(shown(column.cells[row])) for column in kept), style=style)
    return grid


def _widths(columns: Sequence[Column], width: int) -> list[int]:
    """Returns column widths: the content's, except that wrappable columns share the rest, the narrowest first."""
    rooms = {column.name: min(column.natural, column.least or column.natural) for column in columns}
    left = width - GAP * (len(columns) - 1) - sum(rooms.values())
    wanting = sorted((column.natural - rooms[column.name], column.name) for column in columns)
    for index, (want, name) in enumerate(wanting):
        more = max(0, min(want, left // (len(wanting) - index)))
        rooms[name] += more
        left -= more
    return [rooms[column.name] for column in columns]


def print_list(console: Console, title: str, items: Iterable[tuple[str, str]]) -> None:
    """``title``, then a paragraph ``words: text`` for each item, wrapped where the console has a width; nothing for no items."""
    lines = [f"  {words}: {text}" if text else f"  {words}" for words, text in items]
    if not lines:
        return
    console.print(f"\n{title}", markup=False)
    for line in lines:
        if console.width < WIDE:
            line = textwrap.fill(line, console.width, subsequent_indent="    ")
        console.print(line, markup=False, soft_wrap=True)
