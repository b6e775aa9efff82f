"""Multi-head latent attention: queries, keys and values of all heads are made from low-rank latents (DeepSeek-AI 2024, arXiv 2405.04434,
section 2.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trainer.models.attention import AttentionCore, Rotary
from trainer.models.layers import NORMS, Linear
from trainer.shared.families.registry import FAMILIES
from trainer.shared.parallel.placement import Shard
from trainer.shared.run.resolved import ResolvedModelConfig

EPS = 1e-6
"""Epsilon of the norms of latents, whatever ``model.norm_eps`` is (DeepSeek's and Hugging Face's networks)."""


class LatentProduct(nn.Module):
    """A latent of ``rank`` numbers a token, and the numbers made from it: [s, b, h] -> [s, b, heads, width].

    ``compress`` gives the latent and ``beside`` further numbers, [s, b, rank + beside]; they are whole on every tensor rank, and so
    is the norm of the latent. Of ``expand`` a tensor rank has its heads.
    """

    def __init__(self, c: ResolvedModelConfig, rank: int, width: int, beside: int = 0):
        super().__init__()
        self.compress = Linear(c.hidden, (rank + beside,), c.init_std, bias=False)
        self.norm = NORMS[c.norm]((rank,), EPS, FAMILIES[c.family].norm_offset, bias=c.norm == "layer")
        self.expand = Linear(rank, (c.heads, width), c.init_std, bias=False, cut=Shard(0))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.expand(self.norm(self.compress(x)))
        return y


class MultiHeadLatentAttention(nn.Module):
    """[s, b, h] -> [s, b, h].

    Keys and values are made from one latent. A further key of ``rotary`` numbers, the same for all heads, has the position of a token, and
    each query as many numbers for it. Values may be narrower than keys. ``query`` is a matrix, or a product through a latent of its own.
    ``entered`` takes what all heads share to the heads of this rank.
    """

    def __init__(self, c: ResolvedModelConfig, output_std: float, core: AttentionCore, rotary: Rotary | None):
        super().__init__()
        latent, width = c.latent, c.head_width + c.latent.rotary
        self.query: nn.Module
        if latent.query_rank:
            self.query = LatentProduct(c, latent.query_rank, width)
        else:
            self.query = Linear(c.hidden, (c.heads, width), c.init_std, bias=False, cut=Shard(0))
        self.latent = LatentProduct(c, latent.kv_rank, c.head_width + c.value_width // c.heads, beside=latent.rotary)
        self.head_width, self.rank, self.turning, self.interleaved = c.head_width, latent.kv_rank, latent.rotary, latent.interleaved
        self.rotary, self.core = rotary, core
        self.entered: Callable[[Tensor], Tensor] = nn.Identity()
        self.output = Linear(c.value_width, (c.hidden,), output_std, "output" in c.biases, cut=Shard(1))

    def forward(self, x: Tensor) -> Tensor:
        query, latent, shared = self.parts(x)
        made = self.latent.expand(latent)  # [s, b, heads, head + value]
        key, value = made[..., : self.head_width], made[..., self.head_width :]
        key = torch.cat((key, shared.expand(-1, -1, key.shape[2], -1)), -1)
        return self.output(self.core(query, key, value))

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries [s, b, heads, head + rotary], the normalised latent of keys and values [s, b, rank], and the key that all heads
        share, [s, b, 1, rotary]. Positions are in them. Under sequence parallelism the latent is this rank's part."""
        query = self.query(x)
        compressed = self.latent.compress(x)
        latent, shared = self.latent.norm(compressed[..., : self.rank]), self.entered(compressed[..., self.rank :]).unsqueeze(2)
        if self.rotary is not None:
            plain, turned = query[..., : self.head_width], query[..., self.head_width :]
            turned, shared = self.rotary(self._halves(turned), self._halves(shared))
            query = torch.cat((plain, turned), -1)
        return query, latent, shared

    def _halves(self, x: Tensor) -> Tensor:
        """Puts pairs (2i, 2i + 1), which turn together, at (i, i + r/2). The order of a query's and a key's numbers does not matter beyond
        that."""
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.interleaved else x
