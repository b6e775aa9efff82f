"""Attention of context ranks that pass their keys and values around a ring (Liu et al. 2023, arXiv 2310.01889): each computes with the part
that it has while the next one is on its way. No rank holds the keys and values of a whole sequence.

    forward    c - 1 messages of keys and values. What queries find in each part is merged by the logarithm of the sum of exponentials that
               belongs to it (Milakov and Gimelshein 2018, arXiv 1805.02867)
    backward   they go round once more. The gradient of a part is begun by the next rank, added to by all others, and arrives at home with
               the last of c - 1 messages of its own. Weights are exp(score - final logarithm), as in a whole sequence (Dao 2023, arXiv
               2307.08691, algorithm 2)

A part that no query here may see is passed on and not computed with. Pieces of sequences lie so that the others are equal work
(``trainer.shared.parallel.sequence``): half of all pairs of queries and keys in every turn but the first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.comm.collectives import Group, Pending
from trainer.models.attention import AttentionCore
from trainer.shared.parallel.sequence import Runs, with_rows, zigzag
from trainer.tensor.block_attention import blocks, hidden_scores, output_like, summed
from trainer.tensor.dropout import ShardedAttentionDropout
from trainer.tensor.layers import Gradients
from trainer.tensor.region import Region, places
from trainer.tensor.traced import NO_STAMP

Found = Iterator[tuple[slice, Tensor, Tensor]]
"""Rows of queries, what they find in a part of the keys, and the logarithm of the sum of the exponentials of their scores for it."""
Slopes = Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]
"""Rows of queries, rows of keys, and gradients of those queries, keys and values."""


class RingExchange:
    """Lets this rank's queries see the keys and values of all context ranks, one rank's after the other's."""

    def __init__(self, region: Region, gradients: Gradients):
        self.region = region

    def __call__(self, core: AttentionCore, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = (FusedParts if FusedParts.can(core, query, self.region.length(len(query))) else ScoredParts)(core)
        visible = None if core.visible is None else core.visible()
        stamp = parts.dropout.noise.stamp if isinstance(parts, ScoredParts) and parts.dropout is not None else NO_STAMP
        output: Tensor = _AroundRing.apply(query, key, value, visible, stamp, Ring(self.region.context, parts))
        return output


class _AroundRing(torch.autograd.Function):
    """q [s/c, b, heads, d], k [s/c, b, kv_heads, d], v [s/c, b, kv_heads, e] -> [s/c, b, heads e]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, stamp: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        output, logs = ring.attend(query, key, value, Masks(visible, stamp))
        ctx.save_for_backward(query, key, value, visible, stamp, output, logs)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, visible, stamp, output, logs = ctx.saved_tensors
        return *ctx.ring.differentiate(gradients[0], query, key, value, Masks(visible, stamp), output, logs), None, None, None


@dataclass(frozen=True)
class Masks:
    """Hides keys beside order and windows: ``visible`` [b, 1, s, s], and the key of dropout."""

    visible: Tensor | None
    stamp: Tensor


@dataclass(frozen=True)
class Turn:
    """The queries at the positions ``own`` and the keys at ``other``, which one rank has of sequences of ``length``."""

    own: Runs
    other: Runs
    length: int


class Parts(Protocol):
    """Attention of this rank's queries to the keys of one rank. Shapes: q [b, heads, rows, d], k [b, groups, rows, d], v [b, groups, rows,
    e]."""

    def attend(self, turn: Turn, query: Tensor, key: Tensor, value: Tensor, masks: Masks) -> Found:
        """Yields what queries find."""

    def differentiate(
        self, turn: Turn, query: Tensor, key: Tensor, value: Tensor, masks: Masks, dy: Tensor, output: Tensor, logs: Tensor
    ) -> Slopes:
        """Yields gradients, from the output and logarithms [b, heads, rows] of whole sequences."""


class Ring:
    """Passes keys and values on from rank to rank of a group, and computes with ``parts`` of them."""

    def __init__(self, group: Group, parts: Parts):
        self.group, self.parts = group, parts

    def attend(self, query: Tensor, key: Tensor, value: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
        """Returns the output [s/c, b, heads e] and, for each query, the logarithm of the sum of exponentials [b, heads, s/c]."""
        asked = heads_first(query)
        wide = torch.promote_types(query.dtype, torch.float32)
        output = output_like(asked, heads_first(value).to(wide)).zero_()
        logs = output.new_full(output.shape[:-1], -torch.inf)
        for turn, keys, values in self._turns(key, value):
            for rows, found, log in self.parts.attend(turn, asked, keys, values, masks):
                merge(output[..., rows, :], logs[..., rows], found, log)
        return output.to(query.dtype).permute(2, 0, 1, 3).flatten(2), logs

    def differentiate(
        self, dy: Tensor, query: Tensor, key: Tensor, value: Tensor, masks: Masks, output: Tensor, logs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns gradients of this rank's queries, keys and values. Those of queries are summed in at least 4 bytes, those of keys and
        values in 4 on a rank, and travel as wide as they are themselves."""
        asked = heads_first(query)
        dy, output = (x.unflatten(2, (query.shape[2], -1)).permute(1, 2, 0, 3) for x in (dy, output))
        wide, widths = torch.promote_types(query.dtype, torch.float32), (key.shape[-1], value.shape[-1])
        dq, home, sums = torch.zeros_like(asked, dtype=wide), None, Pending(None, self.group, "send")
        came = sent = key.new_empty(0)
        for number, (turn, keys, values) in enumerate(self._turns(key, value)):
            own = keys.new_zeros(*keys.shape[:-1], sum(widths), dtype=wide)
            dk, dv = own.split(widths, -1)
            for rows, seen, *found in self.parts.differentiate(turn, asked, keys, values, masks, dy, output, logs):
                for total, part in zip((dq[..., rows, :], dk[..., seen, :], dv[..., seen, :]), found):
                    total += part
            sums.wait()
            if number == 0:
                home = own
                continue
            sent = (own if number == 1 else own.add_(came)).to(key.dtype)
            came = torch.empty_like(sent)
            sums = self.group.pass_on(sent, came)
        sums.wait()
        assert home is not None
        both = home.add_(came)
        dk, dv = (x.permute(2, 0, 1, 3) for x in both.to(key.dtype).split(widths, -1))
        return dq.to(query.dtype).permute(2, 0, 1, 3), dk, dv

    def _turns(self, key: Tensor, value: Tensor) -> Iterator[tuple[Turn, Tensor, Tensor]]:
        """Yields this rank's keys and values, then those of the rank before it and so on, while the next are under way."""
        size, index, length = self.group.size, self.group.index, len(key) * self.group.size
        runs = [zigzag(length, size, (index - step) % size) for step in range(size)]
        here = torch.cat((heads_first(key), heads_first(value)), -1).contiguous()
        for step, other in enumerate(runs):
            following, moving = here, Pending(None, self.group, "send")
            if step < size - 1:
                following = torch.empty_like(here)
                moving = self.group.pass_on(here, following)
            keys, values = here.split((key.shape[-1], value.shape[-1]), -1)
            yield Turn(runs[0], other, length), keys, values
            moving.wait()
            here = following


def merge(output: Tensor, logs: Tensor, found: Tensor, log: Tensor) -> None:
    """Adds, in place, what queries found in more keys. A query that had found none and finds none has no number: none may be the first to
    see nothing."""
    total = torch.logaddexp(logs, log)
    output.mul_(torch.exp(logs - total)[..., None]).add_(found * torch.exp(log - total)[..., None])
    logs.copy_(total)


def heads_first(x: Tensor) -> Tensor:
    """[s, b, heads, d] -> [b, heads, s, d]."""
    return x.permute(1, 2, 0, 3)


def rows_between(runs: Runs, first: int, end: int) -> slice:
    """Returns the rows whose positions are from ``first`` up to ``end``, without it."""
    before = [sum(min(max(limit - run.start, 0), len(run)) for run in runs) for limit in (first, end)]
    return slice(before[0], max(before))


class ScoredParts:
    """Attention by its scores, a block of queries at a time, with windows, caps, masks and dropout. Backward computes scores again."""

    def __init__(self, core: AttentionCore):
        self.core = core
        dropout = core.dropout
        self.dropout = dropout if isinstance(dropout, ShardedAttentionDropout) and core.training else None

    def attend(self, turn: Turn, query: Tensor, key: Tensor, value: Tensor, masks: Masks) -> Found:
        query, key = self._biased(turn, query, key)
        for rows, seen, scores, _, lost in self._scored(turn, query, key, masks):
            log = torch.logsumexp(scores, -1, keepdim=True)
            weights = torch.exp(scores - log.clamp_min(torch.finfo(log.dtype).min))  # of a query that sees no key, 0
            found = self._dropped(weights, lost).to(value.dtype) @ value[..., seen, :].unsqueeze(2)
            yield rows, found.flatten(1, 2), log.squeeze(-1).flatten(1, 2)

    def differentiate(
        self, turn: Turn, query: Tensor, key: Tensor, value: Tensor, masks: Masks, dy: Tensor, output: Tensor, logs: Tensor
    ) -> Slopes:
        groups, width = key.shape[1], key.shape[-1]
        query, key = self._biased(turn, query, key)
        for rows, seen, scores, slope, lost in self._scored(turn, query, key, masks):
            flow, result, log, asked = (x[:, :, rows].unflatten(1, (groups, -1)) for x in (dy, output, logs, query))
            mean = (flow * result).sum(-1, keepdim=True, dtype=scores.dtype)
            weights = torch.exp(scores - log[..., None])
            dv = summed(self._dropped(weights.clone(), lost).to(value.dtype), flow)
            d_weights = self._dropped((flow @ value[..., seen, :].unsqueeze(2).transpose(-1, -2)).to(scores.dtype), lost)
            d_scores = d_weights.sub_(mean).mul_(weights).mul_(self.core.scale)
            if slope is not None:
                d_scores.mul_(slope)
            d_scores = d_scores.to(query.dtype)
            dq = (d_scores @ key[..., seen, :].unsqueeze(2)).flatten(1, 2)
            yield rows, seen, dq[..., :width], summed(d_scores, asked)[..., :width], dv

    def _biased(self, turn: Turn, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        alibi = self.core.alibi
        return (query, key) if alibi is None else alibi(query, key, self.core.heads, turn.other)

    def _scored(
        self, turn: Turn, query: Tensor, key: Tensor, masks: Masks
    ) -> Iterator[tuple[slice, slice, Tensor, Tensor | None, Tensor | None]]:
        """Yields blocks of queries: their rows, the rows of the keys that they may see, their scores for those in at least 4 bytes, the
        slope of a cap, and the weights that dropout loses."""
        core, groups = self.core, key.shape[1]
        everywhere = places(turn.other, key.device)
        for run_rows, run in with_rows(turn.own):
            for block in blocks(query[..., run_rows, :], key):
                queries = run[block.start : block.stop]
                first = 0 if core.window is None else max(0, queries.start - core.window + 1)
                seen = rows_between(turn.other, first, queries.stop)
                if seen.start == seen.stop:
                    continue
                rows, at = slice(run_rows.start + block.start, run_rows.start + block.stop), everywhere[seen]
                asked, keys = query[..., rows, :].unflatten(1, (groups, -1)), key[..., seen, :]
                scores, slope = hidden_scores(asked, keys, self._hidden(queries, at, masks.visible), core.scale, core.cap)
                lost = self._lost(queries, at, turn.length, scores, masks.stamp)
                yield rows, seen, scores.to(torch.promote_types(scores.dtype, torch.float32)), slope, lost

    def _hidden(self, queries: range, keys: Tensor, visible: Tensor | None) -> Tensor:
        """Returns the keys at these positions that queries do not see, [rows, keys], with masks [b, 1, 1, rows, keys]."""
        own = torch.arange(queries.start, queries.stop, device=keys.device)[:, None]
        hidden = keys > own
        if self.core.window is not None:
            hidden = hidden | (keys <= own - self.core.window)
        return hidden if visible is None else hidden | ~visible[:, None, :, queries.start : queries.stop].index_select(-1, keys)

    def _lost(self, queries: range, keys: Tensor, length: int, scores: Tensor, stamp: Tensor) -> Tensor | None:
        if self.dropout is None:
            return None
        with self.dropout.noise.at_stamp(stamp):
            return ~self.dropout.kept_among(scores.shape[0], queries, keys, length).view(scores.shape)

    def _dropped(self, weights: Tensor, lost: Tensor | None) -> Tensor:
        """Scales the weights that stay and zeroes the others, in place."""
        return weights if lost is None or self.dropout is None else weights.mul_(1 / (1 - self.dropout.p)).masked_fill_(lost, 0)


class FusedParts:
    """Attention by torch's flash kernels, which return logarithms: on a CPU in every precision, on GPUs in 16 bits. Keys of one's own are a
    causal square, of an earlier rank the first piece is seen by all queries, of a later one both pieces by the second half of them."""

    def __init__(self, core: AttentionCore):
        self.core, self.scale = core, core.scale

    @staticmethod
    def can(core: AttentionCore, query: Tensor, length: int) -> bool:
        """Returns whether the kernels know all of what ``core`` does in sequences of ``length``."""
        lost = core.training and isinstance(core.dropout, ShardedAttentionDropout)
        able = core.fused and core.cap is None and (core.window or length) >= length and core.visible is None and not lost
        return able and KERNELS[query.device.type].can(query)

    def attend(self, turn: Turn, query: Tensor, key: Tensor, value: Tensor, masks: Masks) -> Found:
        width, kernel = value.shape[-1], KERNELS[query.device.type]
        query, key, value = self._alike(turn, query, key, value)
        for rows, seen, causal in squares(turn):
            found, log = kernel.forward(query[..., rows, :], key[..., seen, :], value[..., seen, :], causal, self.scale)
            yield rows, found[..., :width], log

    def differentiate(
        self, turn: Turn, query: Tensor, key: Tensor, value: Tensor, masks: Masks, dy: Tensor, output: Tensor, logs: Tensor
    ) -> Slopes:
        width, wide, kernel = value.shape[-1], key.shape[-1], KERNELS[query.device.type]
        query, key, value = self._alike(turn, query, key, value)
        dy, output = (F.pad(x, (0, query.shape[-1] - width)) for x in (dy, output))
        for rows, seen, causal in squares(turn):
            flow, asked, found, log = (x[:, :, rows] for x in (dy, query, output, logs))
            dq, dk, dv = kernel.backward(flow, asked, key[..., seen, :], value[..., seen, :], found, log, causal, self.scale)
            yield rows, seen, dq[..., :wide], dk[..., :wide], dv[..., :width]

    def _alike(self, turn: Turn, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Tensor]:
        """Yields all three with the columns of linear biases and one width, which the kernels want."""
        if self.core.alibi is not None:
            query, key = self.core.alibi(query, key, self.core.heads, turn.other)
        widest = -(-max(key.shape[-1], value.shape[-1]) // 8) * 8
        return (x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in (query, key, value))


def squares(turn: Turn) -> Iterator[tuple[slice, slice, bool]]:
    """Yields rows of queries, rows of keys, and whether order hides some of these: else all are seen."""
    whole = sum(map(len, turn.own))
    if turn.own == turn.other:
        yield slice(0, whole), slice(0, whole), True
        return
    for seen, group in itertools.groupby(with_rows(turn.own), key=lambda pair: rows_between(turn.other, 0, pair[1].stop).stop):
        rows = [rows for rows, _ in group]
        if seen:
            yield slice(rows[0].start, rows[-1].stop), slice(0, seen), False


@dataclass(frozen=True)
class FlashKernel:
    """One of torch's flash kernels: whether it can, its output and logarithms [b, heads, rows], and its gradients."""

    can: Callable[[Tensor], bool]
    forward: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _forward_on_cpu(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    return found


def _backward_on_cpu(dy: Tensor, *saved: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, causal, scale = saved
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found: tuple[Tensor, Tensor, Tensor] = call(dy, *tensors, 0.0, causal, scale=scale)
    return found


def _forward_on_gpu(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    output, log, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
    return output, log


def _backward_on_gpu(dy: Tensor, *saved: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, *_, causal, scale = saved
    state = query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)  # of dropout, which there is none of
    lengths = None, None, query.shape[-2], key.shape[-2]
    call = torch.ops.aten._scaled_dot_product_flash_attention_backward
    found: tuple[Tensor, Tensor, Tensor] = call(dy, *saved[:-2], *lengths, 0.0, causal, *state, scale=scale)
    return found


MOST_WIDTH = 256
"""Widest head that flash attention on GPUs takes."""
KERNELS = {
    "cpu": FlashKernel(lambda query: True, _forward_on_cpu, _backward_on_cpu),
    "cuda": FlashKernel(
        lambda query: (
            query.dtype in (torch.float16, torch.bfloat16)
            and query.shape[-1] <= MOST_WIDTH - 8
            and torch.backends.cuda.is_flash_attention_available()
        ),
        _forward_on_gpu,
        _backward_on_gpu,
    ),
}
"""By the type of device."""
