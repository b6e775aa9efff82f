"""The way of what all heads share to the heads of every tensor rank: the key with the position of latent attention, an encoder's output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer.tensor.region import Region, ready
from trainer.tensor.traced import enter, numbered


class EnteredHeads(nn.Module):
    """x [s or s/t, b, ...] -> [s, b, ...]. Each rank's heads give a part of the gradient, so it is summed over the ranks; with sequence
    parallelism x is gathered, and a rank keeps its part of that sum."""

    def __init__(self, region: Region):
        super().__init__()
        self.region, self.number = region, numbered(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.region.group.size == 1:
            return x
        if torch.compiler.is_compiling():
            return enter(x, self.number, [x.shape[0] * self.region.parts, *x.shape[1:]])  # type: ignore[no-any-return]
        entered: Tensor = _Enter.apply(x, self)
        return entered

    def compute(self, x: Tensor) -> Tensor:
        """Returns the whole sequence, in memory of its own."""
        return ready(self.region.gather(x)) if self.region.parts > 1 else x.clone()

    def differentiate(self, dy: Tensor) -> Tensor:
        """Returns this rank's part of the sum of all ranks' gradients."""
        return ready(self.region.sum(dy.contiguous().clone()))


class _Enter(torch.autograd.Function):
    """``EnteredHeads`` outside of compiled code."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: EnteredHeads) -> Tensor:
        ctx.layer = layer
        return layer.compute(x) if layer.region.parts > 1 else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.layer.differentiate(gradients[0]), None
