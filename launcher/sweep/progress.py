"""Reports a sweep that runs, to whoever runs or watches it: a live table on a terminal, elsewhere a plain line for each change."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.live import Live

from launcher.console import say
from launcher.labels import plural, shown
from launcher.sweep.active_trial import ActiveTrial
from launcher.sweep.live import LiveView, shown_counts
from launcher.sweep.observer import Observer
from launcher.trials.labels import outcome, trial_labels
from launcher.trials.store import Record
from trainer.shared.records.outcome import Status

_TICK_SECONDS = 0.5
_SHARE = 10
"""Drawing takes at most one part in so many of the time: the machine may be one that measures."""
NODES = 3
"""Names of nodes that a line shows."""


def progress_for(name: str, records: Sequence[Record], active: Sequence[ActiveTrial], others: Callable[[], Sequence[Record]]) -> Observer:
    """Follows the trials of one command: a table of them, and of the sweep's ``others``, on a terminal, else lines."""
    trials = list({record.id: record for record in records}.values())
    say(f"sweep {name}: {_counts(trials, {trial.record.id for trial in active})}")
    if on_terminal() and active:
        known = {record.id for record in trials}
        return LiveTable(LiveView(name, [*trials, *(record for record in others() if record.id not in known)], time.time()))
    return Lines(len(active), trial_labels(trials))


def on_terminal() -> bool:
    """Returns whether a table can be drawn anew: output that goes into a pipe or a file must hold no escape codes."""
    return sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def _counts(trials: Sequence[Record], to_run: set[str]) -> str:
    """``4 trials, 2 already done, 1 known to fail, 1 pruned``."""
    pruned = sum(record.status is Status.PRUNED for record in trials)
    done = sum(record.status is Status.DONE for record in trials if record.id not in to_run)
    failed = len(trials) - pruned - done - len(to_run)
    counts = {"already done": done, "known to fail": failed, "pruned": pruned}
    return ", ".join([plural(len(trials) - pruned, "trial"), *(f"{count} {word}" for word, count in counts.items() if count)])


def ended(record: Record, names: Mapping[str, str]) -> str:
    """One line on a trial's end."""
    return shown(f"{record.id}  {names[record.id]}  {outcome(record)}")


def _again(record: Record) -> str:
    return f"{record.id}  attempt {record.attempt} follows: {record.detail}"


def _placed(record: Record) -> str:
    """Returns which nodes an attempt avoids; empty if none."""
    submitted = record.status is Status.SUBMITTED and record.avoided_words
    return f"{record.id}  attempt {record.attempt} {record.avoided_words}" if submitted else ""


def _begun(record: Record, names: Mapping[str, str]) -> str:
    nodes = [] if record.nodes == (socket.gethostname(),) else list(dict.fromkeys(record.nodes))
    where = f" on {', '.join(nodes[:NODES])}" + (" ..." if len(nodes) > NODES else "") if nodes else ""
    return f"{record.id}  {names[record.id]}  running{where}"


class Lines:
    """A line for each trial that starts, ends or is tried again."""

    def __init__(self, total: int, names: Mapping[str, str], tell: Callable[[str], None] = say, done: int = 0):
        """``done`` of the ``total`` trials have ended already."""
        self._total, self._ended, self._names, self._tell = total, done, names, tell
        self._said: set[str] = set()

    def begin(self) -> None:
        """Does nothing: the constructor has shown the work ahead."""

    def on_trial(self, record: Record) -> None:
        if record.status.final:
            self._ended += 1
            self._tell(f"[{self._ended}/{self._total}] {ended(record, self._names)}")
        elif record.status is Status.RUNNING:
            self._tell(_begun(record, self._names))
        elif record.status is Status.PLANNED:
            self._tell(_again(record))
        elif words := _placed(record):
            self._tell(words)

    def on_poll(self, records: Sequence[Record]) -> None:
        """Reports once why trials wait."""
        waiting = Counter(record.detail for record in records if record.status is Status.SUBMITTED and "waits" in record.detail)
        for detail, count in waiting.items():
            if detail not in self._said:
                self._said.add(detail)
                self._tell(f"{plural(count, 'trial')}: {detail}")

    def update(self, records: Sequence[Record]) -> None:
        """The sweep has these trials now."""
        if {record.id for record in records} != self._names.keys():
            self._names = trial_labels(records)
            self._total = sum(record.status is not Status.PRUNED for record in records)

    def close(self) -> None:
        """Nothing is held."""


class LiveTable:
    """A ``LiveView`` kept up to date at the bottom of the terminal; trials' ends, and whatever else is said, stand above it."""

    def __init__(self, view: LiveView):
        self._view, self._console = view, Console(stderr=True, highlight=False)
        self._size, self._closed = self._console.size, threading.Event()
        self._live = Live(view, console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._live.start(refresh=True)
        self._clock = threading.Thread(target=self._tick, daemon=True)
        self._clock.start()

    def begin(self) -> None:
        """Does nothing: the table is there."""

    def on_trial(self, record: Record) -> None:
        self._view.put(record)
        again = _again if record.status is Status.PLANNED else _placed
        words = ended(record, self._view.names) if record.status.final else again(record)
        if words:
            self._console.print(words, markup=False, soft_wrap=True)

    def on_poll(self, records: Sequence[Record]) -> None:
        """Nothing: the table is drawn by the clock."""

    def update(self, records: Sequence[Record]) -> None:
        """The sweep has these trials now."""
        self._view.update(records)

    def close(self) -> None:
        self._closed.set()
        self._clock.join()
        self._live.stop()

    def _tick(self) -> None:
        pause = _TICK_SECONDS
        while not self._closed.wait(pause):
            began = time.thread_time()
            try:
                self._draw()
            except OSError:  # the terminal is gone
                return
            pause = max(_TICK_SECONDS, _SHARE * (time.thread_time() - began))

    def _draw(self) -> None:
        """Draws the table. A terminal of another size has broken its lines anew: nobody knows where the last one stands."""
        if self._console.size != self._size:
            self._size = self._console.size
            self._live.stop()
            self._console.clear()
            self._live.start()
        self._live.refresh()


class Watching:
    """Shows a sweep that another process runs, by its records as they are read again and again."""

    def __init__(self, name: str, records: Sequence[Record]):
        self._known = {record.id: _stage_of(record) for record in records}
        self._shown: LiveTable | Lines
        if on_terminal():
            self._shown = LiveTable(LiveView(name, records))
            return
        self._shown = Lines(0, {}, _with_time, sum(record.status.final and record.status is not Status.PRUNED for record in records))
        self._shown.update(records)
        _with_time(f"sweep {name}: {shown_counts(records)}")

    def update(self, records: Sequence[Record]) -> None:
        """Reports the changes since the last call."""
        self._shown.update(records)
        for record in records:
            if (now := _stage_of(record)) != self._known.get(record.id, (Status.PLANNED, 0)):
                self._shown.on_trial(record)
            self._known[record.id] = now
        self._shown.on_poll(records)

    def close(self) -> None:
        self._shown.close()


def _stage_of(record: Record) -> tuple[Status, int]:
    return record.status, record.attempt


def _with_time(words: str) -> None:
    print(shown(f"{time.strftime('%H:%M:%S')}  {words}"), flush=True)
