"""A network with a cache of keys and values, so that each new token is computed alone.

It is the network of training, on the same ranks: attention cores, rotary embeddings and position vectors are replaced, from outside, by
ones that know their position in the text. Rows of a batch may differ in length: they are padded on the left, and padding is never
attended to.

Shapes: b rows, s new tokens, S columns read so far with them, g key/value heads, q query heads of each, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.attention import AttentionCore, capped
from trainer.models.latent import MultiHeadLatentAttention
from trainer.models.transformer import Head, Loss
from trainer.models.tuned import Prompts
from trainer.tensor.placed import place_embeddings

COLUMNS = 32
"""Columns by which a memory grows: its content is copied once per that many tokens."""


@dataclass
class KVCache:
    """The cache of some rows. ``padding`` [b] counts the padding on the left of each row; keys and values [b, g, C, d] are those of every
    block of this rank, by the block's local number: C columns are reserved, ``COLUMNS`` at a time, of which ``read`` are in use."""

    padding: Tensor
    read: int = 0  # columns, including padding
    new: int = 0
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    hidden: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all keys and values, including reserved columns."""
        return sum(tensor.nbytes for held in (self.keys, self.values) for tensor in held.values())

    def expect(self, new: int) -> None:
        """Prepares for ``new`` further tokens. The mask ``hidden`` [b, s, S] of later columns and padding is the same in all blocks."""
        self.new = new
        query = torch.arange(self.read, self.read + new, device=self.padding.device)
        key = torch.arange(self.read + new, device=self.padding.device)
        self.hidden = (key > query[:, None]) | (key < self.padding[:, None, None])

    def positions(self) -> Tensor:
        """Returns the position of each new token in its own row, [s, b]; 0 for padding."""
        columns = torch.arange(self.read, self.read + self.new, device=self.padding.device)
        return (columns[:, None] - self.padding).clamp(min=0)

    def append(self, block: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Appends the keys and values of new tokens to a block's, and returns all, [b, g, S, d]."""
        return self._append(self.keys, block, key), self._append(self.values, block, value)

    def _append(self, held: dict[int, Tensor], block: int, new: Tensor) -> Tensor:
        end = self.read + self.new
        if block not in held or held[block].shape[2] < end:
            larger = new.new_empty(*new.shape[:2], -(-end // COLUMNS) * COLUMNS, new.shape[3])
            if block in held:
                larger[:, :, : self.read] = held[block][:, :, : self.read]
            held[block] = larger
        held[block][:, :, self.read : end] = new
        return held[block][:, :, :end]

    def keep(self, rows: Tensor) -> KVCache:
        """Returns the memory of some rows, by index, without the columns that are padding in all of them."""
        padding = self.padding[rows]
        spare = int(padding.min()) if len(rows) else 0
        keys, values = ({i: t[rows, :, spare : self.read] for i, t in held.items()} for held in (self.keys, self.values))
        return KVCache(padding - spare, self.read - spare, keys=keys, values=values)

    def joined(self, other: KVCache) -> KVCache:
        """Returns the memory of the rows of both, the shorter ones padded on the left."""
        read = max(self.read, other.read)
        a, b = self._widened(read), other._widened(read)
        keys, values = ({i: torch.cat((own[i], new[i])) for i in own} for own, new in ((a.keys, b.keys), (a.values, b.values)))
        return KVCache(torch.cat((a.padding, b.padding)), read, keys=keys, values=values)

    def _widened(self, read: int) -> KVCache:
        more = read - self.read
        keys, values = ({i: F.pad(t[:, :, : self.read], (0, 0, more, 0)) for i, t in held.items()} for held in (self.keys, self.values))
        return KVCache(self.padding + more, read, keys=keys, values=values)


class CacheView:
    """The memory in use, and whether logits are needed after every token. Shared by all placed layers of a rank."""

    def __init__(self, device: torch.device):
        self.every = False
        self.memory = KVCache(torch.zeros(0, dtype=torch.long, device=device))


class CachedCore(nn.Module):
    """Attention over everything read so far. q [s, b, g q, d], k and v [s, b, g, d] -> [s, b, g q d]. ``shared``: values are so many first
    numbers of keys, and not cached."""

    def __init__(self, core: AttentionCore, block: int, reading: CacheView, shared: int = 0):
        super().__init__()
        self.shared = shared
        self.alibi, self.heads, self.block, self.reading = core.alibi, core.heads, block, reading
        self.scale, self.cap, self.window = core.scale, core.cap, core.window

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [b, heads, s, d]
        keys, values = self.reading.memory.append(self.block, key, value[..., :0] if self.shared else value)
        values = keys[..., : self.shared] if self.shared else values
        query = query.unflatten(1, (key.shape[1], -1))  # [b, g, q, s, d]
        scores = capped(query @ keys.unsqueeze(2).transpose(-1, -2) * self.scale, self.cap)
        if self.alibi is not None:
            scores = scores + self._bias(scores, self.alibi.slopes)
        hidden = self.reading.memory.hidden[:, None, None]
        if self.window is not None:
            hidden = hidden | (self._distance(scores) <= -self.window)
        weights = torch.softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min), dim=-1)
        return (weights @ values.unsqueeze(2)).flatten(1, 2).permute(2, 0, 1, 3).flatten(2)

    def _bias(self, scores: Tensor, slopes_of: list[float]) -> Tensor:
        """Returns ALiBi's bias, minus slope times distance, [g, q, s, S]. Column distances suffice: padding is on the left of all."""
        slopes = torch.tensor([slopes_of[h] for h in self.heads], dtype=scores.dtype, device=scores.device)
        return slopes.unflatten(0, (scores.shape[1], -1))[..., None, None] * self._distance(scores)

    def _distance(self, scores: Tensor) -> Tensor:
        """Returns the column of the key minus that of the query, [s, S]."""
        columns = torch.arange(scores.shape[-1], device=scores.device)
        return columns - columns[-scores.shape[-2] :, None]


class CachedLatents(nn.Module):
    """``MultiHeadLatentAttention`` that caches, of a token, its latent and the key that all heads share: keys of one head, whose first
    numbers are the values, too. The matrix that makes keys of latents is multiplied with queries instead, and the one that makes values,
    with sums of weighed latents (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.2)."""

    def __init__(self, attention: MultiHeadLatentAttention, block: int, reading: CacheView):
        super().__init__()
        self.attention, self.core = attention, CachedCore(attention.core, block, reading, attention.rank)
        del attention.core

    def forward(self, x: Tensor) -> Tensor:
        query, latent, shared = self.attention.parts(x)
        head, expand = self.attention.head_width, self.attention.latent.expand.weight  # [heads, head + value, rank]
        asked = torch.einsum("sbhd,hdr->sbhr", query[..., :head], expand[:, :head])
        latent = latent.unsqueeze(2)
        found = self.core(torch.cat((asked, query[..., head:]), -1), torch.cat((latent, shared), -1), latent)
        values = torch.einsum("sbhr,hvr->sbhv", found.unflatten(2, (-1, self.attention.rank)), expand[:, head:])
        return self.attention.output(values.flatten(2))  # type: ignore[no-any-return]


class LastToken(nn.Module):
    """A head that computes logits after the last token only, unless ``reading.every``. [s, b, h] -> [1, b, V]."""

    def __init__(self, head: nn.Module, reading: CacheView):
        super().__init__()
        self.inner, self.reading = head, reading

    def forward(self, x: Tensor, loss: Loss | None = None) -> Tensor:
        logits: Tensor = self.inner(x if self.reading.every else x[-1:], loss)
        return logits


CACHED: dict[type[nn.Module], Callable[..., nn.Module]] = {AttentionCore: CachedCore, MultiHeadLatentAttention: CachedLatents}
"""Layers with a cache, by those whose place they take."""


def place(part: nn.Module, reading: CacheView) -> None:
    """Replaces the layers of a model's part by ones that use ``reading``. The part can no longer be trained."""
    blocks = 0
    place_embeddings(part, lambda: reading.memory.positions())
    for parent in list(part.modules()):
        for name, child in list(parent.named_children()):
            for kind, cached in CACHED.items():
                if isinstance(child, kind):
                    setattr(parent, name, cached(child, blocks, reading))
                    blocks += 1
            if isinstance(child, Prompts):
                child.positions = lambda: reading.memory.positions()
            elif isinstance(child, Head):
                setattr(parent, name, LastToken(child, reading))
