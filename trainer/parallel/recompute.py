"""Recomputation: keep the inputs of a stretch of forward, and run it again when its gradient is wanted.

selective   the attention core of every block: its s x s matrices are large and cheap (Korthikanti et al. 2022, section 5)
full        whole blocks: only their inputs are kept, for one more forward
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import LayoutConfig
from trainer.models.transformer import Transformer
from trainer.parallel.noise import Noise


def chosen_blocks(layout: LayoutConfig, count: int) -> list[bool]:
    """Which of a chunk's ``count`` blocks are recomputed, wholly or in their attention core."""
    if layout.recompute == "none":
        return [False] * count
    if layout.recompute == "selective":
        return [True] * count
    first = count if layout.recompute_layers is None else layout.recompute_layers
    return [i < first and i % layout.recompute_every == 0 for i in range(count)]


def apply_recompute(model: Transformer, layout: LayoutConfig, noise: Noise) -> None:
    """Wrap what the layout says is recomputed."""
    for chosen, (name, block) in zip(chosen_blocks(layout, len(model.blocks)), list(model.blocks.items())):
        if not chosen:
            continue
        if layout.recompute == "selective":
            attention = block.get_submodule("attention")
            attention.core = Recomputed(attention.get_submodule("core"), noise)
        else:
            model.blocks[name] = Recomputed(block, noise)


class Recomputed(nn.Module):
    """A module that keeps its inputs and nothing else. Dropout repeats itself, because its noise is a function of the place."""

    def __init__(self, inner: nn.Module, noise: Noise):
        super().__init__()
        self.inner, self.noise = inner, noise

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Tensor = _Recompute.apply(self.inner, self.noise, *inputs)
        return output


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], noise: Noise, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.run, ctx.noise, ctx.place = run, noise, noise.place
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        with torch.enable_grad(), ctx.noise.at(ctx.place):
            output = ctx.run(*inputs)
        torch.autograd.backward((output,), (gradients[0],))
        return None, None, *(tensor.grad for tensor in inputs)
