"""Recomputation: keep the inputs of a stretch of forward, and run it again when its gradient is wanted.

selective   the attention core of every block: its s x s matrices are large and cheap (Korthikanti et al. 2022, section 5)
full        whole blocks: only their inputs are kept, for one more forward up to the last input that backward needs: the product that ends
            the MLP, and its sum over the tensor ranks, result in nothing that backward asks for
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer.models.transformer import Transformer
from trainer.spec import LayoutConfig
from trainer.tensor.dropout import Noise
from trainer.tensor.layers import RowLinear


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
            model.blocks[name] = Recomputed(block, noise, block.get_submodule("mlp.down"))


class Recomputed(nn.Module):
    """A module that keeps its inputs and nothing else. Dropout repeats itself, because its noise is a function of the place.

    ``ending`` is a layer inside whose result is only added to something, with dropout at most: it is not computed again.
    """

    def __init__(self, inner: nn.Module, noise: Noise, ending: nn.Module | None = None):
        super().__init__()
        self.inner, self.noise = inner, noise
        self.unwanted = [ending] if isinstance(ending, RowLinear) else []  # a list, for a layer in an attribute counts as a submodule

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Tensor = _Recompute.apply(self, *inputs)
        return output

    def again(self, *inputs: Tensor) -> Tensor:
        """Forward for the sake of its graph: the output has no values."""
        for layer in self.unwanted:
            layer.unwanted = True
        try:
            output: Tensor = self.inner(*inputs)
        finally:
            for layer in self.unwanted:
                layer.unwanted = False
        return output


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: Recomputed, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.module, ctx.place = module, module.noise.place
        output: Tensor = module.inner(*inputs)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        with torch.enable_grad(), ctx.module.noise.at(ctx.place):
            output = ctx.module.again(*inputs)
        torch.autograd.backward((output,), (gradients[0],))
        return None, *(tensor.grad for tensor in inputs)
