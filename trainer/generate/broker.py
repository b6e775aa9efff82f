"""The exchange between the threads of clients and the decoder: requests go in, pieces of their texts come out."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.generate.api import ApiForm, ApiRequest, ServedModel, TokenScore
from trainer.generate.generate import Completion, PromptRequest, RequestUpdate, TextRow
from trainer.generate.telling import TextStream

REMEMBERED = 4096
"""The number of requests in the percentiles."""
IDLE_SECONDS = 0.5
"""The wait of an idle turn for requests, and the interval at which a thread checks that its client is still connected."""


@dataclass
class RequestState:
    """A choice under way, the one at ``index`` of its request's answer: its text so far, the events for its thread, and the times of its
    arrival and of its first and last token; in a streamed answer, the times at which these were sent."""

    asked: ApiRequest
    request: PromptRequest
    telling: TextStream
    events: queue.SimpleQueue[Event]  # of all choices of the request
    arrived: float = field(default_factory=time.monotonic)
    first: float = 0.0
    last: float = 0.0
    made: Completion = field(default_factory=lambda: Completion([]))

    @property
    def index(self) -> int:
        return self.request.number

    def scores(self, first: int, end: int) -> list[TokenScore] | None:
        """Returns tokens of the text with their log-probabilities; None if they were not asked for."""
        return self.asked.scored(self.made, self.telling, first, end) if self.asked.scores else None


Event = tuple[RequestState, str, str, int]
"""A choice, a piece of its text, the way in which the text ended (empty: it continues), and its tokens so far."""


class HttpRefusal(Exception):
    """A refused request: status, one line, and the API's word for it, if it has one."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code


class RequestBroker:
    """The exchange on rank 0. ``room``: the most choices that wait or run at once."""

    def __init__(self, model: ServedModel, room: int, stopped: Callable[[], bool]):
        self.model, self.room, self.stopped = model, room, stopped
        self.names = itertools.count()
        self.changed = threading.Condition()
        self.closed = False  # the decoder takes no more requests
        self.new: list[PromptRequest] = []
        self.left: set[int] = set()  # names of abandoned requests
        self.open: dict[int, RequestState] = {}
        self.counts = {"completed": 0, "dropped": 0, "refused": 0}
        self.times: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)  # seconds to the first token, per further token

    # called by the decoder

    def hear(self, idle: bool) -> RequestUpdate:
        with self.changed:
            if idle and not self.new and not self.stopped():
                self.changed.wait(IDLE_SECONDS)
            (new, self.new), (left, self.left) = (self.new, []), (self.left, set())
            self.closed = self.stopped()
            return RequestUpdate(new, frozenset(left), over=self.closed)

    def tell(self, row: TextRow) -> None:
        with self.changed:
            asked = self.open.get(row.request.name)
        if asked is None or asked.telling.stopped:
            return
        asked.last = time.monotonic()
        asked.first = asked.first or asked.last
        piece = asked.telling.hear(row.made.tokens, bool(row.made.ended))
        asked.made = row.made.copy()
        ended = "stop" if asked.telling.stopped else row.made.ended
        if ended and not row.made.ended:
            with self.changed:
                self.left.add(row.request.name)
        asked.events.put((asked, piece, ended, asked.telling.shown))

    # called by the threads of clients

    def ask(self, form: ApiForm, body: Mapping[str, Any]) -> list[RequestState]:
        """Accepts a request and returns the choices of its answer. ``HttpRefusal`` if there is no room, ``ConfigError`` if it is wrong."""
        asked, events = form.read(body, self.model, self.room), queue.SimpleQueue[Event]()
        requests = [replace(request, name=next(self.names)) for request in asked.requests]
        tellings = [asked.stream_of(request, self.model.words) for request in requests]
        with self.changed:
            if self.closed or self.stopped():
                raise HttpRefusal(503, "the server is about to end; ask another one")
            if len(self.open) + len(requests) > self.room:
                self.counts["refused"] += 1
                raise HttpRefusal(429, f"{len(self.open)} requests wait or run already; ask again later", "rate_limit_exceeded")
            states = [RequestState(asked, request, telling, events) for request, telling in zip(requests, tellings)]
            self.open |= {state.request.name: state for state in states}
            self.new += requests
            self.changed.notify()
        return states

    def close(self, asked: RequestState, whole: bool) -> None:
        """Closes a prompt whose client has the ``whole`` answer or is gone."""
        with self.changed:
            del self.open[asked.request.name]
            self.counts["completed" if whole else "dropped"] += 1
            if not whole:
                self.left.add(asked.request.name)
            elif asked.first:
                further = (asked.last - asked.first) / max(1, len(asked.made.tokens) - 1)
                self.times.append((asked.first - asked.arrived, further))

    def stats(self) -> dict[str, Any]:
        with self.changed:
            started = sum(bool(asked.first) for asked in self.open.values())
            states = {"running": started, "waiting": len(self.open) - started, **self.counts}
            times = list(zip(*self.times)) or [(), ()]
        names = ("seconds_to_first_token", "seconds_per_further_token")
        return states | {name: percentiles(values) for name, values in zip(names, times)}


def percentiles(values: tuple[float, ...]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{share}": ordered[-(-share * len(ordered) // 100) - 1] for share in (50, 90, 99)} if ordered else {}
