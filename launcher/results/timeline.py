"""The pipeline of one measured step: who computed, who only communicated, who stood idle; and its picture. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from markupsafe import Markup

from launcher import labels
from launcher.results.svg import WIDTH, Scale, across_axis, boxes, element, figure, number, text
from trainer.shared.records.trial_files import positive

COMPUTE = ("forward", "backward", "input_grad", "weight_grad", "optimizer")
COMMUNICATION = ("send", "receive", "reduce", "gather", "communication")
ROWS = 16
"""More ranks than this are drawn as one rank per pipeline stage; the others of a stage do the same."""

LEFT, TOP, ROW, LANE = 150, 4, 26, 5  # units of the picture: labels, margin, height of a row, of its communication lane

Span = tuple[float, float]


@dataclass(frozen=True)
class Event:
    """One event of ``timeline.json``; times in seconds from the step's start."""

    rank: int
    stage: int
    chunk: int
    kind: str
    micro_batch: int
    start: float
    end: float
    waited: float = 0.0  # how much of it was communication that nothing hid, as that of tensor parallelism inside a computation


@dataclass(frozen=True)
class Use:
    """Shares of the step by activity; they add up to 1.

    ``communicating`` is communication without computation at the same time, waiting for a peer included.
    """

    computing: float
    communicating: float
    idle: float


@dataclass(frozen=True)
class Timeline:
    """One step over all ranks."""

    step: int
    schedule: str
    events: tuple[Event, ...]

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Timeline | None:
        """From the contents of ``timeline.json``; events that make no sense are left out, None when none is left."""
        written = data.get("events")
        events = tuple(event for event in map(_event, written if isinstance(written, list) else []) if event is not None)
        return cls(int(positive(data.get("step")) or 0), str(data.get("schedule", "")), events) if events else None

    @cached_property
    def start(self) -> float:
        return min(event.start for event in self.events)

    @cached_property
    def end(self) -> float:
        return max(event.end for event in self.events)

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @cached_property
    def by_rank(self) -> dict[int, list[Event]]:
        """Each rank's events, ranks from the first pipeline stage to the last."""
        found: dict[int, list[Event]] = {}
        for event in self.events:
            found.setdefault(event.rank, []).append(event)
        return dict(sorted(found.items(), key=lambda item: (min(e.stage for e in item[1]), item[0])))

    def shown(self) -> list[int]:
        """The ranks to draw: all, or the first of each stage where that is too many."""
        if len(self.by_rank) <= ROWS:
            return list(self.by_rank)
        first = {min(e.stage for e in events): rank for rank, events in reversed(self.by_rank.items())}
        return [first[stage] for stage in sorted(first)][:ROWS]

    @cached_property
    def use(self) -> dict[int, Use]:
        """Returns each rank's shares of the step."""
        return {rank: self._use(events) for rank, events in self.by_rank.items()}

    @property
    def mean_use(self) -> Use:
        """Returns the ranks' mean shares of the step."""
        uses, count = self.use.values(), len(self.use)
        computing, communicating = sum(u.computing for u in uses) / count, sum(u.communicating for u in uses) / count
        return Use(computing, communicating, 1 - computing - communicating)

    def _use(self, events: Sequence[Event]) -> Use:
        whole = self.seconds
        computations = [e for e in events if e.kind not in COMMUNICATION]
        waited = sum(e.waited for e in computations)
        computing = max(0.0, covered((e.start, e.end) for e in computations) - waited) / whole
        busy = covered((e.start, e.end) for e in events) / whole
        return Use(computing, busy - computing, 1 - busy)


def covered(spans: Iterable[Span]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def picture(timeline: Timeline, title: str, seconds: float | None = None) -> Markup:
    """Draws a row per rank: computations, messages in a narrow lane below, and the share of computing. ``seconds``: the picture's width."""
    ranks = timeline.shown()
    scale = Scale(0.0, seconds or timeline.seconds, LEFT, WIDTH - 60)
    bottom = TOP + ROW * len(ranks)
    rows = [part for index, rank in enumerate(ranks) for part in _row(timeline, rank, scale, TOP + ROW * index)]
    return figure(bottom + 22, title, [across_axis(scale, TOP, bottom, labels.seconds), *rows])


def _row(timeline: Timeline, rank: int, scale: Scale, y: float) -> list[Markup]:
    events, origin = timeline.by_rank[rank], timeline.start
    stages = sorted({event.stage for event in events if event.kind in COMPUTE and event.micro_batch >= 0})
    where = f"rank {rank}" + (f" · stage {', '.join(map(str, stages))}" if stages else "")
    parts = [
        text(LEFT - 8, y + 15, where if len(where) <= 24 else f"rank {rank}", "label", "end"),
        boxes([(scale.start, scale(timeline.seconds))], y, ROW - 3, "idle"),
        text(scale.end + 6, y + 15, f"{100 * timeline.use[rank].computing:.0f} %", "label"),
    ]
    groups: dict[tuple[str, int], list[Span]] = {}
    for event in events:
        span = (scale(event.start - origin), scale(event.end - origin))
        groups.setdefault((event.kind, event.chunk % 2), []).append(span)
    for (kind, odd), spans in sorted(groups.items(), key=lambda item: item[0][0] in COMMUNICATION):
        if kind in COMMUNICATION:
            parts.append(boxes(spans, y + ROW - 3 - LANE, LANE, "communication"))
        else:
            parts.append(boxes(spans, y, ROW - 3 - LANE, f"{kind if kind in COMPUTE else 'other'}{' odd' if odd else ''}"))
    return [*parts, _numbers(events, scale, origin, y + 13)]


def _numbers(events: Sequence[Event], scale: Scale, origin: float, y: float) -> Markup:
    """The micro-batch of each computation that is wide enough to say it."""
    words = []
    for event in events:
        width, word = scale(event.end) - scale(event.start), str(event.micro_batch)
        if event.kind in COMPUTE and event.micro_batch >= 0 and width > 4 + 6 * len(word):
            words.append(element("text", word, x=number(scale((event.start + event.end) / 2 - origin)), y=number(y)))
    return element("g", *words, class_="micro")


def _event(data: Any) -> Event | None:
    try:
        event = Event(
            int(data["rank"]), int(data.get("stage", 0)), int(data.get("chunk", 0)), str(data["kind"]), int(data.get("micro_batch", -1)),
            float(data["start_s"]), float(data["end_s"]), positive(data.get("waited_s")) or 0.0,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    return event if -1e9 < event.start < event.end < 1e9 and event.waited <= event.end - event.start else None
