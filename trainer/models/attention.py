"""Causal self-attention: grouped queries, rotary positions or ALiBi, fused or unfused."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.models.layers import Linear, head_norm
from trainer.models.rope import Angles
from trainer.shared.parallel.placement import Shard
from trainer.shared.parallel.sequence import Runs, with_rows
from trainer.shared.run.resolved import ResolvedModelConfig

P = ParamSpec("P")
InBlocks = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, int], Tensor]
"""Attention with dropout, as a function of query, key, value, visible keys, scale and length of the sequence
(``trainer.tensor.block_attention``)."""
Exchange = Callable[["AttentionCore", Tensor, Tensor, Tensor], Tensor]
"""Attention of ranks that share sequences, by the core and this rank's part of query, key and value (``trainer.tensor.context``)."""


class Attention(nn.Module):
    """[s, b, h] -> [s, b, h].

    The output of ``qkv`` is ordered by group: for each of the ``kv_heads`` groups its query heads, one key and one value. Tensor
    parallelism therefore splits it between groups. ``core`` is the part that selective recomputation repeats.
    """

    def __init__(self, c: ResolvedModelConfig, output_std: float, core: AttentionCore, rotary: Rotary | None):
        super().__init__()
        self.qkv = Linear(c.hidden, (c.kv_heads, c.heads // c.kv_heads + 2, c.head_width), c.matrix_std, "qkv" in c.biases, cut=Shard(0))
        self.query_norm, self.key_norm = head_norm(c, c.heads), head_norm(c, c.kv_heads)
        self.rotary = rotary
        self.core = core
        self.output = Linear(c.query_width, (c.hidden,), output_std, "output" in c.biases, cut=Shard(1))

    def forward(self, x: Tensor) -> Tensor:
        groups = self.qkv(x)  # [s, b, kv_heads, queries + 2, head]
        query, key, value = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary is not None:
            query, key = self.rotary(query, key)
        return self.output(self.core(query, key, value))


class AttentionCore(nn.Module):
    """softmax(scale q k^T) v, causal. q [s, b, heads, d], k and v [s, b, kv_heads, d] -> [s, b, heads d].

    ``heads`` are the global indices of the heads in q. A query sees the ``window`` keys up to its own, or all; scores may be capped.
    No fused kernel has caps, or dropout of attention weights that is the same in every layout: ``in_blocks`` takes its place.
    """

    def __init__(self, c: ResolvedModelConfig, block: int = 0):
        super().__init__()
        self.heads = range(c.heads)
        self.alibi = Alibi(c.heads, c.attention_scale) if c.positions == "alibi" else None
        self.fused, self.scale, self.cap, self.window = c.attention == "fused", c.attention_scale, c.score_cap, c.window_of(block)
        self.dropout: nn.Module = AttentionDropout(c.dropout)
        self.in_blocks: InBlocks | None = None
        self.visible: Callable[[], Tensor] | None = None  # the keys that each query sees, [b, 1, s, s]; None: all up to itself
        self.exchange: Exchange | None = None
        self.gathers_again = True  # keys and values of other ranks, for backward; else they are kept
        self.crosses = False  # keys and values are another sequence's

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attend(query, key, value) if self.exchange is None else self.exchange(self, query, key, value)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, runs: Runs | None = None, length: int | None = None) -> Tensor:
        """Lets the queries at the positions ``runs`` see whole sequences of keys and values. Without ``runs`` the last query stands at the
        last key, in sequences of ``length`` (None: as many as keys)."""
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [b, heads, s, d]
        if self.alibi is not None:
            query, key = self.alibi(query, key, self.heads)
        if runs is None:
            output = self._attend(query, key, value, length or key.shape[-2])
        else:
            seen = ((rows, slice(run.stop)) for rows, run in with_rows(runs))
            parts = (self._attend(query[..., rows, :], key[..., past, :], value[..., past, :], key.shape[-2]) for rows, past in seen)
            output = torch.cat(tuple(parts), -2)
        return output.permute(2, 0, 1, 3).flatten(2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, length: int) -> Tensor:
        """Lets queries see keys, the last query all of them, in sequences of ``length``."""
        plain, visible = self.cap is None and not (self.training and self.dropout.p), None
        if self.visible is not None:
            visible = self.visible()[..., key.shape[-2] - query.shape[-2] : key.shape[-2], : key.shape[-2]]
        if self.fused and plain:
            return self._fused(query, key, value, visible)
        if self.fused and self.in_blocks is not None:
            return self.in_blocks(query, key, value, visible, self.scale, length)
        return self._unfused(query, key, value, visible, length)

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
        count, keys, head = query.shape[-2], key.shape[-2], value.shape[-1]
        if query.shape[-1] > head:
            value = F.pad(value, (0, query.shape[-1] - head))  # the fast kernels want one head size
        window, before = keys if self.window is None else self.window, keys - count
        if visible is not None:
            mask = visible & band(before, count, keys, window, query.device)
            return self._kernel(query, key, value, mask)[..., :head]
        if window >= keys:
            return self._kernel(query, key, value, lower_right(count, keys, query.device) if before else None)[..., :head]
        parts = []
        for first in range(0, count, window):  # a window of queries sees itself and the window before
            rows = slice(first, min(first + window, count))
            seen = slice(max(0, before + first - window + 1), before + rows.stop)
            mask = band(before + first - seen.start, rows.stop - rows.start, seen.stop - seen.start, window, query.device)
            parts.append(self._kernel(query[..., rows, :], key[..., seen, :], value[..., seen, :], mask))
        return torch.cat(parts, -2)[..., :head]

    def _kernel(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped)

    def _unfused(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, length: int) -> Tensor:
        groups, count, keys = key.shape[1], query.shape[-2], key.shape[-2]
        query = query.unflatten(1, (groups, -1))  # [b, groups, queries, s, d]
        scores = capped(query @ key.unsqueeze(2).transpose(-1, -2) * self.scale, self.cap)
        if visible is None and self.window is None:
            scores = scores + causal_mask(count, keys, query.dtype, query.device)
        else:
            seen = band(keys - count, count, keys, self.window or keys, query.device)
            scores = scores.masked_fill(~(seen if visible is None else seen & visible[:, None]), -math.inf)
        weights = torch.softmax(scores, dim=-1)
        weights = self.dropout(weights.flatten(1, 2), length).unflatten(1, (groups, -1))
        return (weights @ value.unsqueeze(2)).flatten(1, 2)


def kernels_by_preference(capability: tuple[int, int]) -> contextlib.AbstractContextManager[None]:
    """Makes fused attention use the first kernel in order of preference that can do the work, inside a ``with`` block.

    cuDNN's comes first on Hopper and on Blackwell's large chips: 631 TFLOP/s where torch's own choice reached 329 (pytorch issue 142132),
    1.7 to 2.3 times as fast for shapes of training, but slower than flash attention on A100, A10G and RTX PRO 6000 (transformers #48163).
    """
    first = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    if capability not in ((9, 0), (10, 0)):
        first.reverse()
    return sdpa_kernel([*first, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True)


class AttentionDropout(nn.Module):
    """Dropout of attention weights [b, heads, queries, keys]."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, weights: Tensor, length: int) -> Tensor:
        """Drops weights of sequences of ``length``."""
        return F.dropout(weights, self.p, self.training) if self.p else weights


def kept(compute: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Decorates a function of plain values: its tensor is computed once and shared by all layers of a rank. Compiled code fuses the
    computation."""
    remembered = lru_cache(maxsize=8)(torch.no_grad()(compute))

    @wraps(compute)
    def look_up(*arguments: P.args, **named: P.kwargs) -> Tensor:
        if torch.compiler.is_compiling():
            return compute(*arguments, **named)
        return remembered(*arguments, **named)  # type: ignore[arg-type]

    return look_up


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Returns cap tanh(x / cap), or x if there is no cap."""
    return x if cap is None else cap * torch.tanh(x / cap)


@kept
def band(offset: int, rows: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Returns [rows, keys], true where the query at ``offset`` + row sees a key: the ``window`` keys up to itself."""
    query = torch.arange(offset, offset + rows, device=device)[:, None]
    key = torch.arange(keys, device=device)
    return (key <= query) & (key > query - window)


def lower_right(queries: int, keys: int, device: torch.device) -> Tensor:
    """Returns the mask with which the last query sees the last key, as the fast kernels of a device know it."""
    if device.type == "cpu":  # it would become this one, and its module imports all of torch's compiler, as long as torch itself takes
        return band(keys - queries, queries, keys, keys, device)
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(queries, keys)


@kept
def causal_mask(queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns [queries, keys]: 0 where a query sees a key, -inf elsewhere; the last query sees the last key."""
    return torch.full((queries, keys), -math.inf, dtype=dtype, device=device).triu(1 + keys - queries)


class Alibi(nn.Module):
    """Attention with linear biases: key j adds ``-slope (i - j)`` to the score of query i (Press et al. 2022).

    Softmax ignores a constant added to a whole row, so ``slope j`` does the same. The product of queries and keys adds it itself, in extra
    columns: no bias of [heads, s, s], and every fused kernel can be used.
    """

    def __init__(self, heads: int, scale: float):
        super().__init__()
        self.slopes, self.scale = slopes(heads), scale

    def forward(self, query: Tensor, key: Tensor, heads: range, runs: Runs | None = None) -> tuple[Tensor, Tensor]:
        """Returns query [b, heads, s, d] and key [b, groups, s, d], at positions ``runs`` or from 0 on, with 8 more columns each."""
        own = tuple(self.slopes[h] / self.scale for h in heads)  # scores are multiplied by it
        steep = slope_columns(own, query.dtype, query.device).expand(*query.shape[:-1], -1)
        place = position_columns(runs or (range(key.shape[-2]),), key.dtype, key.device).expand(*key.shape[:-1], -1)
        return torch.cat((query, steep), -1), torch.cat((key, place), -1)


@kept
def slope_columns(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns [heads, 1, 8]: each value as a sum of three numbers of ``dtype``, each twice, then zeros: 24 bits even in bfloat16."""
    left = torch.tensor(values, dtype=torch.float64, device=device)
    columns = []
    for _ in range(3):
        columns += [left.to(dtype)] * 2
        left = left - columns[-1].double()
    return F.pad(torch.stack(columns, -1), (0, 2))[:, None]


@kept
def position_columns(runs: Runs, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns [s, 8]: each position as a multiple of 256 and the rest, both exact in bfloat16; three times, then zeros."""
    position = torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])
    pair = torch.stack((position - position % 256, position % 256), -1).to(dtype)
    return F.pad(pair.repeat(1, 3), (0, 2))


def slopes(heads: int) -> list[float]:
    """Returns the geometric series from 2^(-8/n), for n the largest power of two up to ``heads``; further heads take every other slope of
    the series for 2n."""
    n = 2 ** int(math.log2(heads))
    first = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    return first + [2 ** (-4 * (2 * i + 1) / n) for i in range(heads - n)]


class Rotary(nn.Module):
    """Rotates pairs (i, i + r/2) of each head's first r dimensions by ``position * frequency[i]`` (Su et al. 2021)."""

    def __init__(self, angles: Angles):
        super().__init__()
        self.angles = angles
        self.runs: Callable[[int], Runs] = lambda rows: (range(rows),)  # positions of so many rows

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates both, [s, b, heads, d], each with its own number of heads."""
        cos, sin = rotary_table(self.runs(query.shape[0]), *self.angles, query.dtype, query.device).unbind()
        return rotated(query, cos, sin), rotated(key, cos, sin)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [s, b, heads, d] by the angles of ``cos`` and ``sin``, [s, 1 or b, 1, r/2]; dimensions from r on are unchanged."""
    width = cos.shape[-1]
    first, second, rest = x[..., :width], x[..., width : 2 * width], x[..., 2 * width :]
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat(turned if 2 * width == x.shape[-1] else (*turned, rest), dim=-1)


def rotary_table(runs: Runs, frequencies: tuple[float, ...], magnitude: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns cos and sin, [2, s, 1, 1, r/2], computed in fp64 and rounded to ``dtype``. They are a constant for torch.compile (see
    ``compile_blocks``), because fp64 is slow on a GPU."""
    return _rotary_table(runs, frequencies, magnitude, dtype, device)


@lru_cache(maxsize=32)  # one for each slice of a sequence
@torch.no_grad()
def _rotary_table(runs: Runs, frequencies: tuple[float, ...], magnitude: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    positions = torch.cat([torch.arange(run.start, run.stop, dtype=torch.float64, device=device) for run in runs])
    angle = torch.outer(positions, torch.tensor(frequencies, dtype=torch.float64, device=device))[:, None, None, :]
    return (torch.stack((angle.cos(), angle.sin())) * magnitude).to(dtype)
