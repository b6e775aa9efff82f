"""Finds where a value that is not finite came from: the step is computed once more, with every intermediate value looked at.

After a step the value is everywhere: sums over ranks carry it to all of them. But samples, weights and dropout are what they were,
so the step repeats itself, and this time each rank notes the first such value of its own. Forward carries it from lower stages to
higher ones and backward the other way; tensor ranks run the same program, so of them the one that saw it after fewer values had it
before it was summed.
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
    """A value that is not finite. Of several, the least is the first."""

    phase: int
    distance: int  # stages that the phase passes before it
    values: int  # that its rank had looked at before
    rank: int
    what: str


class Lookout:
    """Notes the first value of this rank that is not finite."""

    def __init__(self, rank: int, pipeline: PipelineRuntime, stages: int):
        self.rank, self.pipeline, self.stages = rank, pipeline, stages
        self.values = 0
        self.first: Origin | None = None

    def look(self, phase: int, what: str, value: Any) -> None:
        """Look at a tensor; anything else is passed over."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return
        self.values += 1
        if not bool(torch.isfinite(value).all()):
            stage = self.pipeline.chunk * self.stages + self.pipeline.up.index
            found = Origin(phase, -stage if phase == BACKWARD else stage, self.values, self.rank, what)
            self.first = found if self.first is None else min(self.first, found)

    @contextmanager
    def watching(self, state: ShardedState) -> Iterator[None]:
        """Inside, the outputs of all modules and all gradients that arrive are looked at."""
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
    """Where the first value that is not finite appears when ``step`` is computed again; None if it does not. Collective."""
    lookout = Lookout(world.rank, pipeline, stages)
    for bucket in state.buckets:
        for piece in bucket.owned():
            lookout.look(WEIGHTS, f"weight {piece.record.name}", piece.weight)
    with lookout.watching(state):
        for loss in step():
            lookout.look(FORWARD, "loss", loss)
    found = [origin for origin in world.gather_objects(lookout.first) if origin is not None]
    return min(found, default=None)
