"""The instructions of a pipeline rank, as data: schedules consist of them, the trainer executes them, the cost model simulates them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The kind of an action. Sends do not block; a receive is posted here and waited for by the computation that needs it."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRAD = "input_grad"
    WEIGHT_GRAD = "weight_grad"
    SEND_FORWARD = "send_forward"
    RECV_FORWARD = "recv_forward"
    SEND_BACKWARD = "send_backward"
    RECV_BACKWARD = "recv_backward"
    GATHER = "gather"
    REDUCE = "reduce"

    @property
    def computes(self) -> bool:
        return self in COMPUTE

    @property
    def sends(self) -> bool:
        return self in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)

    @property
    def receives(self) -> bool:
        return self in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD})
"""Kinds that occupy the device."""


@dataclass(frozen=True, slots=True)
class Action:
    """One instruction for one pipeline rank.

    ``chunk`` is local (0 .. chunks-1). ``peer`` is the pipeline rank of a send or receive, else -1. ``GATHER`` and ``REDUCE``
    concern a whole chunk: their ``micro_batch`` is -1. ``slice`` counts the slices of the micro-batch's sequences; of whole sequences it
    is 0. A receive names the chunk and micro-batch that *use* the tensor, a send those that *made* it.

    ``GATHER`` starts the all-gather of a chunk's parameters, which must be complete when the chunk next computes. ``REDUCE`` says
    that no more gradients of the chunk will come: the remaining ones are reduced.
    """

    kind: Kind
    chunk: int
    micro_batch: int = -1
    peer: int = -1
    slice: int = 0

    @property
    def item(self) -> tuple[int, int, int]:
        """Returns chunk, micro-batch and slice."""
        return self.chunk, self.micro_batch, self.slice

    def __str__(self) -> str:
        where = f"{self.chunk}" + (f".{self.micro_batch}" if self.micro_batch >= 0 else "") + (f" slice {self.slice}" if self.slice else "")
        return f"{self.kind.value} {where}" + (f" peer {self.peer}" if self.peer >= 0 else "")


Schedule = list[list[Action]]
"""One list of actions per pipeline rank."""
