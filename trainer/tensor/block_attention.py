"""Attention with dropout of its weights or caps on its scores, one block of queries at a time: only the scores of that block exist.

Forward saves queries, keys and values only. Backward recomputes the scores of a block and its mask: the dropped weights are a function of
their positions, not of generator state. Each row of scores is whole in its block, so its softmax is plain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from trainer.tensor.dropout import ShardedAttentionDropout
from trainer.tensor.traced import LAYERS, NO_STAMP, numbered

SCORES = {"cpu": 1 << 20, "cuda": 1 << 22}
"""Scores per block, over all heads: as many as fit a cache in the 8-byte numbers that masks are made of."""


class BlockAttention:
    """softmax(q k^T scale) v with dropout, and with the ``window`` and ``cap`` of ``AttentionCore``.

    Shapes: q [b, heads, queries, d], k [b, groups, keys, d], v [b, groups, keys, e] -> [b, heads, queries, e].

    The last query stands at the last key, in sequences of ``length``. ``visible`` [b, 1, queries, keys] marks the keys that a query sees,
    if not all up to itself.
    """

    def __init__(self, dropout: ShardedAttentionDropout | None, window: int | None = None, cap: float | None = None):
        self.dropout, self.window, self.cap = dropout, window, cap
        self.number = numbered(self)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float, length: int) -> Tensor:
        stamp = NO_STAMP if self.dropout is None else self.dropout.noise.stamp
        if torch.compiler.is_compiling():
            found: Tensor = attend(query, key, value, visible, self.number, stamp, scale, length)
            return found
        result: Tensor = _Attend.apply(query, key, value, visible, stamp, scale, length, self)
        return result

    def compute(
        self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, stamp: Tensor, scale: float, length: int
    ) -> Tensor:
        """Returns the output, which lies in memory as [s, b, heads, e]."""
        output, before = output_like(query, value), key.shape[-2] - query.shape[-2]
        for block in blocks(query, key):
            seen = value[..., : before + block.stop, :]
            weights = torch.softmax(self._scores(block, query, key, visible, scale)[0], -1)
            dropped = self._dropped(weights, self._lost(block, before, weights, length, stamp))
            output[..., block.start : block.stop, :] = (dropped @ seen.unsqueeze(2)).flatten(1, 2)
        return output

    def differentiate(
        self, dy: Tensor, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, stamp: Tensor, scale: float, length: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns gradients of queries, keys and values; the last two are summed over blocks in at least 4 bytes."""
        dq, groups, before = query.new_empty(query.shape), key.shape[1], key.shape[-2] - query.shape[-2]
        dk, dv = (torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device) for x in (key, value))
        for block in blocks(query, key):
            rows, past = slice(block.start, block.stop), slice(0, before + block.stop)
            asked, flow = (x[..., rows, :].unflatten(1, (groups, -1)) for x in (query, dy))
            scores, slope = self._scores(block, query, key, visible, scale)
            weights = torch.softmax(scores, -1)
            lost = self._lost(block, before, weights, length, stamp)
            dv[..., past, :] += summed(self._dropped(weights.clone(), lost), flow)
            d_weights = self._dropped(flow @ value[..., past, :].unsqueeze(2).transpose(-1, -2), lost)
            d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype).mul_(scale)
            if slope is not None:
                d_scores.mul_(slope)
            dq[..., rows, :] = (d_scores @ key[..., past, :].unsqueeze(2)).flatten(1, 2)
            dk[..., past, :] += summed(d_scores, asked)
        return dq, dk.to(key.dtype), dv.to(value.dtype)

    def _dropped(self, weights: Tensor, lost: Tensor | None) -> Tensor:
        """Scales the weights that stay and zeroes the others, in place."""
        return weights if lost is None or self.dropout is None else weights.mul_(1 / (1 - self.dropout.p)).masked_fill_(lost, 0)

    def _lost(self, block: range, before: int, weights: Tensor, length: int, stamp: Tensor) -> Tensor | None:
        """Returns the dropped ones of the weights [b, groups, heads / groups, rows, keys] of a block of queries, the first of which stands
        at position ``before``."""
        if self.dropout is None or not self.dropout.training:
            return None
        with self.dropout.noise.at_stamp(stamp):
            places = range(before + block.start, before + block.stop)
            kept = self.dropout.kept_among(weights.shape[0], places, torch.arange(places.stop, device=weights.device), length)
        return ~kept.view(weights.shape)

    def _scores(self, block: range, query: Tensor, key: Tensor, visible: Tensor | None, scale: float) -> tuple[Tensor, Tensor | None]:
        """Returns the scores of a block's queries for all keys up to the last of them, and the slope that a cap leaves them."""
        before = key.shape[-2] - query.shape[-2]
        rows, past = slice(block.start, block.stop), slice(0, before + block.stop)
        asked = query[..., rows, :].unflatten(1, (key.shape[1], -1))
        place = torch.arange(past.stop, device=query.device)
        own = place[before + block.start :, None]
        hidden = place > own if visible is None else ~visible[:, None, :, rows, past]
        if self.window is not None:
            hidden = hidden | (place <= own - self.window)
        return hidden_scores(asked, key[..., past, :], hidden, scale, self.cap)


def hidden_scores(query: Tensor, key: Tensor, hidden: Tensor, scale: float, cap: float | None) -> tuple[Tensor, Tensor | None]:
    """Returns the scores of queries [b, groups, n, rows, d] for keys [b, groups, keys, d], -inf where ``hidden``, and the slope that a cap
    leaves them."""
    scores, slope = (query @ key.unsqueeze(2).transpose(-1, -2)).mul_(scale), None
    if cap is not None:
        share = scores.div_(cap).tanh_()
        scores, slope = share * cap, 1 - share.square()
    return scores.masked_fill_(hidden, -math.inf), slope


def blocks(query: Tensor, key: Tensor) -> Iterator[range]:
    """Yields ranges of consecutive queries whose scores are few enough."""
    batch, heads, length, _ = query.shape
    most = SCORES.get(query.device.type, SCORES["cuda"])
    height = max(1, most // (batch * heads * key.shape[-2]))
    for first in range(0, length, height):
        yield range(first, min(first + height, length))


def summed(left: Tensor, right: Tensor) -> Tensor:
    """Sums ``left^T right`` over the heads of a group: [b, groups, n, rows, keys], [b, groups, n, rows, d] -> [b, groups, keys, d]."""
    return left.flatten(2, 3).transpose(-1, -2) @ right.flatten(2, 3)


def output_like(query: Tensor, value: Tensor) -> Tensor:
    """Returns an empty [b, heads, s, e] that lies in memory as [s, b, heads, e], which the next product reads."""
    batch, heads, length, _ = query.shape
    return value.new_empty(length, batch, heads, value.shape[-1]).permute(1, 2, 0, 3)


class _Attend(torch.autograd.Function):
    """``BlockAttention`` outside of compiled code."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
        visible, stamp, ctx.scale, ctx.length, ctx.layer = others
        ctx.save_for_backward(query, key, value, visible, stamp)
        output: Tensor = ctx.layer.compute(query, key, value, visible, stamp, ctx.scale, ctx.length)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.layer.differentiate(gradients[0], *ctx.saved_tensors, ctx.scale, ctx.length), None, None, None, None, None


@torch.library.custom_op("trireme::attend", mutates_args=())
def attend(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, number: Tensor, stamp: Tensor, scale: float, length: int
) -> Tensor:
    """Runs ``BlockAttention`` number ``number`` in a traced block."""
    return LAYERS[int(number)].compute(query, key, value, visible, stamp, scale, length)  # type: ignore[no-any-return]


@attend.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, number: Tensor, stamp: Tensor, scale: float, length: int
) -> Tensor:
    return output_like(query, value)


@torch.library.custom_op("trireme::attend_backward", mutates_args=())
def attend_backward(
    dy: Tensor, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, number: Tensor, stamp: Tensor, scale: float, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients of queries, keys and values."""
    return LAYERS[int(number)].differentiate(dy, query, key, value, visible, stamp, scale, length)  # type: ignore[no-any-return]


@attend_backward.register_fake
def _(
    dy: Tensor, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, number: Tensor, stamp: Tensor, scale: float, length: int
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:-2])
    ctx.scale, ctx.length = inputs[-2:]


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *attend_backward(dy, *ctx.saved_tensors, ctx.scale, ctx.length), None, None, None, None, None


torch.library.register_autograd("trireme::attend", _differentiate, setup_context=_save)
