"""Tensor and sequence parallel forms of the layers, as pairs of forward and backward written by hand.

Between the matrices, activations are replicated over the tensor ranks or, with sequence parallelism, sharded along the sequence
(dimension 0). Inside, heads, ffn columns or vocabulary rows are sharded.

    enter  (column layers)   forward: nothing     / all-gather          backward: all-reduce / reduce-scatter
    leave  (row layers)      forward: all-reduce  / reduce-scatter      backward: nothing    / all-gather

(replicated / sequence-sharded; Megatron's f and g, Shoeybi et al. 2019 section 3, Korthikanti et al. 2022 section 4.2). Only the
sharded input is saved. Backward gathers it again while it computes the input gradient, and sums the input gradient over ranks
while it computes the weight gradient. Weight gradients bypass autograd: they go directly into the flat gradient buffer through
``Gradients``, which also lets a schedule run them later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer.comm.collectives import Group, Pending


class Gradients(Protocol):
    """Receives the gradients of parameters. ``trainer.state.sharding`` implements it; the layers know nothing of buckets."""

    def later(self, work: Callable[[], None], *needs: Tensor) -> None:
        """Run ``work``, which computes weight gradients from the tensors ``needs``: now, or when the schedule says so."""

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add ``gradient``, of the parameter's shape."""

    def add_product(self, parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Add ``left^T right`` for left [n, out] and right [n, in], where the weight is [*out, in]."""

    def add_rows(self, parameter: nn.Parameter, rows: Tensor, gradient: Tensor) -> None:
        """Add ``gradient`` [n, h] to ``rows`` [n] of a weight [V, h]."""


@dataclass(frozen=True)
class Region:
    """How activations are distributed between the matrices: replicated over the tensor ranks, or sharded along the sequence."""

    group: Group
    sequence_sharded: bool  # sequence parallelism

    def rows(self, whole: Tensor) -> int:
        """Local length of a full sequence [s, ...]."""
        return whole.shape[0] // self.group.size if self.sequence_sharded else whole.shape[0]

    def gather(self, x: Tensor) -> tuple[Tensor, Pending]:
        """The full sequence of a sharded x [s/t, ...]; x itself if it is replicated. Usable after the wait."""
        if not self.sequence_sharded or self.group.size == 1:
            return x, Pending(None, self.group, "all_gather")
        x = x.contiguous()
        whole = x.new_empty(x.shape[0] * self.group.size, *x.shape[1:])
        return whole, self.group.all_gather(whole, x)

    def sum(self, x: Tensor) -> tuple[Tensor, Pending]:
        """Sum of x [s, ...] over the ranks, replicated or sharded. x is overwritten, or must live until the wait."""
        if not self.sequence_sharded or self.group.size == 1:
            return x, self.group.all_reduce(x)
        piece = x.new_empty(self.rows(x), *x.shape[1:])
        return piece, self.group.reduce_scatter(piece, x)


def ready(started: tuple[Tensor, Pending]) -> Tensor:
    """Wait for a started gather or sum; its tensor."""
    tensor, pending = started
    pending.wait()
    return tensor


class ColumnLinear(nn.Module):
    """Linear whose outputs are sharded over the tensor ranks: enter, then multiply. Weight [*local outputs, inputs]."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, region: Region, gradients: Gradients):
        super().__init__()
        self.weight, self.bias = weight, bias
        self.region, self.gradients = region, gradients

    def forward(self, x: Tensor) -> Tensor:
        return _Column.apply(x, self.weight, self.bias, self)


class RowLinear(nn.Module):
    """Linear whose inputs are sharded over the tensor ranks: multiply, then leave. Weight [outputs, local inputs].

    The bias is added once, after the sum. With ``skip_output`` forward only saves what backward needs and returns zeros.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, region: Region, gradients: Gradients, skip_output: bool = False):
        super().__init__()
        self.weight, self.bias = weight, bias
        self.region, self.gradients, self.skip_output = region, gradients, skip_output

    def without_output(self) -> RowLinear:
        """The same layer, with the same parameters, that skips its output."""
        return RowLinear(self.weight, self.bias, self.region, self.gradients, skip_output=True)

    def forward(self, x: Tensor) -> Tensor:
        y = _Row.apply(x, self.weight, self)
        return y if self.bias is None else y + self.bias


class VocabularyEmbedding(nn.Module):
    """Token embedding whose rows are sharded over the tensor ranks: each looks up its own tokens, then leave.

    Tokens [s, b] -> [s, b, h] or [s/t, b, h].
    """

    def __init__(self, weight: nn.Parameter, region: Region, gradients: Gradients):
        super().__init__()
        self.weight, self.region, self.gradients = weight, region, gradients

    def forward(self, tokens: Tensor) -> Tensor:
        return _Embedding.apply(tokens, self.weight, self)


class ShardedPositionEmbedding(nn.Module):
    """Adds learned positions to x [s or s/t, b, h]: the rows of this rank's part of the sequence."""

    def __init__(self, weight: nn.Parameter, region: Region):
        super().__init__()
        self.weight, self.region = weight, region

    def forward(self, x: Tensor) -> Tensor:
        first = x.shape[0] * self.region.group.index if self.region.sequence_sharded else 0
        return x + self.weight[first : first + x.shape[0]].unsqueeze(1)


def _matrix(weight: Tensor) -> Tensor:
    return weight.flatten(0, -2)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: ColumnLinear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        whole = ready(layer.region.gather(x))
        y = torch.nn.functional.linear(whole, _matrix(weight), None if bias is None else bias.flatten())
        return y.unflatten(-1, weight.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (x,), layer = ctx.saved_tensors, ctx.layer
        dy = gradients[0].flatten(2).flatten(0, 1)  # [s b, out]
        gathered = layer.region.gather(x)
        dx = (dy @ _matrix(layer.weight)).view(-1, *x.shape[1:])
        whole = ready(gathered)
        summed = layer.region.sum(dx)

        def weight_gradient() -> None:
            layer.gradients.add_product(layer.weight, dy, whole.flatten(0, 1))
            if layer.bias is not None:
                layer.gradients.add(layer.bias, dy.sum(0).view(layer.bias.shape))

        layer.gradients.later(weight_gradient, dy, whole)
        return ready(summed), None, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: RowLinear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        if layer.skip_output:
            return x.new_zeros(layer.region.rows(x), *x.shape[1:-1], weight.shape[0])
        return ready(layer.region.sum(x @ weight.t()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (x,), layer = ctx.saved_tensors, ctx.layer
        dy = ready(layer.region.gather(gradients[0])).flatten(0, 1)
        dx = (dy @ layer.weight).view(x.shape)
        layer.gradients.later(lambda: layer.gradients.add_product(layer.weight, dy, x.flatten(0, 1)), dy, x)
        return dx, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, layer: VocabularyEmbedding) -> Tensor:
        rows = tokens - weight.shape[0] * layer.region.group.index
        absent = (rows < 0) | (rows >= weight.shape[0])
        rows = rows.masked_fill(absent, 0)
        ctx.rows, ctx.absent, ctx.layer = rows, absent, layer
        return ready(layer.region.sum(weight[rows].masked_fill_(absent.unsqueeze(-1), 0)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        layer = ctx.layer
        dy = ready(layer.region.gather(gradients[0])).masked_fill(ctx.absent.unsqueeze(-1), 0)
        layer.gradients.later(lambda: layer.gradients.add_rows(layer.weight, ctx.rows.flatten(), dy.flatten(0, 1)), dy)
        return None, None, None
