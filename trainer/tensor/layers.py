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

import copy
from collections.abc import Callable, Iterable
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

    def add_products(self, parameter: nn.Parameter, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add one gradient that is a sum of such products. A pair is not used any more when the next one is asked for."""

    def counts(self, tensor: Tensor) -> object:
        """Count the bytes of a tensor of which autograd does not know, as long as the result lives."""

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


class LowRank(nn.Module):
    """A trained product beside a matrix, ``y += scale B A drop(x)``. A [r, local inputs], B [*local outputs, r].

    Beside a column layer A is replicated and B sharded like the matrix, beside a row layer the other way round. So the product is whole, or
    partial, wherever the matrix' own is, and moves no byte more. Gradients of the replicated factor are partial over the tensor ranks.
    """

    def __init__(self, a: nn.Parameter, b: nn.Parameter, scale: float, mask: InputMask | None):
        super().__init__()
        self.a, self.b, self.scale, self.mask = a, b, scale, mask

    @property
    def key(self) -> Any:
        """Of the dropout masks of this micro-batch, for its backward."""
        return None if self.mask is None else self.mask.key

    def dropped(self, x: Tensor, key: Any) -> Tensor:
        """The input [s, b, in] of A. It is computed again where backward needs it."""
        return x if self.mask is None else x * self.mask.of(x, key)

    def inner(self, x: Tensor) -> Tensor:
        """[s, b, in] -> [s b, r]."""
        return self.dropped(x, self.key).flatten(0, 1) @ self.a.t()

    def add_to(self, y: Tensor, inner: Tensor) -> None:
        """Add the product to y [s, b, out]."""
        y.view(-1, y.shape[-1]).addmm_(inner, _matrix(self.b).t(), alpha=self.scale)

    def inner_gradient(self, dy: Tensor) -> Tensor:
        """[s b, out] -> [s b, r]."""
        return (dy @ _matrix(self.b)) * self.scale

    def add_input_gradient(self, dx: Tensor, d_inner: Tensor, key: Any) -> None:
        """Add what flows to x, to dx [s, b, in]."""
        if self.mask is None:
            dx.view(-1, dx.shape[-1]).addmm_(d_inner, self.a)
        else:
            dx.add_((d_inner @ self.a).view(dx.shape) * self.mask.of(dx, key))


class InputMask(Protocol):
    """Dropout of the input of a low-rank product (``trainer.tensor.dropout.MatrixInputMask``)."""

    @property
    def key(self) -> Any:
        """Of the micro-batch that is being computed."""

    def of(self, x: Tensor, key: Any) -> Tensor:
        """What x [s, b, in] is multiplied with: 0 or 1 / (1 - p)."""


class ColumnLinear(nn.Module):
    """Linear whose outputs are sharded over the tensor ranks: enter, then multiply. Weight [*local outputs, inputs]."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, region: Region, gradients: Gradients, low: LowRank | None = None):
        super().__init__()
        self.weight, self.bias, self.low = weight, bias, low
        self.region, self.gradients = region, gradients

    def forward(self, x: Tensor) -> Tensor:
        return _Column.apply(x, self.weight, self.bias, *_factors(self.low), self)


class RowLinear(nn.Module):
    """Linear whose inputs are sharded over the tensor ranks: multiply, then leave. Weight [outputs, local inputs].

    The bias is added once, after the sum. With ``skip_output`` forward only saves what backward needs and returns zeros.
    """

    skip_output = False

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, region: Region, gradients: Gradients, low: LowRank | None = None):
        super().__init__()
        self.weight, self.bias, self.low = weight, bias, low
        self.region, self.gradients = region, gradients

    def without_output(self) -> RowLinear:
        """The same layer, with the same parameters and hooks, that skips its output."""
        twin = copy.copy(self)
        twin.skip_output = True
        return twin

    def forward(self, x: Tensor) -> Tensor:
        y = _Row.apply(x, self.weight, *_factors(self.low), self)
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


def _factors(low: LowRank | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if low is None else (low.a, low.b)


class _Column(torch.autograd.Function):
    """What is frozen has no weight gradient, and its input is not kept for one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None, layer: ColumnLinear
    ) -> Tensor:
        ctx.layer, ctx.shape, ctx.key, low = layer, x.shape, layer.low and layer.low.key, layer.low
        whole = ready(layer.region.gather(x))
        y = torch.nn.functional.linear(whole, _matrix(weight), None if bias is None else bias.flatten())
        inner = None
        if low is not None:
            inner = low.inner(whole)
            low.add_to(y, inner)
        ctx.save_for_backward(x if weight.requires_grad or low is not None else None, inner)
        return y.unflatten(-1, weight.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        (x, inner), layer, low = ctx.saved_tensors, ctx.layer, ctx.layer.low
        dy = gradients[0].flatten(2).flatten(0, 1)  # [s b, out]
        gathered = None if x is None else layer.region.gather(x)
        d_inner = None if low is None else low.inner_gradient(dy)
        dx = (dy @ _matrix(layer.weight)).view(-1, *ctx.shape[1:]) if ctx.needs_input_grad[0] else None
        if dx is not None and low is not None:
            low.add_input_gradient(dx, d_inner, ctx.key)
        whole = None if gathered is None else ready(gathered)
        summed = None if dx is None else layer.region.sum(dx)
        _weight_gradients(layer, whole, dy, inner, d_inner, ctx.key)
        return None if summed is None else ready(summed), None, None, None, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor | None, b: Tensor | None, layer: RowLinear) -> Tensor:
        ctx.layer, ctx.shape, ctx.key, low = layer, x.shape, layer.low and layer.low.key, layer.low
        inner = None if low is None else low.inner(x)
        ctx.save_for_backward(x if weight.requires_grad or low is not None else None, inner)
        if layer.skip_output:
            return x.new_zeros(layer.region.rows(x), *x.shape[1:-1], weight.shape[0])
        y = x @ weight.t()
        if low is not None and inner is not None:
            low.add_to(y, inner)
        return ready(layer.region.sum(y))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (x, inner), layer, low = ctx.saved_tensors, ctx.layer, ctx.layer.low
        dy = ready(layer.region.gather(gradients[0])).flatten(0, 1)
        d_inner = None if low is None else low.inner_gradient(dy)
        dx = (dy @ layer.weight).view(ctx.shape) if ctx.needs_input_grad[0] else None
        if dx is not None and low is not None:
            low.add_input_gradient(dx, d_inner, ctx.key)
        _weight_gradients(layer, x, dy, inner, d_inner, ctx.key)
        return dx, None, None, None, None


def _weight_gradients(
    layer: ColumnLinear | RowLinear, x: Tensor | None, dy: Tensor, inner: Tensor | None, d_inner: Tensor | None, key: Any
) -> None:
    """Gradients of all trained parameters of ``layer`` for its whole input x [s, b, in], now or later. The bias of a row layer is not its
    matrix' business."""
    if x is None:
        return
    low, bias, rows = layer.low, layer.bias if isinstance(layer, ColumnLinear) else None, x

    def work() -> None:
        if layer.weight.requires_grad:
            layer.gradients.add_product(layer.weight, dy, rows.flatten(0, 1))
        if bias is not None and bias.requires_grad:
            layer.gradients.add(bias, dy.sum(0).view(bias.shape))
        if low is not None and inner is not None and d_inner is not None:
            layer.gradients.add_product(low.b, dy, inner * low.scale)
            layer.gradients.add_product(low.a, d_inner, low.dropped(rows, key).flatten(0, 1))

    layer.gradients.later(work, dy, x)


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
