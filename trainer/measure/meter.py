"""Measures where the time of a step goes."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.comm.clock import Clock
from trainer.comm.collectives import Ledger
from trainer.shared.parallel.actions import Action, Kind

PHASES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT_GRAD: "backward", Kind.WEIGHT_GRAD: "backward"}
"""The part of the step split that a computation belongs to. Sends and receives take no time of their own."""

EVENTS: dict[Kind | str, str] = {
    Kind.SEND_FORWARD: "send",
    Kind.SEND_BACKWARD: "send",
    Kind.RECV_FORWARD: "receive",
    Kind.RECV_BACKWARD: "receive",
    "communication": "reduce",
    "optimizer": "optimizer",
}
"""Names in the timeline, if they differ from those of the schedule. Other phases are not drawn."""

SLOWER = 1.2
"""Factor above which a rank is a straggler."""


@dataclass(frozen=True)
class PhaseSpan:
    """Start and end of a phase, as marks of the clock. ``waits`` are the waits for communication within."""

    phase: str
    action: Action | None
    start: Any
    work: Any  # when its input had arrived
    end: Any
    waits: slice


class Recorder:
    """Collects the spans of one step, if the clock makes marks in it."""

    def __init__(self, clock: Clock, ledger: Ledger):
        self.clock, self.ledger = clock, ledger
        self.spans: list[PhaseSpan] = []
        self.start: Any = None
        self.work: Any = None
        self.host_start = 0.0  # the same moment on the host's clock

    def begin(self) -> None:
        self.spans, self.start, self.host_start = [], self.clock.stamp(), time.perf_counter()
        self.ledger.waits.clear()

    @contextlib.contextmanager
    def span(self, action: Action | str) -> Iterator[None]:
        """Times its body, under the phase of an action or a name."""
        phase = action if isinstance(action, str) else PHASES.get(action.kind, "communication")
        start, first = self.clock.mark(), len(self.ledger.waits)
        self.work = start
        yield
        if start is None:
            return
        waits = slice(first, len(self.ledger.waits))
        self.spans.append(PhaseSpan(phase, None if isinstance(action, str) else action, start, self.work, self.clock.mark(), waits))

    def arrived(self) -> None:
        """Inside a span: its input is here, the work begins. The timeline draws it from now on."""
        self.work = self.clock.mark()

    def split(self) -> dict[str, float]:
        """Returns seconds of the step by part; ``communication`` is the exposed part."""
        parts: dict[str, float] = dict.fromkeys(("forward", "backward", "communication", "optimizer", "data"), 0.0)
        for span in self.spans:
            waited = sum(self.clock.seconds(*wait) for wait in self.ledger.waits[span.waits])
            parts["communication"] += waited
            parts[span.phase] += self.clock.seconds(span.start, span.end) - waited
        return parts

    def events(self, rank: int, stage_of_rank: int, stages: int, offset_s: float) -> list[dict[str, Any]]:
        """Returns the step's timeline, in seconds from its start on the first rank, ``offset_s`` before this rank's; ``waited_s`` is
        exposed."""
        events = []
        for span in self.spans:
            kind = EVENTS.get(span.phase) if span.action is None else EVENTS.get(span.action.kind, span.action.kind.value)
            if kind is None:
                continue
            chunk = 0 if span.action is None else span.action.chunk
            waits = [wait for wait in self.ledger.waits[span.waits] if self.clock.seconds(span.work, wait[0]) >= 0]
            events.append(
                {
                    "rank": rank,
                    "stage": chunk * stages + stage_of_rank,
                    "chunk": chunk,
                    "kind": kind,
                    "micro_batch": -1 if span.action is None else span.action.micro_batch,
                    "start_s": self.clock.seconds(self.start, span.work) + offset_s,
                    "end_s": self.clock.seconds(self.start, span.end) + offset_s,
                    "waited_s": sum(self.clock.seconds(*wait) for wait in waits),
                }
            )
        return events


def stragglers(worked: Sequence[float], peers: Sequence[int]) -> list[int]:
    """Returns ranks that work more than ``SLOWER`` times the median of those with the same ``peers`` (pipeline stage)."""
    found = []
    for rank, seconds in enumerate(worked):
        others = [worked[other] for other, group in enumerate(peers) if group == peers[rank] and other != rank]
        if others and seconds > SLOWER * statistics.median(others):
            found.append(rank)
    return found


def mean_split(splits: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each part over steps."""
    totals: dict[str, float] = defaultdict(float)
    for split in splits:
        for part, seconds in split.items():
            totals[part] += seconds / len(splits)
    return dict(totals)
