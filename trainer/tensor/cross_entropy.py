"""Cross entropy over a vocabulary that is sharded over the tensor ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.comm.collectives import MAX, Group

CACHED_BYTES = {"cpu": 4 << 20, "cuda": 1 << 30}
"""Size of a block of logits: on a CPU it fits the cache, on a GPU it keeps the number of kernel launches low."""


def vocabulary_cross_entropy(logits: Tensor, targets: Tensor, weight: float, group: Group, present: int) -> Tensor:
    """``weight`` times the sum of ``-log softmax(logits)[target]``.

    logits [s, b, V_local]: the first ``present`` columns are real, the others padding; targets [s, b] are global, a negative one is none
    and adds nothing. Backward starts
    here: the incoming gradient is assumed to be 1, ``weight`` holds every scale. The logits are overwritten.

    Each rank exponentiates relative to its own maximum, in one pass over its logits. Then a MAX and a SUM of two numbers per
    token combine the ranks; gathering the logits would move V numbers per token.
    """
    loss: Tensor = _CrossEntropy.apply(logits, targets, weight, group, present)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, weight: float, group: Group, present: int) -> Tensor:
        ctx.shape = logits.shape
        rows = logits.view(-1, logits.shape[-1])
        column, absent = _local_targets(targets.flatten(), logits.shape[-1], group.index)
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        target = rows.gather(1, column).squeeze(1).to(wide).masked_fill_(absent, 0)
        top, total = _exponentiate(rows, present, wide)
        highest = top.clone()
        group.all_reduce(highest, MAX).wait()
        share = torch.exp(top - highest)
        sums = torch.stack((total * share, target))
        group.all_reduce(sums).wait()
        total, target = sums
        counted = (targets.flatten() >= 0).to(wide) * weight
        _scale_rows(rows, share * counted / total)
        ctx.save_for_backward(rows)
        ctx.column, ctx.hit = column, (~absent).to(rows.dtype).unsqueeze(1) * weight
        return ((torch.log(total) + highest - target) * counted).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (rows,) = ctx.saved_tensors
        rows = rows.detach()
        rows.scatter_add_(1, ctx.column, -ctx.hit)
        return rows.view(ctx.shape), None, None, None, None


def _local_targets(targets: Tensor, width: int, index: int) -> tuple[Tensor, Tensor]:
    """Column of each target on this rank [n, 1], and which targets are on other ranks [n] (their column is 0)."""
    column = targets - width * index
    absent = (column < 0) | (column >= width)
    return column.masked_fill(absent, 0).unsqueeze(1), absent


def _blocks(rows: Tensor) -> tuple[Tensor, ...]:
    height = max(1, CACHED_BYTES[rows.device.type] // (4 * rows.shape[1]))
    return rows.split(height)


def _exponentiate(rows: Tensor, present: int, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Replace rows [n, V] by ``exp(row - max)``, padding by 0; returns the maxima and the sums, [n] each, in ``wide``."""
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
