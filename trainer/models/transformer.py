"""A decoder-only transformer: the whole network, or the part of it that one pipeline chunk holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from trainer.models.attention import Attention, AttentionCore, Rotary, capped
from trainer.models.experts import MixtureOfExperts
from trainer.models.latent import MultiHeadLatentAttention
from trainer.models.layers import MLP, VOCABULARY, Dropout, Linear, PositionEmbedding, TokenEmbedding, norm, residual_std
from trainer.models.rope import angles
from trainer.shared.families.block import branches
from trainer.shared.families.family import Family
from trainer.shared.families.registry import FAMILIES
from trainer.shared.parallel.boundary import BoundaryTensors
from trainer.shared.run.resolved import ResolvedModelConfig

Loss = Callable[[Tensor, nn.Module], Tensor]
"""A loss of the last norm's output [s, b, h] and the layer that makes logits of it. With both, a loss never needs all logits at once."""

EMBEDDING_WEIGHT = "embedding.tokens.weight"
"""Global name of the token embedding, and of a head that is tied to it."""


def embedding_std(c: ResolvedModelConfig) -> float:
    """Returns the standard deviation of initial token embeddings."""
    return c.init_std * (math.sqrt(c.hidden) if FAMILIES[c.family].wide_embedding else 1)


class Embedding(nn.Module):
    """Tokens [s, b] -> [s, b, h]."""

    def __init__(self, c: ResolvedModelConfig, family: Family):
        super().__init__()
        self.tokens = TokenEmbedding(c.vocab, c.hidden, embedding_std(c), tied=EMBEDDING_WEIGHT if c.tied else None)
        self.scale = c.embedding_scale
        self.positions = PositionEmbedding(c.seq, c.hidden, c.init_std) if c.positions == "learned" else None
        self.norm = norm(c) if family.embedding_norm else None
        self.dropout = Dropout(c.dropout) if family.embedding_dropout else None

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        x = x if self.scale == 1 else x * self.scale
        for layer in (self.positions, self.norm, self.dropout):
            x = x if layer is None else layer(x)
        return x


class Block(nn.Module):
    """[s, b, h] -> [s, b, h]. Attention and MLP add to the residual stream, one after the other or in parallel, each with a norm before or
    behind it, or both."""

    def __init__(self, c: ResolvedModelConfig, index: int = 0):
        super().__init__()
        output_std, down_std = residual_std(c, "output"), residual_std(c, "down")
        first, second = branches(c.norm_at, c.residual)
        self.parallel, self.scale = second.behind == 0, c.residual_scale
        self.attention_norm = norm(c) if first.before else None
        attention = MultiHeadLatentAttention if c.latent.kv_rank else Attention
        self.attention = attention(c, output_std, AttentionCore(c, index), Rotary(angles(c, index)) if c.turns(index) else None)
        self.attention_post_norm = norm(c) if first.after else None
        self.attention_dropout = Dropout(c.dropout)
        self.mlp_norm = norm(c) if second.before else None
        self.mlp = MixtureOfExperts(c, down_std) if c.mixes(index) else MLP(c, down_std)
        self.mlp_post_norm = norm(c) if second.after else None
        self.mlp_dropout = Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        first = x if self.attention_norm is None else self.attention_norm(x)
        attended = x + self._added(self.attention(first), self.attention_post_norm, self.attention_dropout)
        if self.parallel:
            second = first if self.mlp_norm is None else self.mlp_norm(x)
        else:
            second = attended if self.mlp_norm is None else self.mlp_norm(attended)
        return attended + self._added(self.mlp(second), self.mlp_post_norm, self.mlp_dropout)

    def _added(self, y: Tensor, post_norm: nn.Module | None, dropout: nn.Module) -> Tensor:
        """Applies the norm, dropout and factor that precede the addition to the residual stream."""
        dropped: Tensor = dropout(y if post_norm is None else post_norm(y))
        return dropped if self.scale == 1 else dropped * self.scale


class Head(nn.Module):
    """[s, b, h] -> logits [s, b, V], or the loss of them."""

    def __init__(self, c: ResolvedModelConfig):
        super().__init__()
        family, tied = FAMILIES[c.family], EMBEDDING_WEIGHT if c.tied else None
        self.norm, self.scale, self.cap = norm(c), c.logit_scale, c.logit_cap
        self.scale /= math.sqrt(c.hidden) if tied and family.tied_head_scaled else 1
        self.dropout = Dropout(c.dropout) if family.final_dropout else None
        std = embedding_std(c) if tied else 0.0 if "head" in c.zero_init else c.init_std
        group = "embedding" if tied else "head"
        self.output = Linear(c.hidden, (c.vocab,), std, "head" in c.biases, cut=VOCABULARY, tied=tied, group=group)

    def forward(self, x: Tensor, loss: Loss | None = None) -> Tensor:
        x = self.norm(x) if self.scale == 1 else self.norm(x) * self.scale
        x = x if self.dropout is None else self.dropout(x)
        return capped(self.output(x), self.cap) if loss is None else loss(x, self.output)


class Transformer(nn.Module):
    """Blocks ``blocks`` of a network (all, if None), with the embedding if this is the ``first`` part and the head if the ``last``.

    Input: tokens [s, b], or the output of the previous part. Output: logits [s, b, V], the loss of them, or the input of the next part.
    Parameter names count blocks from the start of the network, so they do not depend on where it is cut. A tied head shares the embedding's
    parameter if this part has both.
    """

    def __init__(self, config: ResolvedModelConfig, blocks: range | None = None, first: bool = True, last: bool = True):
        super().__init__()
        family = FAMILIES[config.family]
        blocks = range(config.layers) if blocks is None else blocks
        self.embedding = Embedding(config, family) if first else None
        self.blocks = nn.ModuleDict({str(i): Block(config, i) for i in blocks})
        self.head = Head(config) if last else None
        if config.tied and self.embedding is not None and self.head is not None:
            self.head.output.weight = self.embedding.tokens.weight

    def forward(self, given: Tensor | BoundaryTensors, loss: Loss | None = None) -> Tensor | BoundaryTensors:
        x = given.hidden if isinstance(given, BoundaryTensors) else given
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        if self.head is None:
            return BoundaryTensors(hidden=x)
        logits: Tensor = self.head(x, loss)
        return logits

    def units(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields embedding, blocks and head in the order of computation, with their names."""
        if self.embedding is not None:
            yield "embedding", self.embedding
        for name, block in self.blocks.items():
            yield f"blocks.{name}", block
        if self.head is not None:
            yield "head", self.head
