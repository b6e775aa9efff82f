"""Simulates a schedule: the start and end of every action, for given times.

The model: each rank computes one action at a time, in its order. Sends never block. A transfer starts when it is sent *and*
its receive is posted *and* the previous transfer between the two ranks in that direction is over. A computation waits for
the receive of its input and the gather of its parameters. Gathers and reductions run one after another and
overlap with computation. The cost model uses this with predicted times, the report draws it next to the measured trace, and a
schedule that cannot finish is a deadlock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.shared.parallel.actions import Action, Kind, Schedule
from trainer.shared.parallel.messages import needed_by


@dataclass(frozen=True)
class Times:
    """Seconds of each kind of action, one entry per global stage, for one micro-batch or one slice of it.

    ``send[s]`` is the transfer across the boundary between stages s and s+1 in either direction. ``gather`` and ``reduce``
    are for a chunk. Optional lists may stay empty, which means 0.
    """

    forward: Sequence[float]
    backward: Sequence[float] = ()
    input_grad: Sequence[float] = ()
    weight_grad: Sequence[float] = ()
    send: Sequence[float] = ()
    gather: Sequence[float] = ()
    reduce: Sequence[float] = ()

    @classmethod
    def equal(cls, total: int, forward: float = 1.0, input_grad: float = 1.0, weight_grad: float = 1.0, send: float = 0.0) -> Times:
        """Returns the same times for all ``total`` global stages; a full backward is input gradient plus weight gradient."""
        backward = input_grad + weight_grad
        return cls(*([value] * total for value in (forward, backward, input_grad, weight_grad, send)))

    def of(self, action: Action, stage: int) -> float:
        """Returns the seconds of a computation, gather or reduction on a global stage."""
        values: Sequence[float] = getattr(self, action.kind.value)
        return values[stage] if values else 0.0

    def transfer(self, receive: Action, stage: int) -> float:
        """Returns the seconds of the transfer that ``receive`` on ``stage`` waits for."""
        boundary = stage - 1 if receive.kind is Kind.RECV_FORWARD else stage
        return self.send[boundary] if self.send else 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """The start and end of an action. A send and its receive share the span of the transfer."""

    action: Action
    start: float
    end: float


class Deadlock(ValueError):
    """The schedule cannot finish; the message names the action at which each rank is stuck."""


def simulate(schedule: Schedule, times: Times | Sequence[Times]) -> list[list[Span]]:
    """Returns the start and end of every action, in the order of ``schedule``, from 0.0. ``times`` are those of each slice of a
    micro-batch, or one for all. Raises ``Deadlock`` if it cannot finish."""
    slices = 1 + max(action.slice for actions in schedule for action in actions)
    return _Simulation(schedule, [times] * slices if isinstance(times, Times) else times).run()


def makespan(spans: Sequence[Sequence[Span]]) -> float:
    """Returns the end of the last action."""
    return max((span.end for rank in spans for span in rank), default=0.0)


def idle_fraction(spans: Sequence[Sequence[Span]]) -> float:
    """Returns the share of ranks x makespan in which no rank computes: the pipeline bubble.

    For equal stages and free transfers (p-1)/(m+p-1) for GPipe and 1F1B, (p-1)/(v m + p-1) interleaved (Narayanan et al. 2021).
    """
    busy = sum(span.end - span.start for rank in spans for span in rank if span.action.kind.computes)
    return 1 - busy / (len(spans) * makespan(spans))


@dataclass
class _Channel:
    """Tensors between two ranks in one direction, in order: the sends issued, the receives posted, the transfers made."""

    sent: list[tuple[float, int]] = field(default_factory=list)
    posted: list[tuple[float, int]] = field(default_factory=list)
    done: int = 0
    free: float = 0.0


class _Simulation:
    def __init__(self, schedule: Schedule, times: Sequence[Times]) -> None:
        self.schedule, self.times, self.stages = schedule, times, len(schedule)
        self.total = self.stages * (1 + max(action.chunk for actions in schedule for action in actions))
        self.at = [0] * self.stages
        self.clock = [0.0] * self.stages
        self.side_clock = [0.0] * self.stages
        self.spans: list[list[Span | None]] = [[None] * len(actions) for actions in schedule]
        self.gathered: dict[tuple[int, int], float] = {}
        self.arrived: dict[tuple[int, object], float] = {}
        self.channels: dict[tuple[int, int], _Channel] = defaultdict(_Channel)
        self.awake = deque(range(self.stages))

    def run(self) -> list[list[Span]]:
        while self.awake:
            self._advance(self.awake.popleft())
        stuck = [r for r in range(self.stages) if self.at[r] < len(self.schedule[r])]
        if stuck or any(span is None for rank in self.spans for span in rank):
            heads = [f"rank {r} at '{self.schedule[r][self.at[r]]}'" for r in stuck] or ["a send or receive without its partner"]
            raise Deadlock(f"the schedule cannot finish: {', '.join(heads)}")
        return [[span for span in rank if span is not None] for rank in self.spans]

    def _advance(self, rank: int) -> None:
        """Runs a rank until it must wait for a tensor."""
        actions = self.schedule[rank]
        while self.at[rank] < len(actions):
            i, action = self.at[rank], actions[self.at[rank]]
            if action.kind.computes:
                if not self._compute(rank, i, action):
                    return
            elif action.kind.sends:
                self.channels[rank, action.peer].sent.append((self.clock[rank], i))
                self._transfer(rank, action.peer)
            elif action.kind.receives:
                self.channels[action.peer, rank].posted.append((self.clock[rank], i))
                self._transfer(action.peer, rank)
            else:
                self._overlap(rank, i, action)
            self.at[rank] += 1

    def _compute(self, rank: int, i: int, action: Action) -> bool:
        """Runs a computation if the arrival time of its input is known; else returns False."""
        ready = max(self.clock[rank], self.gathered.get((rank, action.chunk), 0.0))
        if needed := needed_by(action, rank, self.stages, self.total):
            if (rank, needed[0]) not in self.arrived:
                return False
            ready = max(ready, self.arrived[rank, needed[0]])
        self.clock[rank] = ready + self.times[action.slice].of(action, self._stage(rank, action))
        self.spans[rank][i] = Span(action, ready, self.clock[rank])
        return True

    def _overlap(self, rank: int, i: int, action: Action) -> None:
        """Runs a gather or reduction. It delays a computation only if that needs the gathered parameters."""
        start = max(self.clock[rank], self.side_clock[rank])
        end = self.side_clock[rank] = start + self.times[action.slice].of(action, self._stage(rank, action))
        self.spans[rank][i] = Span(action, start, end)
        if action.kind is Kind.GATHER:
            self.gathered[rank, action.chunk] = end

    def _transfer(self, source: int, target: int) -> None:
        """Runs every transfer in this direction whose send and receive have both been issued."""
        channel = self.channels[source, target]
        while channel.done < min(len(channel.sent), len(channel.posted)):
            (sent, i), (posted, j) = channel.sent[channel.done], channel.posted[channel.done]
            receive = self.schedule[target][j]
            stage = self._stage(target, receive)
            start = max(sent, posted, channel.free)
            channel.free = start + self.times[receive.slice].transfer(receive, stage)
            channel.done += 1
            self.spans[source][i] = Span(self.schedule[source][i], start, channel.free)
            self.spans[target][j] = Span(receive, start, channel.free)
            self.arrived[target, (receive.kind, stage, receive.micro_batch, receive.slice)] = channel.free
            if target not in self.awake:
                self.awake.append(target)

    def _stage(self, rank: int, action: Action) -> int:
        return action.chunk * self.stages + rank
