"""Head and loss together, over a vocabulary that is sharded over the tensor ranks: only the logits of one chunk exist at a time.

Forward only keeps the head's input. When backward starts, each chunk of tokens computes its logits, its loss, their gradient in place, and
from that the gradients of input and weight (the weight's later, if the schedule defers it and one chunk has all tokens). So no product is
computed twice, a schedule that runs many forwards first keeps no logits of them, and the head's input is gathered once. The loss has its
value once backward has begun.

Where blocks are compiled, two compiled kernels read the logits, and one of them writes their gradient. Otherwise the passes go over blocks
of logits that fit into the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trainer.comm.collectives import MAX, Group
from trainer.tensor.layers import ColumnLinear
from trainer.tensor.region import ready

CACHED_BYTES = {"cpu": 4 << 20, "cuda": 1 << 30}
"""Size of a block of logits in passes over them: on a CPU it fits the cache, on a GPU it keeps the number of kernel launches low."""


@dataclass(frozen=True)
class Targets:
    """The targets of a micro-batch's logits, and their settings."""

    tokens: Tensor  # [s, b] of the whole vocabulary; a negative one is not a target and adds nothing
    weight: float | Tensor  # of each in the loss; [b] where rows differ
    present: int  # columns of this rank's logits that are not padding
    chunk_mb: float  # logits at once, in MiB of 4-byte numbers
    fused: bool = False  # by compiled kernels
    cap: float | None = None  # logits become cap tanh(logit / cap)

    def weights(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight of each token in the loss, [s b]."""
        return ((self.tokens >= 0).to(dtype) * self.weight).flatten()

    def height(self, head: ColumnLinear) -> int:
        """Returns the tokens of a chunk."""
        return chunk_height(self.tokens.numel(), head.weight.shape[0], self.chunk_mb)


def head_loss(x: Tensor, head: ColumnLinear, targets: Targets) -> Tensor:
    """Computes ``weight`` times the sum of ``-log softmax(head(x))[target]``, for x [s or s/t, b, h].

    With a gradient, the value is set once backward has begun. Backward starts here: the incoming gradient is assumed to be 1, ``weight``
    holds every scale.
    """
    if torch.is_grad_enabled() and (x.requires_grad or head.weight.requires_grad):
        loss: Tensor = _HeadLoss.apply(x, head.weight, head, targets)
        return loss
    losses = [chunk.loss for chunk in _chunks(ready(head.region.gather(x)), head, targets, gradient=False)]
    return torch.stack(losses).sum()


def answered(x: Tensor, head: ColumnLinear, targets: Targets) -> Tensor:
    """Returns the rows [b] of x [s or s/t, b, h] in which no token is likelier than the target, at every target; on context ranks but the
    first none, so that each row counts once."""
    whole = ready(head.region.gather(x))
    height = targets.height(head)
    parts = zip(whole.flatten(0, 1).split(height), targets.tokens.flatten().split(height))
    right = [_likeliest(head.product(rows[None], head.bias)[0], wanted, targets.present, head.region.group) for rows, wanted in parts]
    every, context = torch.cat(right).view(targets.tokens.shape).all(0), head.region.context
    wrong = (~every).double()
    context.all_reduce(wrong).wait()
    return (wrong == 0) & (context.index == 0)


def _likeliest(rows: Tensor, wanted: Tensor, present: int, group: Group) -> Tensor:
    """Returns, for logits [n, V_local] and targets [n], where no token is likelier than the target, or there is no target."""
    column, absent = _local_targets(wanted, rows.shape[1], group.index)
    lowest = torch.finfo(rows.dtype).min
    highest = rows[:, :present].amax(1) if present else rows.new_full((len(rows),), lowest)
    both = torch.stack((highest, rows.gather(1, column).squeeze(1).masked_fill(absent, lowest))).double()
    group.all_reduce(both, MAX).wait()
    return (both[1] >= both[0]) | (wanted < 0)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, head: ColumnLinear, targets: Targets) -> Tensor:
        ctx.save_for_backward(x)
        ctx.head, ctx.targets = head, targets
        loss = torch.zeros((), dtype=_wide(x.dtype), device=x.device)
        ctx.value = loss.detach()  # not the output itself, which would keep itself alive
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,), head = ctx.saved_tensors, ctx.head
        whole = ready(head.region.gather(x))
        dx = torch.empty_like(whole) if ctx.needs_input_grad[0] else None
        d_bias = torch.zeros_like(head.bias) if head.bias is not None and head.bias.requires_grad else None
        products = _products(_chunks(whole, head, ctx.targets, gradient=True), head.weight, dx, d_bias, ctx.value)
        if head.weight.requires_grad and head.gradients.defers and ctx.targets.height(head) == len(whole.flatten(0, 1)):
            (only,) = products  # its logits are not overwritten
            head.gradients.later(lambda: head.gradients.add_product(head.weight, *only), *only)
        elif head.weight.requires_grad:
            head.gradients.add_products(head.weight, products)
        else:
            for _ in products:
                pass
        if head.bias is not None and d_bias is not None:
            head.gradients.add(head.bias, d_bias)
        return None if dx is None else ready(head.region.sum(dx)), None, None, None


@dataclass(frozen=True)
class _Chunk:
    """Some tokens: their part of the loss, their rows of the head's input [n, h], and the gradient of their logits [n, V_local]."""

    loss: Tensor
    rows: slice
    x: Tensor
    d_logits: Tensor


def _products(
    chunks: Iterator[_Chunk], weight: Tensor, dx: Tensor | None, d_bias: Tensor | None, loss: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the factors of the weight's gradient. Fills in ``dx``, and adds to ``d_bias`` and ``loss``, on the way."""
    for chunk in chunks:
        loss.add_(chunk.loss)
        if dx is not None:
            torch.mm(chunk.d_logits, weight, out=dx.view(-1, dx.shape[-1])[chunk.rows])
        if d_bias is not None:
            d_bias.add_(chunk.d_logits.sum(0))
        yield chunk.d_logits, chunk.x


def _chunks(x: Tensor, head: ColumnLinear, targets: Targets, gradient: bool) -> Iterator[_Chunk]:
    """Yields the chunks of a whole x [s, b, h]. The logits of a chunk, replaced by their gradient if requested, are overwritten by those of
    the next."""
    rows, wanted = x.flatten(0, 1), targets.tokens.flatten()
    height = targets.height(head)
    buffer, weights = rows.new_empty(height, head.weight.shape[0]), targets.weights(_wide(rows.dtype))
    held = head.gradients.counts(buffer)  # as long as this runs
    for first in range(0, len(rows), height):
        part = slice(first, min(first + height, len(rows)))
        logits = torch.mm(rows[part], head.weight.t(), out=buffer[: part.stop - first])
        if head.bias is not None:
            logits.add_(head.bias)
        shares = None if targets.cap is None else logits.div_(targets.cap).tanh_().clone()
        if targets.cap is not None:
            logits.mul_(targets.cap)
        loss = _cross_entropy(logits, wanted[part], weights[part], targets, head.region.group, gradient)
        if shares is not None and gradient:
            logits.mul_(1 - shares.square_())
        yield _Chunk(loss, part, rows[part], logits)
    del held


def chunk_height(tokens: int, width: int, chunk_mb: float) -> int:
    """Returns the tokens of a chunk whose logits [tokens, width] take up to ``chunk_mb``; all chunks but the last are equal."""
    most = max(1, int(chunk_mb * 2**20 / (4 * width)))
    return math.ceil(tokens / math.ceil(tokens / most))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _cross_entropy(rows: Tensor, wanted: Tensor, weights: Tensor, targets: Targets, group: Group, gradient: bool) -> Tensor:
    """Returns the loss of logits [n, V_local] and targets [n] with weights [n]. Overwrites the logits, with their gradient if requested.

    Each rank exponentiates relative to its own maximum, in one pass over its logits. Then a MAX and a SUM of two numbers per
    token combine the ranks; gathering the logits would move V numbers per token.
    """
    column, absent = _local_targets(wanted, rows.shape[1], group.index)
    wide = _wide(rows.dtype)
    target = rows.gather(1, column).squeeze(1).to(wide).masked_fill_(absent, 0)
    if targets.fused:
        top, total = _compiled(_reduced)(rows, targets.present, wide)
    else:
        top, total = _exponentiate(rows, targets.present, wide)
    highest = top.clone()
    group.all_reduce(highest, MAX).wait()
    share = torch.exp(top - highest)
    sums = torch.stack((total * share, target))
    group.all_reduce(sums).wait()
    total, target = sums
    if gradient and targets.fused:
        _compiled(_into_gradient)(rows, targets.present, highest, weights / total, column, weights.masked_fill(absent, 0))
    elif gradient:
        _scale_rows(rows, share * weights / total)
        rows.scatter_add_(1, column, weights.masked_fill(absent, 0).neg().to(rows.dtype).unsqueeze(1))
    return ((torch.log(total) + highest - target) * weights).sum()


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=not torch._dynamo.config.suppress_errors)  # ``run.compile_fallback``, as in blocks


def _reduced(rows: Tensor, present: int, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns maxima of rows [n, V] and sums of ``exp(row - max)``, [n] each, in ``wide``. Padding counts nothing."""
    logits = rows.to(wide).masked_fill(torch.arange(rows.shape[1], device=rows.device) >= present, float("-inf"))
    top = logits.amax(1).clamp_min(torch.finfo(wide).min)
    return top, (logits - top.unsqueeze(1)).exp().sum(1)


def _into_gradient(rows: Tensor, present: int, highest: Tensor, scale: Tensor, column: Tensor, weights: Tensor) -> None:
    """Replaces rows [n, V] by ``exp(row - highest) scale``, less ``weights`` [n] in ``column`` [n, 1]; padding by 0."""
    columns = torch.arange(rows.shape[1], device=rows.device)
    values = (rows.to(scale.dtype) - highest.unsqueeze(1)).exp() * scale.unsqueeze(1)
    values = values - torch.where(columns == column, weights.unsqueeze(1), 0.0)
    rows.copy_(values.masked_fill(columns >= present, 0.0))


def _local_targets(targets: Tensor, width: int, index: int) -> tuple[Tensor, Tensor]:
    """Returns the column of each target on this rank [n, 1], and the targets that are on other ranks [n] (their column is 0)."""
    column = targets - width * index
    absent = (column < 0) | (column >= width)
    return column.masked_fill(absent, 0).unsqueeze(1), absent


def _blocks(rows: Tensor) -> tuple[Tensor, ...]:
    height = max(1, CACHED_BYTES[rows.device.type] // (4 * rows.shape[1]))
    return rows.split(height)


def _exponentiate(rows: Tensor, present: int, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Replaces rows [n, V] by ``exp(row - max)``, padding by 0; returns the maxima and the sums, [n] each, in ``wide``."""
    tops, totals = [], []
    for block in _blocks(rows):
        block[:, present:] = float("-inf")
        top = block.amax(1, keepdim=True).to(wide).clamp_min_(torch.finfo(wide).min)
        exponentials = block.sub_(top).exp_() if block.dtype == wide else block.to(wide).sub_(top).exp_()
        tops.append(top.squeeze(1))
        totals.append(exponentials.sum(1))
        if exponentials is not block:
            block.copy_(exponentials)
    return torch.cat(tops), torch.cat(totals)


def _scale_rows(rows: Tensor, scale: Tensor) -> None:
    for block, factor in zip(_blocks(rows), _blocks_of(scale, rows)):
        block.mul_(factor.unsqueeze(1))


def _blocks_of(values: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    return values.split(_blocks(rows)[0].shape[0])
