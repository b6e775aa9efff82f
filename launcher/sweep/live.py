"""The picture of a sweep for a terminal of any size: counts, the trials worth a row, why others wait, and when all may have ended."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size

from launcher.labels import one_line, shown
from launcher.sweep.remaining import Pace, pace, remaining_s, sweep_left_s
from launcher.trials.labels import duration, elapsed_s, expected_start, newest_step, outcome, step, total_steps, trial_labels
from launcher.trials.store import Record
from trainer.shared.records.outcome import Status

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

GAP = 2
WITH_ELAPSED, WITH_BAR = 60, 100
"""Columns of a terminal from which rows have these too."""
BAR = 16
LEAST_LABEL, LEAST_NOTE = 10, 12
MOST_ROWS, MOST_REASONS = 30, 3

STYLES = {Status.DONE: "green", Status.RUNNING: "bold", Status.FAILED: "red", Status.STOPPED: "yellow", Status.PRUNED: "dim"}
WORDS = {Status.SUBMITTED: "waiting"}
_ORDER = (Status.RUNNING, Status.FAILED, Status.STOPPED, Status.SUBMITTED, Status.PLANNED, Status.DONE)
"""States in the order in which trials get a row where there is no room for all."""


@dataclass(frozen=True)
class LiveRow:
    """The words of one trial in the table."""

    label: str
    trial: str  # its id
    at: str  # steps, or its state
    share: float | None  # of its steps that it has made
    elapsed: str
    left: str
    note: str
    style: str


class LiveView:
    """A renderable of ``records`` as they are at the moment of drawing."""

    def __init__(self, name: str, records: Sequence[Record], since: float | None = None):
        """``since``: when the command that runs it began, in unix seconds."""
        self._name, self._since = name, since
        self._taught: tuple[int, Pace] = -1, Pace()
        self._records: list[Record] = []
        self.names: dict[str, str] = {}
        self.update(records)

    def update(self, records: Sequence[Record]) -> None:
        """Shows these from now on. Labels are made again only where the trials are others."""
        known = {record.id: record for record in records}
        if known.keys() != self.names.keys():
            self.names = trial_labels(known.values())
        self._records = list(known.values())

    def put(self, record: Record) -> None:
        """Shows one trial's new record, in its earlier one's place."""
        self.update([record if each.id == record.id else each for each in self._records])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield from self.lines(options.max_width, console.size.height)

    def lines(self, width: int, height: int) -> list[Text]:
        """Returns the picture: at most ``height - 1`` lines of at most ``width`` columns."""
        from rich.text import Text

        learnt = self._pace()
        head = [Text(line, style="bold") for line in _wrapped(self._heading(learnt), width, 3)]
        reasons = [Text(line) for words in self._reasons() for line in _wrapped(words, width, 2)]
        ordered = [record for record in self._records if record.status is not Status.PRUNED]
        ordered.sort(key=lambda record: (_ORDER.index(record.status), -(record.ended or 0.0)))
        room = max(1, min(MOST_ROWS, height - 3 - len(head) - len(reasons)))  # the row of titles, the line of those left out, the cursor's
        rows = table([self._row(record, learnt) for record in ordered[:room]], width)
        out = [Text(shown_counts(ordered[room:], "and ", " more"), style="dim")] if ordered[room:] else []
        for line in out:
            line.truncate(width, overflow="ellipsis")
        return [*head, *rows, *out, *reasons][: max(1, height - 1)]

    def _pace(self) -> Pace:
        done = [record for record in self._records if record.status is Status.DONE]
        if self._taught[0] != len(done):
            self._taught = len(done), pace(done)
        return self._taught[1]

    def _heading(self, learnt: Pace) -> str:
        left = sweep_left_s(self._records, learnt)
        what = "pipeline" if any(record.stage for record in self._records) else "sweep"
        clocks = [] if self._since is None else [f"{duration(time.time() - self._since)} so far"]
        clocks += [f"about {duration(left)} left"] if left else []
        return f"{what} {self._name}: " + "; ".join([shown_counts(self._records), *([", ".join(clocks)] if clocks else [])])

    def _reasons(self) -> list[str]:
        """Returns the reasons for which trials wait, the commonest first."""
        waiting: dict[str, list[Record]] = {}
        for record in self._records:
            if record.status is Status.SUBMITTED and record.detail:
                waiting.setdefault(record.detail, []).append(record)
        commonest = sorted(waiting.items(), key=lambda item: -len(item[1]))[:MOST_REASONS]
        return [f"{len(ours)} waiting: {one_line(words.removeprefix('waits: '))}{_first_start(ours)}" for words, ours in commonest]

    def _row(self, record: Record, learnt: Pace) -> LiveRow:
        made, total, running = step(record) or 0, total_steps(record), record.status is Status.RUNNING
        at = WORDS.get(record.status, record.status.value)
        if running and total:
            at = f"{made}/{total}" if made else "starting"
        left = remaining_s(record, learnt) if running else None
        note = newest_step(record).partition("  ")[2] if running else outcome(record).partition(": ")[2] if record.status.final else ""
        if record.status is Status.DONE:
            note = outcome(record).partition("  ")[2]
        began = None if record.status is Status.PLANNED else elapsed_s(record)
        share = made / total if running and total else None
        return LiveRow(
            self.names[record.id], record.id, at, share, duration(began), duration(left) if running else "-", shown(one_line(note)),
            STYLES.get(record.status, ""),
        )  # fmt: skip


def shown_counts(records: Sequence[Record], before: str = "", after: str = "") -> str:
    """``2 running, 5 waiting, 3 done``."""
    counts = Counter(record.status for record in records)
    order = [*_ORDER, *(status for status in Status if status not in _ORDER)]
    words = ", ".join(f"{counts[status]} {WORDS.get(status, status.value)}" for status in order if counts[status]) or "no trials"
    return f"{before}{len(records)}{after}: {words}" if before else words


def table(rows: Sequence[LiveRow], width: int) -> list[Text]:
    """Returns a row of titles and the rows, each a line of at most ``width`` columns: narrow terminals have fewer columns, long words are
    cut."""
    from rich.text import Text

    if not rows:
        return []
    columns = [("trial", [row.label for row in rows])]
    columns += [("id", [row.trial for row in rows])] if width >= WITH_BAR else []
    columns += [("step", [row.at for row in rows])]
    bar = width >= WITH_BAR and any(row.share is not None for row in rows)
    columns += [("", [_bar(row.share) for row in rows])] if bar else []
    columns += [("elapsed", [row.elapsed for row in rows])] if width >= WITH_ELAPSED else []
    columns += [("left", [row.left for row in rows])]
    wide = [_widest([title, *cells]) for title, cells in columns]
    rest = width - sum(wide[1:]) - GAP * (len(wide) - 1)
    notes = ["", *(row.note for row in rows)]
    note = 0
    if width >= WITH_ELAPSED and _widest(notes):
        note = min(_widest(notes), max(LEAST_NOTE, rest - GAP - wide[0], (rest - GAP) // 2))
        rest -= note + GAP
    wide[0] = max(min(wide[0], rest), LEAST_LABEL)
    lines = [[title for title, _ in columns], *([cells[place] for _, cells in columns] for place in range(len(rows)))]
    made = []
    for place, cells in enumerate(lines):
        fitted = [_fit(cells[0], wide[0]), *(_right(cell, room) for cell, room in zip(cells[1:], wide[1:]))]
        words = (" " * GAP).join([*fitted, *([_fit(notes[place], note)] if note else [])])
        made.append(Text(_fit(words, width).rstrip(), style="dim" if place == 0 else rows[place - 1].style))
    return made


def _first_start(waiting: Sequence[Record]) -> str:
    words = expected_start(waiting)
    return f"; {'the first ' if len(waiting) > 1 else ''}{words}" if words else ""


def _bar(share: float | None) -> str:
    full = 0 if share is None else round(BAR * min(1.0, share))
    return " " * BAR if share is None else "━" * full + "─" * (BAR - full)


def _widest(cells: Sequence[str]) -> int:
    return max(map(cell_len, cells), default=0)


def _fit(words: str, room: int) -> str:
    """``words`` in exactly ``room`` columns, with an ellipsis where they are cut."""
    return set_cell_size(words, room) if cell_len(words) <= room else set_cell_size(words, room - 1) + "…"


def _right(words: str, room: int) -> str:
    return " " * (room - cell_len(words)) + words


def _wrapped(words: str, width: int, most: int) -> list[str]:
    """Returns the text in ``most`` lines of at most ``width`` columns; what does not fit is cut."""
    lines = [""]
    for word in shown(words).split():
        longer = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(longer) > width and lines[-1].strip():
            lines.append(f"  {word}")
        else:
            lines[-1] = longer
    kept = lines[:most] if len(lines) <= most else [*lines[: most - 1], f"{lines[most - 1]} …"]
    return [_fit(line, width).rstrip() for line in kept]
