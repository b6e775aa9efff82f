"""Completes an order of computation to a schedule: adds the sends, receives, gathers and reductions.

The rules, which ``tests.spec.schedule_validator`` checks:

* a tensor is sent right after the computation that made it;
* it is received with *two buffers*: while one computation runs, the receive of the next one's input is already posted, so the
  transfer is hidden and at most one more buffer is waiting;
* between two ranks and in one direction, tensors arrive in the order in which they were sent. NCCL ignores tags, so this
  order alone identifies them; a receive is moved ahead if a tensor that is needed later was sent earlier;
* a chunk's parameters are gathered one computation ahead of its first; its gradients are reduced right after its last.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer.shared.parallel.actions import Action, Kind, Schedule

Message = tuple[Kind, int, int, int]
"""The identity of a tensor between ranks: the kind of its receive, the global stage that uses it, the micro-batch, its slice."""

AHEAD = 1
"""Number of computations before its use at which a receive or gather is posted."""


def add_communication(compute: Schedule) -> Schedule:
    """Inserts sends, receives, gathers and reductions into ``compute`` (computation only)."""
    stages = len(compute)
    total = stages * (1 + max(action.chunk for actions in compute for action in actions))
    queues = _arrivals(compute, total)
    return [list(_weave(rank, compute[rank], stages, total, queues[rank])) for rank in range(stages)]


def sent_by(action: Action, rank: int, stages: int, total: int) -> tuple[Message, int] | None:
    """Returns the message that a computation sends to another rank, and that rank; None if its output stays on this rank."""
    stage = action.chunk * stages + rank
    if action.kind is Kind.FORWARD:
        target, kind = stage + 1, Kind.RECV_FORWARD
    elif action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
        target, kind = stage - 1, Kind.RECV_BACKWARD
    else:
        return None
    if not 0 <= target < total or target % stages == rank:
        return None
    return (kind, target, action.micro_batch, action.slice), target % stages


def needed_by(action: Action, rank: int, stages: int, total: int) -> tuple[Message, int] | None:
    """Returns the message that a computation needs from another rank, and that rank; None if its input is here already."""
    stage = action.chunk * stages + rank
    if action.kind is Kind.FORWARD:
        source, kind = stage - 1, Kind.RECV_FORWARD
    elif action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
        source, kind = stage + 1, Kind.RECV_BACKWARD
    else:
        return None
    if not 0 <= source < total or source % stages == rank:
        return None
    return (kind, stage, action.micro_batch, action.slice), source % stages


def _arrivals(compute: Schedule, total: int) -> list[dict[int, list[Message]]]:
    """Returns, for each rank, the messages from each peer as a stack: ``pop`` yields them in the order in which that peer sends them."""
    queues: list[dict[int, list[Message]]] = [{} for _ in compute]
    for rank, actions in enumerate(compute):
        for action in reversed(actions):
            if sent := sent_by(action, rank, len(compute), total):
                message, peer = sent
                queues[peer].setdefault(rank, []).append(message)
    return queues


def _weave(rank: int, actions: list[Action], stages: int, total: int, queues: dict[int, list[Message]]) -> Iterator[Action]:
    """Yields the actions of one rank with its communication. Consumes ``queues``."""
    received: set[Message] = set()
    first = {action.chunk: i for i, action in reversed(list(enumerate(actions)))}
    last = {action.chunk: i for i, action in enumerate(actions)}
    posted = 0
    for i, action in enumerate(actions):
        while posted <= min(i + AHEAD, len(actions) - 1):
            upcoming = actions[posted]
            if first[upcoming.chunk] == posted:
                yield Action(Kind.GATHER, upcoming.chunk)
            needed = needed_by(upcoming, rank, stages, total)
            while needed and needed[0] not in received:
                kind, stage, micro_batch, part = message = queues[needed[1]].pop()
                received.add(message)
                yield Action(kind, stage // stages, micro_batch, needed[1], part)
            posted += 1
        yield action
        if sent := sent_by(action, rank, stages, total):
            (kind, *_), peer = sent
            send = Kind.SEND_FORWARD if kind is Kind.RECV_FORWARD else Kind.SEND_BACKWARD
            yield Action(send, action.chunk, action.micro_batch, peer, action.slice)
        if last[action.chunk] == i:
            yield Action(Kind.REDUCE, action.chunk)
