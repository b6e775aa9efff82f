"""Pipeline schedules as data: one list of actions per pipeline rank, made by pure functions.

A schedule is built in two steps. The functions here give the order in which a rank *computes*; ``trainer.shared.parallel.messages`` then
inserts the communication that this order needs. The trainer executes the lists, the cost model simulates the same lists
(``trainer.shared.parallel.simulate``).

Words: a pipeline rank holds ``chunks`` chunks of the model; the global *stage* of chunk c on rank r is ``c * stages + r``,
where ``stages`` is the number of pipeline ranks. A micro-batch is *in flight* on a chunk from its forward to the end of its
backward (its weight gradient, where that is separate).

A micro-batch's sequences may be cut in ``slices``, each of which is computed as if it were a micro-batch, and sees the slices before it.
Those therefore run forward first to last, and backward last to first: the gradient of a slice's keys and values comes from all behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from trainer.shared.parallel.actions import Action, Kind, Schedule
from trainer.shared.parallel.messages import add_communication
from trainer.shared.run.errors import ConfigError, listed, nearest


def build(name: str, stages: int, chunks: int, micro_batches: int, slices: int = 1) -> Schedule:
    """Returns the complete schedule: computation and communication of every pipeline rank.

    ``name`` is one of ``ORDERS``; only ``interleaved`` takes ``chunks`` > 1, and only ``sliced_1f1b`` ``slices`` > 1. Any number of
    micro-batches >= 1 works. Raises ``ConfigError`` for an unknown name or an impossible combination.
    """
    return add_communication(compute_order(name, stages, chunks, micro_batches, slices))


def compute_order(name: str, stages: int, chunks: int, micro_batches: int, slices: int = 1) -> Schedule:
    """Returns only the computation of each rank, in order."""
    if name not in ORDERS:
        raise ConfigError(f"layout.schedule={name} is not one of {listed(ORDERS)}{nearest(name, ORDERS)}")
    if min(stages, chunks, micro_batches, slices) < 1:
        given = f"{stages}, {chunks}, {micro_batches}, {slices}"
        raise ConfigError(f"a pipeline schedule needs at least 1 stage, chunk, micro-batch and slice, not {given}")
    if chunks > 1 and name != "interleaved":
        raise ConfigError(f"layout.schedule={name} runs one chunk per rank, not {chunks}; use layout.schedule=interleaved")
    if slices > 1 and name != "sliced_1f1b":
        raise ConfigError(f"layout.schedule={name} runs whole sequences, not {slices} slices of each; use layout.schedule=sliced_1f1b")
    order = partial(ORDERS[name], **({"slices": slices} if slices > 1 else {}))
    return [list(order(rank, stages, chunks, micro_batches)) for rank in range(stages)]


def gpipe(rank: int, stages: int, chunks: int, micro_batches: int) -> Iterator[Action]:
    """Yields all forwards, then all backwards (Huang et al. 2019). In flight: every micro-batch."""
    yield from (Action(Kind.FORWARD, 0, m) for m in range(micro_batches))
    yield from (Action(Kind.BACKWARD, 0, m) for m in range(micro_batches))


def one_forward_one_backward(rank: int, stages: int, chunks: int, micro_batches: int, slices: int = 1) -> Iterator[Action]:
    """Yields 1F1B (Narayanan et al. 2019): just enough forwards to fill the pipeline, then one backward per forward.

    In flight on rank r: at most ``stages - r``; of slices (Sun et al. 2024, arXiv 2406.03488, section 3.2) ``stages - r + slices - 1``, for
    the first backward is that of a micro-batch's last slice.
    """
    forwards = [Action(Kind.FORWARD, 0, m, slice=s) for m in range(micro_batches) for s in range(slices)]
    backwards = [Action(Kind.BACKWARD, 0, m, slice=s) for m in range(micro_batches) for s in reversed(range(slices))]
    yield from _alternate(forwards, backwards, warm_up=stages - 1 - rank + slices - 1)


def interleaved(rank: int, stages: int, chunks: int, micro_batches: int) -> Iterator[Action]:
    """Yields interleaved 1F1B (Narayanan et al. 2021, section 2.2): groups of ``stages`` micro-batches visit one chunk after another.

    Warm-up is ``2 (stages - 1 - r) + (chunks - 1) stages`` forwards. Micro-batches that do not fill the last group are run as
    if the group were full and the missing ones took no time: dropping whole micro-batches from an order without deadlock
    leaves one without deadlock.
    """
    if stages == 1:  # nothing to fill: a micro-batch goes through all chunks and comes back at once
        for m in range(micro_batches):
            yield from (Action(Kind.FORWARD, c, m) for c in range(chunks))
            yield from (Action(Kind.BACKWARD, c, m) for c in reversed(range(chunks)))
        return
    groups = range(0, micro_batches, stages)
    units = [(c, first + i) for first in groups for c in range(chunks) for i in range(stages)]
    forwards = [Action(Kind.FORWARD, c, m) for c, m in units]
    backwards = [Action(Kind.BACKWARD, chunks - 1 - c, m) for c, m in units]
    order = _alternate(forwards, backwards, warm_up=2 * (stages - 1 - rank) + (chunks - 1) * stages)
    yield from (action for action in order if action.micro_batch < micro_batches)


def zero_bubble(rank: int, stages: int, chunks: int, micro_batches: int) -> Iterator[Action]:
    """Yields ZB-H1 (Qi et al. 2023, section 3): 1F1B whose backward is split into input gradient and weight gradient.

    The next rank waits only for the input gradient; rank r puts off each weight gradient by r micro-batches, which fills the
    idle time at the end. In flight: at most ``stages`` on every rank, the maximum of 1F1B. For equal stages the idle time is
    ``(stages - 1) (T_forward + T_input - T_weight)``, against ``(stages - 1) (T_forward + T_input + T_weight)`` of 1F1B.
    """
    warm_up = min(stages - 1 - rank, micro_batches)
    yield from (Action(Kind.FORWARD, 0, m) for m in range(warm_up))
    for m in range(micro_batches):
        if warm_up + m < micro_batches:
            yield Action(Kind.FORWARD, 0, warm_up + m)
        yield Action(Kind.INPUT_GRAD, 0, m)
        if m >= rank:
            yield Action(Kind.WEIGHT_GRAD, 0, m - rank)
    yield from (Action(Kind.WEIGHT_GRAD, 0, m) for m in range(max(0, micro_batches - rank), micro_batches))


ORDERS: dict[str, Callable[..., Iterator[Action]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "sliced_1f1b": one_forward_one_backward,
}
"""The order functions by the name that ``layout.schedule`` gives them."""


def in_flight(actions: Sequence[Action]) -> int:
    """Returns the most (chunk, micro-batch, slice) triples whose activations one rank holds at once, for its list of actions."""
    return max(held_at_once(actions), default=0)


def held_at_once(actions: Sequence[Action], sizes: Sequence[int] | None = None) -> Iterator[int]:
    """Yields what a rank holds at each of its forwards: triples, or the sum of the ``sizes`` of their slices."""
    held = 0
    for action in actions:
        size = 1 if sizes is None else sizes[action.slice]
        if action.kind is Kind.FORWARD:
            held += size
            yield held
        elif action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
            held -= size


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> Iterator[Action]:
    """Yields ``warm_up`` forwards, then forward and backward in turn, then the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    yield from forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards):
        yield forward
        yield backward
    yield from backwards[len(forwards) - warm_up :]
