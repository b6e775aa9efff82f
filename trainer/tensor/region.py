"""How the tokens of sequences lie on ranks between the matrices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from trainer.comm.collectives import Group, Pending
from trainer.shared.parallel.sequence import Runs, part, zigzag


@dataclass
class SequenceSlices:
    """The slices that sequences are computed in, one after the other; none where they are computed whole."""

    runs: Runs = ()
    now: range | None = None  # the one that is being computed
    left: dict[object, Any] = field(default_factory=dict)  # what it and the others of its micro-batch leave to each other
    micro_batches: dict[tuple[int, int], dict[object, Any]] = field(default_factory=dict)  # the same, by chunk and micro-batch in flight

    @property
    def length(self) -> int:
        """Returns the length of whole sequences."""
        return self.runs[-1].stop

    @contextlib.contextmanager
    def at(self, chunk: int, micro_batch: int, number: int) -> Iterator[None]:
        """Makes slice ``number`` of a micro-batch the one that is computed inside the ``with`` block."""
        if self.runs:
            self.now, self.left = self.runs[number], self.micro_batches.setdefault((chunk, micro_batch), {})
        try:
            yield
        finally:
            self.now, self.left = None, {}

    def forget(self, chunk: int, micro_batch: int) -> None:
        """Drops what a micro-batch has left, whose backward is over."""
        self.micro_batches.pop((chunk, micro_batch), None)

    def clear(self) -> None:
        """Drops what a step that failed has left."""
        self.micro_batches.clear()


@dataclass(frozen=True)
class Region:
    """The ranks that share sequences. Context ranks have two pieces of each; within them, activations are replicated over the tensor ranks
    of ``group``, or sharded along the sequence, which is dimension 0.

    Shapes here count a context rank's part as the whole sequence, and so a slice that is computed alone.
    """

    group: Group
    sequence_sharded: bool  # sequence parallelism
    context: Group
    slices: SequenceSlices = field(default_factory=SequenceSlices, compare=False)

    @property
    def parts(self) -> int:
        """Returns in how many parts tensor ranks share a sequence."""
        return self.group.size if self.sequence_sharded else 1

    def rows(self, whole: Tensor) -> int:
        """Returns the local length of a full sequence [s, ...]."""
        return whole.shape[0] // self.parts

    def gather(self, x: Tensor) -> tuple[Tensor, Pending]:
        """Returns the full sequence of a sharded x [s/t, ...]; x itself if it is replicated. Usable after the wait."""
        if self.parts == 1:
            return x, Pending(None, self.group, "all_gather")
        x = x.contiguous()
        whole = x.new_empty(x.shape[0] * self.group.size, *x.shape[1:])
        return whole, self.group.all_gather(whole, x)

    def sum(self, x: Tensor) -> tuple[Tensor, Pending]:
        """Sums x [s, ...] over the tensor ranks, replicated or sharded. x is overwritten, or must live until the wait."""
        if self.parts == 1:
            return x, self.group.all_reduce(x)
        piece = x.new_empty(self.rows(x), *x.shape[1:])
        return piece, self.group.reduce_scatter(piece, x)

    def whole_runs(self, rows: int) -> Runs:
        """Returns the positions of a full sequence of so many rows."""
        if self.slices.now is not None:
            return (self.slices.now,)
        return zigzag(rows * self.context.size, self.context.size, self.context.index)

    def runs(self, rows: int) -> Runs:
        """Returns the positions of the rows of x, sharded or replicated."""
        return part(self.whole_runs(rows * self.parts), self.parts, self.group.index if self.sequence_sharded else 0)

    def length(self, rows: int) -> int:
        """Returns the length of the sequences of which full ones here have so many rows."""
        return self.slices.length if self.slices.now is not None else rows * self.context.size


@lru_cache(maxsize=64)
def places(runs: Runs, device: torch.device) -> Tensor:
    """Returns the positions as a tensor. It is shared: callers must not write it."""
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])


def rows_at(whole: Tensor, runs: Runs) -> Tensor:
    """Returns the rows of ``whole`` [s, ...] at these positions: a view, if they are neighbours."""
    parts = [whole[run.start : run.stop] for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def ready(started: tuple[Tensor, Pending]) -> Tensor:
    """Waits for a started gather or sum and returns its tensor."""
    tensor, pending = started
    pending.wait()
    return tensor
