"""An encoder and its decoder for inference: a prompt is read once, and the decoder writes an answer behind it, token by token.

The first pass of new rows runs both stacks, with the token that a decoder begins with; what the decoder's blocks look up in the encoder's
output is kept then. Further passes run the decoder alone, and hand on its residual stream.

Shapes: b rows, e tokens of the longest prompt, S tokens written so far, g heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainer.comm.collectives import World
from trainer.data.text import TextTokens
from trainer.generate.cache import CacheView, KVCache, LastToken
from trainer.generate.session import Session
from trainer.generate.weights import Weights
from trainer.models.encoder_decoder import CrossAttention, EncoderDecoder, PairEmbedding, StackCore
from trainer.models.transformer import Loss
from trainer.shared.parallel.boundary import BoundaryTensors, PairTokens, boundary_shapes, stream_shapes
from trainer.shared.run.resolved import ResolvedTrainConfig
from trainer.tensor.placed import PlacedPositions


@dataclass
class AnswerCache(KVCache):
    """The cache of an answer, and in ``prompt`` the keys and values [b, g, e, d] of the encoder's output, by the decoder's blocks."""

    prompt: KVCache = field(default_factory=lambda: KVCache(torch.zeros(0, dtype=torch.long)))

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.prompt.nbytes

    @property
    def there(self) -> Tensor:
        """Returns which columns of prompts are not padding, [b, 1, 1, e]."""
        columns = torch.arange(self.prompt.read or self.prompt.new, device=self.prompt.padding.device)
        return (columns >= self.prompt.padding[:, None])[:, None, None]

    def keep(self, rows: Tensor) -> AnswerCache:
        return AnswerCache(**vars(super().keep(rows)), prompt=self.prompt.keep(rows))

    def joined(self, other: KVCache) -> AnswerCache:
        assert isinstance(other, AnswerCache)
        return AnswerCache(**vars(super().joined(other)), prompt=self.prompt.joined(other.prompt))


class AnswerView(CacheView):
    """The memory in use, shared by all placed layers of a rank."""

    memory: AnswerCache

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.memory = AnswerCache(torch.zeros(0, dtype=torch.long, device=device))


class WrittenCore(nn.Module):
    """Self-attention of a decoder over everything written so far. [s, b, g, d] each -> [s, b, g d]."""

    def __init__(self, core: StackCore, block: int, reading: AnswerView):
        super().__init__()
        self.core, self.block, self.reading = core, block, reading
        core.visible = lambda: ~reading.memory.hidden[:, None]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tables: Tensor | None = None) -> Tensor:
        kept = self.reading.memory.append(self.block, *(t.permute(1, 2, 0, 3) for t in (key, value)))
        attended: Tensor = self.core(query, *(t.permute(2, 0, 1, 3) for t in kept), tables)
        return attended


class KeptCross(nn.Module):
    """Attention to the encoder's output, whose keys and values are computed when it is given, once per prompt."""

    def __init__(self, cross: CrossAttention, block: int, reading: AnswerView):
        super().__init__()
        self.cross, self.block, self.reading = cross, block, reading
        cross.core.visible = lambda: reading.memory.there

    def forward(self, x: Tensor, memory: Tensor | None) -> Tensor:
        prompt, cross = self.reading.memory.prompt, self.cross
        if memory is not None:
            key, value = (t.permute(1, 2, 0, 3) for t in cross.kv(memory).unbind(-2))
            prompt.append(self.block, key, value)
        read = prompt.read or prompt.new
        key, value = (held[self.block][:, :, :read].permute(2, 0, 1, 3) for held in (prompt.keys, prompt.values))
        attended: Tensor = cross.output(cross.core(cross.query(x), key, value))
        return attended


class Answering(nn.Module):
    """A part of both stacks: all of it for prompts, and for further tokens what belongs to the decoder. Tables of positions, which are the
    same for all texts, are kept."""

    def __init__(self, part: EncoderDecoder, reading: AnswerView):
        super().__init__()
        self.part, self.reading = part, reading
        self.tables: Tensor | None = None
        blocks: dict[str, Any] = dict(part.blocks.items())
        for number, (name, block) in enumerate(blocks.items()):
            core = block.attention.core
            if int(name) < part.border:
                core.visible = lambda: reading.memory.there
            else:
                block.attention.core, block.cross = WrittenCore(core, number, reading), KeptCross(block.cross, number, reading)
        self.embedding: Any = part.embedding
        if isinstance(part.embedding, PairEmbedding):
            _place(part.embedding, reading)
        self.head = None if part.head is None else LastToken(part.head, reading)
        part.head = self.head  # type: ignore[assignment]

    def forward(self, given: Any, loss: Loss | None = None) -> Any:
        if not self.reading.memory.prompt.read:
            streams = given if self.embedding is None else self.embedding(given)
            self.tables = getattr(streams, "tables", None)
            return self.part.transformed(streams, loss)
        x = given.hidden if self.embedding is None else self.embedding.written(given)
        for name, block in self.part.blocks.items():
            if int(name) >= self.part.border:
                x = block(x, None, self.tables)
        return BoundaryTensors(hidden=x) if self.head is None else self.head(x, loss)


def _place(embedding: PairEmbedding, reading: AnswerView) -> None:
    """Makes learned positions those of each row."""
    if embedding.positions is not None and embedding.decoder_positions is not None:
        embedding.positions = PlacedPositions(embedding.positions, lambda: reading.memory.prompt.positions())  # type: ignore[arg-type,assignment]
        embedding.decoder_positions = PlacedPositions(embedding.decoder_positions, lambda: reading.memory.positions())  # type: ignore[arg-type,assignment]


class AnswerSession(Session):
    """A session of an encoder and its decoder, whose answers begin behind the token ``start``."""

    start = 0
    reading: AnswerView

    def _placed(self) -> None:
        self.reading = AnswerView(self.world.device)
        for chunk in self.pipeline.chunks:
            assert isinstance(chunk.model, EncoderDecoder)
            chunk.model = Answering(chunk.model, self.reading)  # type: ignore[assignment]

    def begin(self, padding: Sequence[int]) -> AnswerCache:
        """Returns an empty memory of rows whose prompts have that many tokens of padding on their left."""
        place = self.world.device
        return AnswerCache(torch.zeros(len(padding), dtype=torch.long, device=place), prompt=KVCache(torch.tensor(padding, device=place)))

    def said(self, prompt: Sequence[int], made: Sequence[int]) -> list[int]:
        return [self.start, *made]

    def _forward(self, memory: KVCache, tokens: Sequence[Sequence[int]]) -> Tensor | None:
        assert isinstance(memory, AnswerCache)
        rows, model = torch.tensor(tokens, device=self.world.device), self.config.model
        self.reading.memory, begins = memory, not memory.prompt.read
        memory.expect(1)
        if begins:
            memory.prompt.expect(rows.shape[1])
            tables = (2, model.relative_buckets, model.heads // self.config.layout.tensor) if model.positions == "relative" else None
            shapes = stream_shapes(rows.shape[1], 1, len(rows), model.hidden, tables)
            logits = self._through(shapes, PairTokens(rows.t(), torch.full_like(rows[:, :1].t(), self.start)))
            memory.prompt.read = memory.prompt.new
        else:
            logits = self._through(boundary_shapes(1, len(rows), model.hidden), rows.t())
        memory.read += 1
        return logits


def open_session(config: ResolvedTrainConfig, world: World, weights: Weights, words: TextTokens, task: int = 0) -> Session:
    """Returns the session of the ``weights`` of a model, and of the ``words`` that it reads."""
    if not config.model.encoder_layers:
        return Session(config, world, weights.load, weights.tune, task)
    session = AnswerSession(config, world, weights.load, weights.tune, task)
    session.start = words.start
    return session
