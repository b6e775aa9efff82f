"""A network that remembers the keys and values of what it has read, so that each new token is computed alone.

The network stays plain: its attention cores, rotary embeddings and position vectors are replaced, from outside, by ones that know where
in the text they are. Rows of a batch may differ in length: they are padded on the left, and what is padding is never attended to.

Shapes: b rows, s new tokens, S tokens read so far with them, g key/value heads, q query heads of each, d head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from trainer.models.attention import AttentionCore, Rotary
from trainer.models.layers import PositionEmbedding
from trainer.models.transformer import Transformer


@dataclass
class Reading:
    """Where in the text the next tokens stand. ``padding`` [b] counts the padding on the left of each row."""

    padding: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    read: int = 0  # columns, padding among them
    new: int = 0

    def positions(self) -> Tensor:
        """Position of each new token in its own row, [s, b]; of padding 0."""
        columns = torch.arange(self.read, self.read + self.new, device=self.padding.device)
        return (columns[:, None] - self.padding).clamp(min=0)

    def hidden(self) -> Tensor:
        """Which columns a new token must not see, [b, s, S]: what comes later, and padding."""
        query = torch.arange(self.read, self.read + self.new, device=self.padding.device)
        key = torch.arange(self.read + self.new, device=self.padding.device)
        return (key > query[:, None]) | (key < self.padding[:, None, None])


class CachedCore(nn.Module):
    """Attention over everything read so far. q [s, b, g q, d], k and v [s, b, g, d] -> [s, b, g q d]."""

    def __init__(self, core: AttentionCore, reading: Reading):
        super().__init__()
        self.alibi, self.heads, self.reading = core.alibi, core.heads, reading
        self.clear()

    def clear(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [b, heads, s, d]
        self.keys = key if self.keys is None else torch.cat((self.keys, key), dim=2)
        self.values = value if self.values is None else torch.cat((self.values, value), dim=2)
        query = query.unflatten(1, (key.shape[1], -1))  # [b, g, q, s, d]
        scores = query @ self.keys.unsqueeze(2).transpose(-1, -2) / math.sqrt(query.shape[-1])
        if self.alibi is not None:
            scores = scores + self._bias(scores, self.alibi.slopes)
        hidden = self.reading.hidden()[:, None, None]
        weights = torch.softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min), dim=-1)
        return (weights @ self.values.unsqueeze(2)).flatten(1, 2).permute(2, 0, 1, 3).flatten(2)

    def _bias(self, scores: Tensor, slopes_of: list[float]) -> Tensor:
        """ALiBi: minus slope times distance, [g, q, s, S]. Distances are those of columns: padding is on the left of all."""
        slopes = torch.tensor([slopes_of[h] for h in self.heads], dtype=scores.dtype, device=scores.device)
        columns = torch.arange(scores.shape[-1], device=scores.device)
        distance = columns - columns[-scores.shape[-2] :, None]  # key - query
        return slopes.unflatten(0, (scores.shape[1], -1))[..., None, None] * distance


class PlacedRotary(nn.Module):
    """``Rotary`` for tokens that stand anywhere."""

    def __init__(self, rotary: Rotary, reading: Reading):
        super().__init__()
        self.head, self.theta, self.reading = rotary.head, rotary.theta, reading

    def forward(self, x: Tensor) -> Tensor:
        """x [s, b, heads, d]. Angles are computed in fp64 and rounded, as in training."""
        frequency = self.theta ** (-torch.arange(0, self.head, 2, dtype=torch.float64, device=x.device) / self.head)
        angle = self.reading.positions().double()[..., None, None] * frequency  # [s, b, 1, d/2]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class PlacedPositions(nn.Module):
    """``PositionEmbedding`` for tokens that stand anywhere."""

    def __init__(self, positions: PositionEmbedding, reading: Reading):
        super().__init__()
        self.inner, self.reading = positions, reading

    def forward(self, x: Tensor) -> Tensor:
        """x [s, b, h]."""
        return x + self.inner.weight[self.reading.positions()]


class Cached:
    """A whole network with its memory. Takes over ``network``, which is of no use for anything else afterwards."""

    def __init__(self, network: Transformer):
        self.network, self.reading = network.eval(), Reading()
        self.cores: list[CachedCore] = []
        for parent in list(network.modules()):
            for name, child in list(parent.named_children()):
                if (placed := self._placed(child)) is not None:
                    setattr(parent, name, placed)

    def _placed(self, module: nn.Module) -> nn.Module | None:
        if isinstance(module, AttentionCore):
            self.cores.append(CachedCore(module, self.reading))
            return self.cores[-1]
        if isinstance(module, Rotary):
            return PlacedRotary(module, self.reading)
        return PlacedPositions(module, self.reading) if isinstance(module, PositionEmbedding) else None

    def begin(self, padding: Tensor) -> None:
        """Forget everything; the rows that come have ``padding`` [b] tokens of padding on their left."""
        self.reading.padding, self.reading.read = padding, 0
        for core in self.cores:
            core.clear()

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        """Logits [b, V] after the last of some further ``tokens`` [b, s]."""
        self.reading.new = tokens.shape[1]
        logits: Tensor = self.network(tokens.t())[-1]
        self.reading.read += self.reading.new
        return logits

    def keep(self, rows: Tensor) -> None:
        """Continue with only some of the rows, by index."""
        self.reading.padding = self.reading.padding[rows]
        for core in self.cores:
            if core.keys is not None and core.values is not None:
                core.keys, core.values = core.keys[rows], core.values[rows]
