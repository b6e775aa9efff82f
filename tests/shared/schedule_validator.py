"""Is a schedule one that every rank can run to the end, and right? The rules in one place: tests hold every schedule to them."""

from __future__ import annotations

from collections import Counter

from trainer.shared.parallel.actions import Action, Kind, Schedule
from trainer.shared.parallel.messages import Message, needed_by, sent_by
from trainer.shared.parallel.schedule import in_flight
from trainer.shared.parallel.simulate import Times, simulate


class ScheduleError(ValueError):
    """A schedule that breaks a rule; the message names rank and action."""


def validate(schedule: Schedule, chunks: int, micro_batches: int, most_in_flight: int | None = None, slices: int = 1) -> None:
    """Raise ``ScheduleError`` (or ``simulate.Deadlock``) unless ``schedule`` is complete, ordered and free of deadlock.

    ``most_in_flight`` bounds the (chunk, micro-batch, slice) triples that any rank holds.
    """
    total = len(schedule) * chunks
    for rank, actions in enumerate(schedule):
        _check_complete(rank, actions, chunks, micro_batches, slices)
        _check_local_order(rank, actions, len(schedule), total)
        if most_in_flight is not None and in_flight(actions) > most_in_flight:
            raise ScheduleError(f"rank {rank} holds {in_flight(actions)} micro-batches at once, more than {most_in_flight}")
    _check_channels(schedule, total)
    simulate(schedule, Times.equal(total))


def _check_complete(rank: int, actions: list[Action], chunks: int, micro_batches: int, slices: int) -> None:
    """Every chunk runs every slice of every micro-batch exactly once each way, and is gathered and reduced exactly once."""
    counts = Counter((a.kind, *a.item) for a in actions if a.kind.computes or a.kind in (Kind.GATHER, Kind.REDUCE))
    split = any(a.kind is Kind.INPUT_GRAD for a in actions)
    kinds = [Kind.FORWARD, *((Kind.INPUT_GRAD, Kind.WEIGHT_GRAD) if split else (Kind.BACKWARD,))]
    expected = Counter((kind, c, m, s) for kind in kinds for c in range(chunks) for m in range(micro_batches) for s in range(slices))
    expected += Counter((kind, c, -1, 0) for kind in (Kind.GATHER, Kind.REDUCE) for c in range(chunks))
    for wrong in (expected - counts) + (counts - expected):
        kind, chunk, micro_batch, part = wrong
        raise ScheduleError(
            f"rank {rank} has '{Action(kind, chunk, micro_batch, slice=part)}' {counts[wrong]} times, not {expected[wrong]}"
        )


def _check_local_order(rank: int, actions: list[Action], stages: int, total: int) -> None:
    """What an action needs from its own rank comes before it."""
    seen: set[object] = set()
    slices = 1 + max(action.slice for action in actions)
    for action in actions:
        key = action.item
        needs: list[object] = []
        if action.kind.computes:
            needs.append((Kind.GATHER, action.chunk, -1, 0))
            neighbour = action.slice + (-1 if action.kind is Kind.FORWARD else 1)
            if 0 <= neighbour < slices:  # keys and values of the slices before, their gradient of those behind
                needs.append((action.kind, action.chunk, action.micro_batch, neighbour))
            if needed := needed_by(action, rank, stages, total):
                needs.append((needed[0][0], *key))
        needs += [(kind, *key) for kind in _BEFORE.get(action.kind, ())]
        if action.kind is Kind.SEND_BACKWARD:
            needs.append((Kind.INPUT_GRAD if any(a.kind is Kind.INPUT_GRAD for a in actions) else Kind.BACKWARD, *key))
        if missing := [need for need in needs if need not in seen]:
            raise ScheduleError(f"rank {rank} runs '{action}' before {missing[0]}")
        if action.kind.computes and (Kind.REDUCE, action.chunk, -1, 0) in seen:
            raise ScheduleError(f"rank {rank} runs '{action}' after the gradients of its chunk were reduced")
        seen.add((action.kind, *key))


_BEFORE = {
    Kind.BACKWARD: (Kind.FORWARD,),
    Kind.INPUT_GRAD: (Kind.FORWARD,),
    Kind.WEIGHT_GRAD: (Kind.INPUT_GRAD,),
    Kind.SEND_FORWARD: (Kind.FORWARD,),
}


def _check_channels(schedule: Schedule, total: int) -> None:
    """Between two ranks, in one direction, what is sent is what is received, in the same order, and all that is needed."""
    stages = len(schedule)
    sent: dict[tuple[int, int], list[Message]] = {}
    received: dict[tuple[int, int], list[Message]] = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            stage = action.chunk * stages + rank
            if action.kind is Kind.SEND_FORWARD:
                sent.setdefault((rank, action.peer), []).append((Kind.RECV_FORWARD, stage + 1, action.micro_batch, action.slice))
            elif action.kind is Kind.SEND_BACKWARD:
                sent.setdefault((rank, action.peer), []).append((Kind.RECV_BACKWARD, stage - 1, action.micro_batch, action.slice))
            elif action.kind.receives:
                received.setdefault((action.peer, rank), []).append((action.kind, stage, action.micro_batch, action.slice))
    for pair in sent.keys() | received.keys():
        if sent.get(pair) != received.get(pair):
            raise ScheduleError(f"rank {pair[1]} does not receive what rank {pair[0]} sends, in that order")
    due = Counter(s[0] for r, actions in enumerate(schedule) for a in actions if (s := sent_by(a, r, stages, total)))
    if due != Counter(message for messages in sent.values() for message in messages):
        raise ScheduleError("some tensor is not sent exactly once")
