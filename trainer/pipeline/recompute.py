"""Recomputation: save the inputs of a module, and run its forward again when its gradient is needed.

selective   the attention core of every block: its s x s matrices are large and cheap (Korthikanti et al. 2022, section 5)
full        whole blocks: only their inputs are saved. The second forward skips the last product of the MLP and its sum over the tensor
            ranks: backward does not need their result
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.models.attention import AttentionCore
from trainer.models.transformer import Transformer
from trainer.shared.parallel.balance import blocks_per_chunk
from trainer.shared.run.flops import recomputed_flops
from trainer.shared.run.resolved import ResolvedTrainConfig
from trainer.shared.run.schema import LayoutConfig
from trainer.tensor.dropout import Noise
from trainer.tensor.layers import RowLinear


def chosen_blocks(layout: LayoutConfig, count: int) -> list[bool]:
    """Returns, for each of a chunk's ``count`` blocks, whether it is recomputed, wholly or in its attention core."""
    if layout.recompute == "none":
        return [False] * count
    if layout.recompute == "selective":
        return [True] * count
    first = count if layout.recompute_layers is None else layout.recompute_layers
    return [i < first and i % layout.recompute_every == 0 for i in range(count)]


def recomputed_of(config: ResolvedTrainConfig) -> float:
    """Returns the FLOPs per step, over all ranks, that recomputation adds."""
    blocks = sum(sum(chosen_blocks(config.layout, count)) for count in blocks_per_chunk(config.model, config.layout))
    return recomputed_flops(config.model, config.layout, blocks, config.run.global_batch)


def apply_recompute(model: Transformer, layout: LayoutConfig, noise: Noise) -> None:
    """Wraps the modules that the layout recomputes."""
    for chosen, (name, block) in zip(chosen_blocks(layout, len(model.blocks)), list(model.blocks.items())):
        if not chosen:
            continue
        cores = {path: core for path, core in block.named_modules() if isinstance(core, AttentionCore)}
        for core in cores.values():
            core.gathers_again = False  # what it gathers anew for backward is needed at once
        if layout.recompute == "selective":
            for path, core in cores.items():
                block.get_submodule(path.rpartition(".")[0]).core = Recomputed(core, noise)
        else:
            model.blocks[name] = Recomputed(block, noise, without_last_product(block))


def without_last_product(block: nn.Module) -> nn.Module:
    """Returns a block that shares all parameters and layers with ``block``, except that the last product of its MLP is skipped.

    Backward never reads the output of that product: it is only added to the residual stream, with dropout at most.
    """
    mlp, down = block.get_submodule("mlp"), block.get_submodule("mlp.down")  # of experts, all products are weighed
    normed = getattr(block, "mlp_post_norm", None) is not None
    if normed or not isinstance(down, RowLinear) or mlp._forward_hooks:  # a norm or a hook reads the output
        return block
    return _with_child(block, "mlp", _with_child(mlp, "down", down.without_output()))


def _with_child(module: nn.Module, name: str, child: nn.Module) -> nn.Module:
    """Returns a copy of ``module`` with another child of that name; everything else is shared."""
    twin = copy.copy(module)
    twin._modules = module._modules | {name: child}
    return twin


class Recomputed(nn.Module):
    """A module that saves only its inputs. Dropout repeats itself, because it is a function of its key.

    ``again`` is the module that backward runs for its graph (default: the module itself).
    """

    def __init__(self, inner: nn.Module, noise: Noise, again: nn.Module | None = None):
        super().__init__()
        self.inner, self.noise = inner, noise
        trains = any(parameter.requires_grad for parameter in inner.parameters())
        self.trigger = torch.empty(0, requires_grad=trains)  # else backward would not come where no input has a gradient
        self.repeated = [inner if again is None else again]  # in a list, because a module in an attribute would be a submodule

    def forward(self, *inputs: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # a part of a block that is one graph
            again: Tensor = checkpoint(self.inner, *inputs, use_reentrant=False, preserve_rng_state=False)
            return again
        output: Tensor = _Recompute.apply(self, self.trigger, *inputs)
        return output

    def again(self, *inputs: Tensor) -> Tensor:
        """Runs forward for its graph; the values of the output may be missing."""
        output: Tensor = self.repeated[0](*inputs)
        return output


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: Recomputed, trigger: Tensor, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.module, ctx.key = module, module.noise.key
        output: Tensor = module.inner(*inputs)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [t if t is None else t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
        with torch.enable_grad(), ctx.module.noise.at(ctx.key):
            output = ctx.module.again(*inputs)
        torch.autograd.backward((output,), (gradients[0],))
        return None, None, *(tensor if tensor is None else tensor.grad for tensor in inputs)
