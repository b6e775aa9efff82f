"""Tensor and sequence parallel forms of the layers, as pairs of forward and backward written by hand.

Between the matrices, activations are replicated over the tensor ranks or, with sequence parallelism, sharded along the sequence
(dimension 0). Inside, heads, ffn columns or vocabulary rows are sharded.

    enter  (column layers)   forward: nothing     / all-gather          backward: all-reduce / reduce-scatter
    leave  (row layers)      forward: all-reduce  / reduce-scatter      backward: nothing    / all-gather

(replicated / sequence-sharded; Megatron's f and g, Shoeybi et al. 2019 section 3, Korthikanti et al. 2022 section 4.2). Only the
sharded input is saved. Backward gathers it again while it computes the input gradient, and sums the input gradient over ranks
while it computes the weight gradient. Weight gradients bypass autograd: they go directly into the flat gradient buffer through
``Gradients``, which also lets a schedule run them later. With ``FusedProducts`` a gather or reduce-scatter that nothing else
hides is part of its product.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer.comm.collectives import Group
from trainer.tensor.eight_bits import EightBitProduct
from trainer.tensor.fused import FusedProducts
from trainer.tensor.region import Region, ready, rows_at
from trainer.tensor.traced import NO_STAMP, due, multiply, numbered, total


class Gradients(Protocol):
    """Receives the gradients of parameters. ``trainer.state.sharding`` implements it; the layers know nothing of buckets."""

    def later(self, work: Callable[[], None], *needs: Tensor) -> None:
        """Runs ``work``, which computes weight gradients from the tensors ``needs``: now, or when the schedule says so."""

    @property
    def defers(self) -> bool:
        """Returns whether ``later`` defers its work."""

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Adds ``gradient``, of the parameter's shape."""

    def add_product(self, parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Adds ``left^T right`` for left [n, out] and right [n, in], where the weight is [*out, in]."""

    def add_products(self, parameter: nn.Parameter, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Adds one gradient that is a sum of such products. A pair is no longer used once the next one is requested."""

    def add_grouped(self, parameter: nn.Parameter, left: Tensor, right: Tensor, sizes: Sequence[int]) -> None:
        """Adds such a product for each expert, whose weight is [experts, *out, in]: of its rows, expert after expert, ``sizes`` of each."""

    def counts(self, tensor: Tensor) -> object:
        """Counts the bytes of a tensor unknown to autograd for as long as the result lives."""

    def add_rows(self, parameter: nn.Parameter, rows: Tensor, gradient: Tensor) -> None:
        """Adds ``gradient`` [n, h] to ``rows`` [n] of a weight [V, h]."""


class LowRank(nn.Module):
    """A trained product parallel to a matrix, ``y += scale B A drop(x)``. A [r, local inputs], B [*local outputs, r].

    In a column layer A is replicated and B sharded like the matrix, in a row layer the other way round. So the product is whole, or
    partial, like the matrix's own, and communicates no extra byte. Gradients of the replicated factor are partial over the tensor ranks.
    """

    def __init__(self, a: nn.Parameter, b: nn.Parameter, scale: float, mask: InputMask | None):
        super().__init__()
        self.a, self.b, self.scale, self.mask = a, b, scale, mask

    @property
    def stamp(self) -> Tensor:
        """Returns the stamp of the dropout masks of this micro-batch, for its backward."""
        return NO_STAMP if self.mask is None else self.mask.noise.stamp

    def dropped(self, x: Tensor, stamp: Tensor) -> Tensor:
        """Returns the input [s, b, in] of A. Backward computes it again."""
        return x if self.mask is None else x * self.mask.of(x, stamp)

    def inner(self, x: Tensor) -> Tensor:
        """Multiplies by A: [s, b, in] -> [s b, r]."""
        return self.dropped(x, self.stamp).flatten(0, 1) @ self.a.t()

    def add_to(self, y: Tensor, inner: Tensor) -> None:
        """Adds the product to y [s, b, out]."""
        y.view(-1, y.shape[-1]).addmm_(inner, _matrix(self.b).t(), alpha=self.scale)

    def inner_gradient(self, dy: Tensor) -> Tensor:
        """Multiplies by the transpose of B: [s b, out] -> [s b, r]."""
        return (dy @ _matrix(self.b)) * self.scale

    def add_input_gradient(self, dx: Tensor, d_inner: Tensor, stamp: Tensor) -> None:
        """Adds the gradient that flows to x to dx [s, b, in]."""
        if self.mask is None:
            dx.view(-1, dx.shape[-1]).addmm_(d_inner, self.a)
        else:
            dx.add_((d_inner @ self.a).view(dx.shape) * self.mask.of(dx, stamp))


class InputMask(Protocol):
    """Dropout of the input of a low-rank product (``trainer.tensor.dropout.MatrixInputMask``)."""

    noise: Any

    def of(self, x: Tensor, stamp: Tensor) -> Tensor:
        """Returns the factors of x [s, b, in] in the micro-batch of ``stamp``: 0 or 1 / (1 - p)."""


class ShardedLinear(nn.Module):
    """A linear layer of which each tensor rank has a part. A frozen parameter has no weight gradient, and its input is not kept for one."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, region: Region, gradients: Gradients, low: LowRank | None = None):
        super().__init__()
        self.weight, self.bias, self.low = weight, bias, low
        self.region, self.gradients = region, gradients
        self.eight_bits: EightBitProduct | None = None
        self.fused: FusedProducts | None = None
        self.number = numbered(self)

    def multiplied(self, x: Tensor) -> Tensor:
        """Returns the output for an input, both as they lie on this rank; a row layer's without bias."""
        if not torch.compiler.is_compiling():
            factors = () if self.low is None else (self.low.a, self.low.b)
            y: Tensor = _Linear.apply(x, self.weight, *factors, self)
            return y
        shape = self.shape_of(x)
        inner = [0] if self.low is None else [self.rows(x) * x.shape[1], self.low.a.shape[0]]
        stamp = NO_STAMP if self.low is None else self.low.stamp
        found: Tensor = multiply(x, due(self), self.number, stamp, shape, inner)[0]
        return found

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Computes x [s, b, in] times this rank's matrix, plus ``bias``: [s, b, out]."""
        if self.eight_bits is None:
            return torch.nn.functional.linear(x, _matrix(self.weight), bias)
        y = self.eight_bits(x.flatten(0, 1), _matrix(self.weight), fast=True).view(*x.shape[:2], -1)
        return y if bias is None else y.add_(bias)

    def rows(self, x: Tensor) -> int:
        """Returns the length of the sequence that the matrix multiplies."""
        raise NotImplementedError

    def shape_of(self, x: Tensor) -> list[int]:
        """Returns the shape of the output for x."""
        raise NotImplementedError

    def compute(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the output, and the inner activation of a low-rank product."""
        raise NotImplementedError

    def differentiate(
        self, dy: Tensor, x: Tensor | None, inner: Tensor | None, stamp: Tensor, shape: tuple[int, ...] | None
    ) -> Tensor | None:
        """Returns the gradient of the input of ``shape``, if wanted. Weight gradients, which need x, go to ``gradients``."""
        raise NotImplementedError

    def input_gradient(
        self, dy: Tensor, d_inner: Tensor | None, stamp: Tensor, shape: tuple[int, ...] | None, product: Tensor | None = None
    ) -> Tensor | None:
        """Returns the gradient of the product's input, for dy [s b, out]; ``product``: the matrix's part of it, if known."""
        if shape is None:
            return None
        weight = _matrix(self.weight)
        if product is None:
            product = dy @ weight if self.eight_bits is None else self.eight_bits(dy, weight.t(), fast=False)
        dx = product.view(-1, *shape[1:])
        if self.low is not None and d_inner is not None:
            self.low.add_input_gradient(dx, d_inner, stamp)
        return dx


class ColumnLinear(ShardedLinear):
    """Linear whose outputs are sharded over the tensor ranks: enter, then multiply. Weight [*local outputs, inputs]."""

    def forward(self, x: Tensor) -> Tensor:
        return self.multiplied(x)

    def rows(self, x: Tensor) -> int:
        return x.shape[0] * self.region.parts

    def shape_of(self, x: Tensor) -> list[int]:
        return [self.rows(x), x.shape[1], *self.weight.shape[:-1]]

    def compute(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        bias = None if self.bias is None else self.bias.flatten()
        if self.fused is None:
            whole = ready(self.region.gather(x))
            y = self.product(whole, bias)
        else:
            whole, y = self.fused.gathered(x, _matrix(self.weight).t())
            y = y if bias is None else y.add_(bias)
        inner = None
        if self.low is not None:
            inner = self.low.inner(whole)
            self.low.add_to(y, inner)
        return y if self.weight.dim() == 2 else y.unflatten(-1, self.weight.shape[:-1]), inner

    def differentiate(
        self, dy: Tensor, x: Tensor | None, inner: Tensor | None, stamp: Tensor, shape: tuple[int, ...] | None
    ) -> Tensor | None:
        rows = dy.flatten(2)
        dy = rows.flatten(0, 1)  # [s b, out]
        gathered = None if x is None else self.region.gather(x)
        hidden = x is not None and not self.gradients.defers  # by the weight gradient
        if self.fused is not None and self.low is None and shape is not None and not hidden:
            total = self.fused.scattered(rows, _matrix(self.weight))
            _weight_gradients(self, None if gathered is None else ready(gathered), dy, inner, None, stamp)
            return total
        d_inner = None if self.low is None else self.low.inner_gradient(dy)
        dx = self.input_gradient(dy, d_inner, stamp, shape)
        whole = None if gathered is None else ready(gathered)
        summed = None if dx is None else self.region.sum(dx)
        _weight_gradients(self, whole, dy, inner, d_inner, stamp)
        return None if summed is None else ready(summed)


class RowLinear(ShardedLinear):
    """Linear whose inputs are sharded over the tensor ranks: multiply, then leave. Weight [outputs, local inputs].

    The bias is added once, after the sum. With ``skip_output`` forward only saves what backward needs and returns zeros.
    """

    skip_output = False

    def without_output(self) -> RowLinear:
        """Returns the same layer, with the same parameters and hooks, that skips its output."""
        twin = copy.copy(self)
        twin.skip_output, twin.number = True, numbered(twin)
        return twin

    def forward(self, x: Tensor) -> Tensor:
        y = self.multiplied(x)
        return y if self.bias is None else y + self.bias

    def rows(self, x: Tensor) -> int:
        return x.shape[0]

    def shape_of(self, x: Tensor) -> list[int]:
        return [self.region.rows(x), x.shape[1], self.weight.shape[0]]

    def compute(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        inner = None if self.low is None else self.low.inner(x)
        if self.skip_output:
            return x.new_zeros(self.shape_of(x)), inner
        if self.fused is not None and self.low is None:
            return self.fused.scattered(x, _matrix(self.weight).t()), None
        y = self.product(x)
        if self.low is not None and inner is not None:
            self.low.add_to(y, inner)
        return ready(self.region.sum(y)), inner

    def differentiate(
        self, dy: Tensor, x: Tensor | None, inner: Tensor | None, stamp: Tensor, shape: tuple[int, ...] | None
    ) -> Tensor | None:
        product = None
        if self.fused is None or shape is None:
            dy = ready(self.region.gather(dy)).flatten(0, 1)
        else:
            whole, product = self.fused.gathered(dy, _matrix(self.weight))
            dy = whole.flatten(0, 1)
        d_inner = None if self.low is None else self.low.inner_gradient(dy)
        dx = self.input_gradient(dy, d_inner, stamp, shape, product)
        _weight_gradients(self, x, dy, inner, d_inner, stamp)
        return dx


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
    """Adds learned positions to x [s, b, h]: the rows of this rank's part of the sequence."""

    def __init__(self, weight: nn.Parameter, region: Region):
        super().__init__()
        self.weight, self.region = weight, region

    def forward(self, x: Tensor) -> Tensor:
        return x + rows_at(self.weight, self.region.runs(x.shape[0])).unsqueeze(1)


class SumOverRanks(nn.Module):
    """The sum of x over the ranks of a group, each of which continues with all of it, so its gradient is summed too."""

    def __init__(self, group: Group):
        super().__init__()
        self.group, self.number = group, numbered(self)

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size == 1:
            return x
        summed: Tensor = total(x, self.number) if torch.compiler.is_compiling() else _Total.apply(x, self)
        return summed

    def compute(self, x: Tensor) -> Tensor:
        whole = x.contiguous().clone()
        return ready((whole, self.group.all_reduce(whole)))


class _Total(torch.autograd.Function):
    """``SumOverRanks`` outside of compiled code."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: SumOverRanks) -> Tensor:
        ctx.layer = layer
        return layer.compute(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.layer.compute(gradients[0]), None


def _matrix(weight: Tensor) -> Tensor:
    return weight if weight.dim() == 2 else weight.flatten(0, -2)  # no view where none is needed: it takes the host time


class _Linear(torch.autograd.Function):
    """``ShardedLinear`` outside of compiled code: (x, *matrices, layer). The matrices say whether a backward is due."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> Tensor:
        layer: ShardedLinear = others[-1]
        ctx.layer, ctx.shape = layer, x.shape
        y, inner = layer.compute(x)
        keeps = layer.weight.requires_grad or layer.low is not None
        ctx.save_for_backward(x if keeps else None, inner, None if layer.low is None else layer.low.stamp)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, stamp = ctx.saved_tensors
        shape = ctx.shape if ctx.needs_input_grad[0] else None
        dx = ctx.layer.differentiate(gradients[0], x, inner, NO_STAMP if stamp is None else stamp, shape)
        return (dx, *(None for _ in ctx.needs_input_grad[1:]))


def _weight_gradients(
    layer: ShardedLinear, x: Tensor | None, dy: Tensor, inner: Tensor | None, d_inner: Tensor | None, stamp: Tensor
) -> None:
    """Computes gradients of all trained parameters of ``layer`` for its whole input x [s, b, in], now or later. The bias of a row layer is
    not part of its matrix's work."""
    if x is None:
        return
    low, bias = layer.low, layer.bias if isinstance(layer, ColumnLinear) else None
    # an input parameter may lie in another bucket, whose gathered form is freed when its own gradients have arrived
    rows = x.clone() if layer.gradients.defers and isinstance(x, nn.Parameter) else x

    def work() -> None:
        if layer.weight.requires_grad:
            layer.gradients.add_product(layer.weight, dy, rows.flatten(0, 1))
        if bias is not None and bias.requires_grad:
            layer.gradients.add(bias, dy.sum(0).view(bias.shape))
        if low is not None and inner is not None and d_inner is not None:
            layer.gradients.add_product(low.b, dy, inner * low.scale)
            layer.gradients.add_product(low.a, d_inner, low.dropped(rows, stamp).flatten(0, 1))

    layer.gradients.later(work, dy, rows)


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
