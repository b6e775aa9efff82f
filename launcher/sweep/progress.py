"""Reports a running sweep on standard error: bars on a terminal, one plain line per event elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from launcher.console import say
from launcher.sweep.active_trial import ActiveTrial
from launcher.sweep.observer import Observer
from launcher.trials.labels import newest_step, outcome, step, total_steps, trial_labels
from launcher.trials.store import Record
from trainer.shared.records.outcome import Status

_REFRESH_SECONDS = 0.25


def progress_for(name: str, records: Sequence[Record], active: Sequence[ActiveTrial]) -> Observer:
    """Shows bars on a terminal, lines elsewhere; both begin with the planned and finished trials."""
    trials = list({record.id: record for record in records}.values())
    say(f"sweep {name}: {_counts(trials, {trial.record.id for trial in active})}")
    if sys.stderr.isatty() and active:
        return Bars([trial.record for trial in active], trial_labels(trials))
    return Lines(len(active), trial_labels(trials))


def _counts(trials: Sequence[Record], to_run: set[str]) -> str:
    """``4 trials, 2 already done, 1 known to fail, 1 pruned``."""
    pruned = sum(record.status is Status.PRUNED for record in trials)
    done = sum(record.status is Status.DONE for record in trials if record.id not in to_run)
    failed = len(trials) - pruned - done - len(to_run)
    counts = {"already done": done, "known to fail": failed, "pruned": pruned}
    total = f"{len(trials) - pruned} trial" + ("s" if len(trials) - pruned != 1 else "")
    return ", ".join([total, *(f"{count} {word}" for word, count in counts.items() if count)])


def _ended(record: Record, names: Mapping[str, str]) -> str:
    return f"{record.id}  {names[record.id]}  {outcome(record)}"


def _again(record: Record) -> str:
    return f"{record.id}  attempt {record.attempt} follows: {record.detail}"


def _placed(record: Record) -> str:
    """Returns which nodes an attempt avoids; empty if none."""
    submitted = record.status is Status.SUBMITTED and record.avoided_words
    return f"{record.id}  attempt {record.attempt} {record.avoided_words}" if submitted else ""


class Lines:
    """A line for each trial that ends or is tried again."""

    def __init__(self, total: int, names: Mapping[str, str]):
        self._total, self._ended, self._names = total, 0, names
        self._said: set[str] = set()

    def begin(self) -> None:
        """Does nothing: the constructor has shown the work ahead."""

    def on_trial(self, record: Record) -> None:
        if record.status.final:
            self._ended += 1
            say(f"[{self._ended}/{self._total}] {_ended(record, self._names)}")
        elif record.status is Status.PLANNED:
            say(_again(record))
        elif words := _placed(record):
            say(words)

    def on_poll(self, records: Sequence[Record]) -> None:
        """Reports once why trials wait."""
        waiting = Counter(record.detail for record in records if record.status is Status.SUBMITTED and "waits" in record.detail)
        for detail, count in waiting.items():
            if detail not in self._said:
                self._said.add(detail)
                say(f"{count} trial{'s' if count != 1 else ''}: {detail}")

    def close(self) -> None:
        """Nothing is held."""


class Bars:
    """A bar for the sweep and one for each trial under way; a single trial has only its own."""

    def __init__(self, records: Sequence[Record], names: Mapping[str, str]):
        label, note = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[note]}", markup=False)
        columns = (label, BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn(), note)
        self._bars = Progress(*columns, console=Console(stderr=True, highlight=False))
        self._total, self._names = len(records), names
        self._sweep = self._bars.add_task("sweep", total=self._total, note="") if self._total > 1 else None
        self._trials: dict[str, TaskID] = {}
        self._refreshed = 0.0
        self._bars.start()

    def begin(self) -> None:
        """Does nothing: the constructor has shown the work ahead."""

    def on_trial(self, record: Record) -> None:
        if record.status.final:
            self._drop(record)
            self._bars.console.print(_ended(record, self._names), markup=False)
            if self._sweep is not None:
                self._bars.advance(self._sweep)
        elif record.status is Status.PLANNED:
            self._drop(record)
            self._bars.console.print(_again(record), markup=False)
        elif record.id not in self._trials:
            if words := _placed(record):
                self._bars.console.print(words, markup=False)
            label = f"{record.id[:8]}  {self._names[record.id]}"
            self._trials[record.id] = self._bars.add_task(label, total=total_steps(record), note=record.status.value)

    def on_poll(self, records: Sequence[Record]) -> None:
        if time.monotonic() - self._refreshed < _REFRESH_SECONDS:
            return
        self._refreshed = time.monotonic()
        for record in records:
            if record.id in self._trials:
                self._bars.update(self._trials[record.id], completed=step(record) or 0, note=newest_step(record) or outcome(record))

    def close(self) -> None:
        self._bars.stop()

    def _drop(self, record: Record) -> None:
        task = self._trials.pop(record.id, None)
        if task is not None:
            self._bars.remove_task(task)
