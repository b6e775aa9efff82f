"""A stretch of a transformer: the whole network, or the part of it that one pipeline chunk holds."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from torch import Tensor, nn

from trainer.models import bloom, gpt, llama
from trainer.spec import ModelConfig

FAMILIES: dict[str, ModuleType] = {"gpt": gpt, "llama": llama, "bloom": bloom}
"""Each module has Embedding, Block and Head, made from a ``ModelConfig``."""

EMBEDDING_WEIGHT = "embedding.tokens.weight"
HEAD_WEIGHT = "head.output.weight"


class Transformer(nn.Module):
    """Blocks ``blocks`` of a network (all, if None), with the embedding if it is the ``first`` stretch and the head if the ``last``.

    Input: tokens [s, b], or [s, b, h] from the stretch before. Output: logits [s, b, V], or [s, b, h]. Names of parameters
    count blocks from the start of the network, so they do not depend on how it is cut. A tied head shares the embedding's
    parameter where both are here.
    """

    def __init__(self, config: ModelConfig, blocks: range | None = None, first: bool = True, last: bool = True):
        super().__init__()
        family = FAMILIES[config.family]
        blocks = range(config.layers) if blocks is None else blocks
        self.embedding = family.Embedding(config) if first else None
        self.blocks = nn.ModuleDict({str(i): family.Block(config) for i in blocks})
        self.head = family.Head(config) if last else None
        if config.tied and self.embedding is not None and self.head is not None:
            self.head.output.weight = self.embedding.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)

    def units(self) -> Iterator[tuple[str, nn.Module]]:
        """Embedding, blocks and head in the order of computation, with their names."""
        if self.embedding is not None:
            yield "embedding", self.embedding
        for name, block in self.blocks.items():
            yield f"blocks.{name}", block
        if self.head is not None:
            yield "head", self.head
