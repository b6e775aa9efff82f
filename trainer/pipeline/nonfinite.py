"""Finds the origin of a non-finite value: recomputes the step and checks every intermediate value.

After a step the value is on all ranks, because sums over ranks spread it. But samples, weights and dropout have not changed, so
the step can be repeated, and each rank notes its own first non-finite value. Forward carries it to higher stages, backward to
lower ones. Tensor ranks run the same program: the one that saw it after fewer values had it before it was summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.comm.collectives import Group
from trainer.pipeline.runtime import PipelineRuntime
from trainer.state.sharding import ShardedState

WEIGHTS, FORWARD, BACKWARD = range(3)


@dataclass(frozen=True, order=True)
class Origin:
    """A non-finite value. The smallest of several is the first in time."""

    phase: int
    distance: int  # stages before it in this phase
    values: int  # that its rank had checked before
    rank: int
    what: str


class FiniteCheck:
    """Notes the first non-finite value of this rank."""

    def __init__(self, rank: int, pipeline: PipelineRuntime, stages: int):
        self.rank, self.pipeline, self.stages = rank, pipeline, stages
        self.values = 0
        self.first: Origin | None = None

    def look(self, phase: int, what: str, value: Any) -> None:
        """Checks a tensor; anything else is ignored."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return
        self.values += 1
        if not bool(torch.isfinite(value).all()):
            stage = self.pipeline.chunk * self.stages + self.pipeline.up.index
            found = Origin(phase, -stage if phase == BACKWARD else stage, self.values, self.rank, what)
            self.first = found if self.first is None else min(self.first, found)

    @contextmanager
    def watching(self, state: ShardedState) -> Iterator[None]:
        """Checks the outputs of all modules and all parameter gradients inside the ``with`` block."""
        with ExitStack() as hooks:
            for chunk in self.pipeline.chunks:
                for name, module in chunk.model.named_modules():
                    if name:
                        hooks.enter_context(module.register_forward_hook(self._output(name)))
            state.arriving = lambda name, gradient: self.look(BACKWARD, f"gradient of {name}", gradient)
            hooks.callback(setattr, state, "arriving", None)
            yield

    def _output(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, inputs, output: self.look(FORWARD, f"output of {name}", output)


def find(world: Group, state: ShardedState, pipeline: PipelineRuntime, stages: int, step: Callable[[], list[Tensor]]) -> Origin | None:
    """Recomputes ``step`` and returns the first non-finite value; None if there is none. Collective."""
    check = FiniteCheck(world.rank, pipeline, stages)
    for bucket in state.buckets:
        for piece in bucket.optimizer_shards():
            check.look(WEIGHTS, f"weight {piece.record.name}", piece.weight)
    with check.watching(state):
        for loss in step():
            check.look(FORWARD, "loss", loss)
    found = [origin for origin in world.gather_objects(check.first) if origin is not None]
    return min(found, default=None)
