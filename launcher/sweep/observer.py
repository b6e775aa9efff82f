"""The protocol for followers of a running sweep: progress on the terminal, the MLflow mirror, a search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from launcher.trials.store import Record


class Observer(Protocol):
    """Called by the sweep loop, in the order of these methods."""

    def begin(self) -> None:
        """The sweep is on disk; none of its trials has been submitted yet."""

    def on_trial(self, record: Record) -> None:
        """The status of a trial has changed, or another attempt of it follows."""

    def on_poll(self, records: Sequence[Record]) -> None:
        """The trials that are submitted or running, after each poll."""

    def close(self) -> None:
        """The sweep has ended."""
