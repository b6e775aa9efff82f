"""An encoder and its decoder as one chain of units, which may be cut anywhere (Raffel et al. 2020, arXiv 1910.10683).

Every boundary hands on both residual streams, so all boundaries are alike: the stack that does not compute passes its stream through. The
decoder's tokens are embedded with the encoder's, in the first part: sending them along costs the bytes of a short sequence, where a copy
of the embedding would cost its gradients and states. Tables of relative positions travel likewise, and their gradients come back summed.

Shapes: e tokens that are read, d that are written, b micro-batch, h hidden. Streams are [e, b, h] and [d, b, h].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.attention import Attention, AttentionCore, causal_mask, kept
from trainer.models.layers import MLP, Dropout, Init, Linear, ParameterModule, ParameterSpec, PositionEmbedding, TokenEmbedding, norm
from trainer.models.transformer import EMBEDDING_WEIGHT, Head, Loss, Transformer, embedding_std
from trainer.shared.parallel.boundary import BiasedStreamTensors, PairTokens, StreamTensors
from trainer.shared.parallel.placement import Shard
from trainer.shared.run.resolved import ResolvedModelConfig

ENCODER, DECODER = 0, 1
"""Stacks, by their place in the tables of relative positions."""


class RelativeTable(ParameterModule):
    """The biases of one stack's attention scores, by bucket of distance and head."""

    def __init__(self, c: ResolvedModelConfig):
        super().__init__()
        self.own("weight", (c.relative_buckets, c.heads), ParameterSpec(Init(c.init_std), placement={"tensor": Shard(1)}))

    def forward(self) -> Tensor:
        return self.weight


class PairEmbedding(nn.Module):
    """The tokens of both stacks to their residual streams; and the tables of relative positions, [2, buckets, heads]."""

    def __init__(self, c: ResolvedModelConfig):
        super().__init__()
        self.tokens = TokenEmbedding(c.vocab, c.hidden, embedding_std(c), tied=EMBEDDING_WEIGHT if c.tied else None, uses=2)
        self.scale = c.embedding_scale
        learned, relative = c.positions == "learned", c.positions == "relative"
        self.positions = PositionEmbedding(c.seq, c.hidden, c.init_std) if learned else None
        self.decoder_positions = PositionEmbedding(c.decoder_seq, c.hidden, c.init_std) if learned else None
        self.tables = nn.ModuleList([RelativeTable(c) for _ in (ENCODER, DECODER)]) if relative else None
        self.dropout, self.decoder_dropout = Dropout(c.dropout), Dropout(c.dropout)

    def forward(self, tokens: PairTokens) -> StreamTensors | BiasedStreamTensors:
        encoder = self._stream(tokens.read, self.positions, self.dropout)
        decoder = self.written(tokens.written)
        if self.tables is None:
            return StreamTensors(encoder, decoder)
        return BiasedStreamTensors(encoder, decoder, torch.stack([table() for table in self.tables]))

    def written(self, tokens: Tensor) -> Tensor:
        """Embeds tokens of the decoder, [d, b] -> [d, b, h]."""
        return self._stream(tokens, self.decoder_positions, self.decoder_dropout)

    def _stream(self, tokens: Tensor, positions: nn.Module | None, dropout: nn.Module) -> Tensor:
        x: Tensor = self.tokens(tokens)
        x = x if self.scale == 1 else x * self.scale
        dropped: Tensor = dropout(x if positions is None else positions(x))
        return dropped


class StackAttention(Attention):
    """Self-attention of a stack, [s, b, h] -> [s, b, h], whose scores have the stack's biases."""

    def __init__(self, c: ResolvedModelConfig, stack: int):
        super().__init__(c, output_std(c, "output", c.query_width), StackCore(c, stack, causal=stack == DECODER), None)
        spec = self.qkv.specs["weight"]
        self.qkv.specs["weight"] = replace(spec, init=replace(spec.init, factors=(query_factor(c), 1.0, 1.0)))

    def forward(self, x: Tensor, tables: Tensor | None = None) -> Tensor:
        query, key, value = self.qkv(x).unbind(-2)
        attended: Tensor = self.output(self.core(query, key, value, tables))
        return attended


class CrossAttention(nn.Module):
    """[d, b, h] -> [d, b, h], which sees the encoder's output [e, b, h], whole on every tensor rank."""

    def __init__(self, c: ResolvedModelConfig):
        super().__init__()
        bias = "qkv" in c.biases
        self.query = Linear(c.hidden, (c.heads, c.head_width), c.init_std * query_factor(c), bias, cut=Shard(0))
        self.kv = Linear(c.hidden, (c.heads, 2, c.head_width), c.init_std, bias, cut=Shard(0), entered=True)
        self.core = StackCore(c, None, causal=False)
        self.output = Linear(c.query_width, (c.hidden,), output_std(c, "output", c.query_width), "output" in c.biases, cut=Shard(1))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        key, value = self.kv(memory).unbind(-2)
        attended: Tensor = self.output(self.core(self.query(x), key, value))
        return attended


class StackCore(AttentionCore):
    """softmax(scale q k^T + bias) v. q [q, b, heads, d], k and v [k, b, heads, d] -> [q, b, heads d].

    Biases are those of ``stack``, if any; the last query of self-attention stands at the last key. ``visible``: the keys that are there,
    [b, 1, 1, k]; None: all. Weights with dropout are computed unfused.
    """

    def __init__(self, c: ResolvedModelConfig, stack: int | None, causal: bool):
        super().__init__(c)
        self.stack, self.causal, self.crosses = stack, causal, stack is None
        self.buckets, self.distance = c.relative_buckets, c.relative_distance

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tables: Tensor | None = None) -> Tensor:
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [b, heads, s, d]
        bias = self._bias(query, key, tables)
        if self.fused and not (self.training and self.dropout.p):
            output = F.scaled_dot_product_attention(query, key, value, bias, scale=self.scale)
        else:
            scores = query @ key.transpose(-1, -2) * self.scale
            weights = torch.softmax(scores if bias is None else scores + bias, -1)
            output = self.dropout(weights, key.shape[-2]) @ value
        return output.permute(2, 0, 1, 3).flatten(2)

    def _bias(self, query: Tensor, key: Tensor, tables: Tensor | None) -> Tensor | None:
        """Returns the biases of scores: those of positions, and -inf for keys that are not seen."""
        count, keys = query.shape[-2], key.shape[-2]
        places = count, keys, self.causal, query.device
        visible = None if self.visible is None else self.visible()
        bias = None
        if tables is not None and self.stack is not None:
            rows = bucket_of(*places, self.buckets, self.distance)
            bias = F.embedding(rows, tables[self.stack]).permute(2, 0, 1)  # [heads, q, k]
        if self.causal:
            hidden = causal_mask(count, keys, query.dtype, query.device)
            bias = hidden if bias is None else bias + hidden
        if visible is not None:
            absent = torch.zeros(visible.shape, dtype=query.dtype, device=query.device).masked_fill(~visible, -math.inf)
            bias = absent if bias is None else bias + absent
        return bias


@kept
def bucket_of(queries: int, keys: int, causal: bool, device: torch.device, buckets: int, distance: int) -> Tensor:
    """Returns the bucket of each query and key, [queries, keys], by how far the key stands behind the query; the last query stands at the
    last key.

    Half of a direction's buckets are exact distances, the others logarithmic up to ``distance``. Where keys on both sides are seen, each
    side has half of all buckets, the later keys the second half.
    """
    place = torch.arange(keys, device=device)
    behind = place[keys - queries :, None] - place
    count, first = (buckets, 0) if causal else (buckets // 2, torch.where(behind < 0, buckets // 2, 0))
    away = behind.clamp(min=0) if causal else behind.abs()
    exact = count // 2
    far = torch.log(away.clamp(min=1).float() / exact) / math.log(distance / exact) * (count - exact)
    return first + torch.where(away < exact, away, (exact + far.long()).clamp(max=count - 1))


class InnerDropout(Dropout):
    """Dropout between the matrices of an MLP, whose tensor ranks have their part of the inner width."""


class DroppingMLP(MLP):
    """An MLP that drops behind its activation, too, as T5's does."""

    def __init__(self, c: ResolvedModelConfig, down_std: float):
        super().__init__(c, down_std)
        self.dropout = InnerDropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.activation(self.up(x))))


class EncoderBlock(nn.Module):
    """[e, b, h] -> [e, b, h]."""

    def __init__(self, c: ResolvedModelConfig, stack: int = ENCODER):
        super().__init__()
        self.attention_norm = norm(c)
        self.attention, self.attention_dropout = StackAttention(c, stack), Dropout(c.dropout)
        self.mlp_norm, self.mlp_dropout = norm(c), Dropout(c.dropout)
        self.mlp = DroppingMLP(c, output_std(c, "down", c.ffn))

    def forward(self, x: Tensor, tables: Tensor | None = None) -> Tensor:
        return self._transformed(self._attended(x, tables))

    def _attended(self, x: Tensor, tables: Tensor | None) -> Tensor:
        added: Tensor = self.attention_dropout(self.attention(self.attention_norm(x), tables))
        return x + added

    def _transformed(self, x: Tensor) -> Tensor:
        added: Tensor = self.mlp_dropout(self.mlp(self.mlp_norm(x)))
        return x + added


class DecoderBlock(EncoderBlock):
    """[d, b, h] -> [d, b, h], which sees the encoder's output [e, b, h]."""

    def __init__(self, c: ResolvedModelConfig):
        super().__init__(c, DECODER)
        self.cross_norm, self.cross, self.cross_dropout = norm(c), CrossAttention(c), Dropout(c.dropout)

    def forward(self, x: Tensor, memory: Tensor, tables: Tensor | None = None) -> Tensor:  # type: ignore[override]
        x = self._attended(x, tables)
        return self._transformed(x + self.cross_dropout(self.cross(self.cross_norm(x), memory)))


class EncoderEnd(nn.Module):
    """Makes the encoder's output of its residual stream, [e, b, h]."""

    def __init__(self, c: ResolvedModelConfig):
        super().__init__()
        self.norm, self.dropout = norm(c), Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.dropout(self.norm(x))
        return output


class Entry(nn.Module):
    """Hands the encoder's output to the decoder's blocks; the parallel form makes it whole on every tensor rank."""

    def forward(self, memory: Tensor) -> Tensor:
        return memory


class EncoderDecoder(Transformer):
    """Blocks ``blocks`` of both stacks, the encoder's first, as ``Transformer`` has those of one.

    Input: the tokens of both stacks, or the output of the previous part. Output: logits [d, b, V], the loss of them, or the input of the
    next part. The encoder's last norm stands with the decoder's first block.
    """

    def __init__(self, config: ResolvedModelConfig, blocks: range | None = None, first: bool = True, last: bool = True):
        nn.Module.__init__(self)
        blocks = range(config.layers) if blocks is None else blocks
        self.border = config.encoder_layers
        self.embedding = PairEmbedding(config) if first else None  # type: ignore[assignment]
        self.blocks = nn.ModuleDict({str(i): EncoderBlock(config) if i < self.border else DecoderBlock(config) for i in blocks})
        self.encoder_end = EncoderEnd(config) if self.border in blocks else None
        self.enter = Entry()
        self.head = Head(config) if last else None
        if config.tied and self.embedding is not None and self.head is not None:
            self.head.output.weight = self.embedding.tokens.weight

    def forward(self, given: Any, loss: Loss | None = None) -> Any:
        return self.transformed(given if self.embedding is None else self.embedding(given), loss)

    def transformed(self, streams: StreamTensors | BiasedStreamTensors, loss: Loss | None) -> Any:
        """Computes all but the embedding."""
        encoder, decoder, tables = streams.encoder, streams.decoder, getattr(streams, "tables", None)
        memory: Tensor | None = None
        for name, block in self.blocks.items():
            if int(name) < self.border:
                encoder = block(encoder, tables)
                continue
            if int(name) == self.border and self.encoder_end is not None:
                encoder = self.encoder_end(encoder)
            memory = self.enter(encoder) if memory is None else memory
            decoder = block(decoder, memory, tables)
        if self.head is None:
            return streams._replace(encoder=encoder, decoder=decoder)
        return self.head(decoder, loss)

    def units(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields embedding, blocks, the encoder's end before the decoder's first block, and head, with their names."""
        for name, unit in super().units():
            if name == f"blocks.{self.border}" and self.encoder_end is not None:
                yield "encoder_end", self.encoder_end
            yield name, unit


def query_factor(c: ResolvedModelConfig) -> float:
    """Returns the factor of the initial queries' standard deviation that leaves scores theirs, whatever the attention scale."""
    return 1 / (math.sqrt(c.head_width) * c.attention_scale)


def output_std(c: ResolvedModelConfig, name: str, inputs: int) -> float:
    """Returns the initial standard deviation of the matrices ``name`` that write to a residual stream: by ``inputs``, like all others,
    or 0."""
    return 0.0 if name in c.zero_init else c.init_std * math.sqrt(c.hidden / inputs)


def network(config: ResolvedModelConfig, blocks: range | None = None, first: bool = True, last: bool = True) -> Transformer:
    """Returns the network of a model, or the part of it that has these blocks (``Transformer``)."""
    return (EncoderDecoder if config.encoder_layers else Transformer)(config, blocks, first, last)
