"""Causal self-attention: grouped queries, rotary positions or ALiBi, fused or unfused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.layers import Dropout, Linear


class Attention(nn.Module):
    """[s, b, h] -> [s, b, h].

    The output of ``qkv`` is ordered by group: for each of the ``kv_heads`` groups its query heads, one key and one value. Tensor
    parallelism therefore splits it between groups. ``core`` is the part that selective recomputation repeats.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        std: float,
        output_std: float,
        bias: bool,
        core: AttentionCore,
        rotary: Rotary | None = None,
    ):
        super().__init__()
        head = hidden // heads
        self.qkv = Linear(hidden, (kv_heads, heads // kv_heads + 2, head), std, bias)
        self.rotary = rotary
        self.core = core
        self.output = Linear(hidden, (hidden,), output_std, bias)

    def forward(self, x: Tensor) -> Tensor:
        groups = self.qkv(x)  # [s, b, kv_heads, queries + 2, head]
        query, key, value = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
        if self.rotary is not None:
            query, key = self.rotary(query), self.rotary(key)
        return self.output(self.core(query, key, value))


class AttentionCore(nn.Module):
    """softmax(q k^T / sqrt(d) + bias) v, causal. q [s, b, heads, d], k and v [s, b, kv_heads, d] -> [s, b, heads d].

    ``heads`` are the global indices of the heads in q. The fused kernel is used unless attention weights have dropout.
    """

    def __init__(self, heads: int, fused: bool, dropout: float, alibi: bool = False):
        super().__init__()
        self.heads = range(heads)
        self.alibi = AlibiSlopes(heads) if alibi else None
        self.fused = fused and dropout == 0.0
        self.dropout: nn.Module = AttentionDropout(dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [b, heads, s, d]
        bias = None if self.alibi is None else self.alibi(query, self.heads)
        attend = self._fused if self.fused else self._unfused
        return attend(query, key, value, bias).permute(2, 0, 1, 3).flatten(2)

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        grouped = query.shape[1] != key.shape[1]
        mask = None if bias is None else bias.unsqueeze(0)  # torch.compile mishandles masks with fewer than four dimensions
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)

    def _unfused(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        groups = key.shape[1]
        query = query.unflatten(1, (groups, -1))  # [b, groups, queries, s, d]
        scores = query @ key.unsqueeze(2).transpose(-1, -2) / math.sqrt(query.shape[-1])
        mask = causal_mask(query) if bias is None else bias.unflatten(0, (groups, -1))
        weights = self.dropout(torch.softmax(scores + mask, dim=-1).flatten(1, 2)).unflatten(1, (groups, -1))
        return (weights @ value.unsqueeze(2)).flatten(1, 2)


class AttentionDropout(Dropout):
    """Dropout of attention weights [b, heads, s, s]."""


class LastValue:
    """Caches the last value of a function of a tensor's shape, dtype and device, and of further plain arguments."""

    def __init__(self, compute: Callable[..., Any]):
        self.compute = compute
        self.key: tuple[Any, ...] | None = None
        self.value: Any = None

    def __call__(self, like: Tensor, *arguments: Any) -> Any:
        key = (like.shape, like.dtype, like.device, *arguments)
        if key != self.key:
            with torch.no_grad():
                self.key, self.value = key, self.compute(like, *arguments)
        return self.value


def causal_mask(like: Tensor) -> Tensor:
    """[s, s]: 0 where key <= query, -inf elsewhere; s is the second-last dimension of ``like``."""
    s = like.shape[-2]
    return torch.full((s, s), -math.inf, dtype=like.dtype, device=like.device).triu(1)


class AlibiSlopes(nn.Module):
    """Attention with linear biases: key j adds ``-slope (i - j)`` to the score of query i (Press et al. 2022)."""

    def __init__(self, heads: int):
        super().__init__()
        self.slopes = slopes(heads)
        self.bias = LastValue(self._bias)

    def forward(self, query: Tensor, heads: range) -> Tensor:
        """[heads, s, s], with -inf above the diagonal, for query [b, heads, s, d]."""
        return self.bias(query, heads)

    def _bias(self, query: Tensor, heads: range) -> Tensor:
        s = query.shape[-2]
        distance = torch.arange(s, device=query.device)
        distance = distance.unsqueeze(0) - distance.unsqueeze(1)  # key - query
        own = torch.tensor([self.slopes[h] for h in heads], dtype=query.dtype, device=query.device)
        return own[:, None, None] * distance + causal_mask(query)


def slopes(heads: int) -> list[float]:
    """Geometric series from 2^(-8/n), for n the largest power of two up to ``heads``;
    further heads take every other slope of the series for 2n."""
    n = 2 ** int(math.log2(heads))
    first = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    return first + [2 ** (-4 * (2 * i + 1) / n) for i in range(heads - n)]


class Rotary(nn.Module):
    """Rotates pairs (i, i + d/2) of each head by ``position * theta^(-2i/d)`` (Su et al. 2021)."""

    def __init__(self, head: int, theta: float):
        super().__init__()
        self.head, self.theta = head, theta
        self.angles = LastValue(self._angles)

    def forward(self, x: Tensor) -> Tensor:
        """x [s, b, heads, d]."""
        cos, sin = self.angles(x)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _angles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [s, 1, 1, d/2], computed in fp64 and rounded to x's type."""
        frequency = self.theta ** (-torch.arange(0, self.head, 2, dtype=torch.float64, device=x.device) / self.head)
        angle = torch.outer(torch.arange(x.shape[0], dtype=torch.float64, device=x.device), frequency)[:, None, None, :]
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)
