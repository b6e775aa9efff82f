"""Applies tensor parallelism to a plain model: how each matrix is sharded, and the record of every parameter."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import torch
from torch import nn

from trainer.comm.collectives import Group
from trainer.models.attention import AttentionCore
from trainer.models.layers import Dropout, Linear, Part, PositionEmbedding
from trainer.models.transformer import EMBEDDING_WEIGHT, HEAD_WEIGHT, Transformer
from trainer.models.tuned import LowRankLinear, Prompts
from trainer.shared.parallel.shards import vocabulary_rows
from trainer.state.parameters import Member, ParameterRecord
from trainer.tensor.block_attention import BlockAttention
from trainer.tensor.dropout import HiddenDropout, MatrixInputMask, Noise, ShardedAttentionDropout
from trainer.tensor.eight_bits import EightBitProduct
from trainer.tensor.fused import FusedProducts
from trainer.tensor.layers import (
    ColumnLinear,
    Gradients,
    LowRank,
    Region,
    RowLinear,
    ShardedLinear,
    ShardedPositionEmbedding,
    VocabularyEmbedding,
)


@dataclass(frozen=True)
class Split:
    """How a layer is split over the tensor ranks: its parallel form, and the dimension along which each parameter is split."""

    layer: type[nn.Module] | None  # None: the plain one
    weight: int
    bias: int | None = None  # None: replicated

    def dimension(self, key: str) -> int | None:
        """The dimension along which the parameter ``key`` is split. Of a low-rank product it is the factor on the matrix' split side."""
        if key == "lora_a":
            return -1 if self.layer is RowLinear else None
        if key == "lora_b":
            return None if self.layer is RowLinear else self.weight
        dimension: int | None = getattr(self, key)
        return dimension


SPLITS = {
    "embedding.tokens": Split(VocabularyEmbedding, 0),
    "attention.qkv": Split(ColumnLinear, 0, 0),
    "attention.output": Split(RowLinear, -1),
    "mlp.up": Split(ColumnLinear, -2, -1),
    "mlp.down": Split(RowLinear, -1),
    "head.output": Split(ColumnLinear, 0),
    "attention.scale": Split(None, 0),
    "mlp.scale": Split(None, 0),
}
"""By the last two parts of a layer's name. Every other parameter is replicated."""


@dataclass
class Parallelizer:
    """Turns plain parts of a model into this rank's share of them.

    ``tied``: head and embedding share their weight. ``apart``: they are on two pipeline ranks, of which this is the first if
    ``first``. ``added`` names the only parameters that are trained; None: all are. Parameters become empty tensors of ``dtype``
    on ``device``; the buckets that own their storage set their data.
    """

    region: Region
    gradients: Gradients
    noise: Noise
    dtype: torch.dtype
    device: torch.device
    tied: bool
    apart: bool
    first: bool
    added: frozenset[str] | None = None
    eight_bits: EightBitProduct | None = None  # of the blocks' matrices
    fused: FusedProducts | None = None  # likewise
    members: dict[nn.Parameter, Member] = field(default_factory=dict)  # by the plain model's parameter

    def apply(self, model: Transformer) -> list[Member]:
        """Replace the layers of ``model`` by their parallel forms; its parameters in order of registration."""
        self.members = {}
        for unit, root in model.units():
            for path, part in list(root.named_modules(prefix=unit)):
                if isinstance(part, Part):
                    self._replace(model, path, part, unit)
                elif isinstance(part, AttentionCore):
                    self._share_heads(part, path)
                elif isinstance(part, Prompts) and self.region.sequence_sharded:
                    part.index = self.region.group.index
                elif type(part) is Dropout and part.p:
                    _set(model, path, HiddenDropout(part.p, path, self.noise, self.region))
        return list(self.members.values())

    def _replace(self, model: Transformer, path: str, part: Part, unit: str) -> None:
        split = SPLITS.get(".".join(path.split(".")[-2:]))
        made = {key: self._member(path, key, plain, part, split, unit).parameter for key, plain in part.named_parameters(recurse=False)}
        if split is not None and split.layer is VocabularyEmbedding:
            _set(model, path, VocabularyEmbedding(made["weight"], self.region, self.gradients))
        elif split is not None and split.layer is not None and issubclass(split.layer, ShardedLinear):
            low = self._low_rank(path, part, made, split) if isinstance(part, LowRankLinear) else None
            layer = split.layer(made["weight"], made.get("bias"), self.region, self.gradients, low)
            if unit.startswith("blocks."):
                layer.eight_bits, layer.fused = self.eight_bits, self.fused
            _set(model, path, layer)
        elif isinstance(part, PositionEmbedding):
            _set(model, path, ShardedPositionEmbedding(made["weight"], self.region))
        elif isinstance(part, Linear):  # torch's own would keep a view of gathered weights, whose storage has another use by backward
            _set(model, path, ColumnLinear(made["weight"], made.get("bias"), self._alone(), self.gradients))
        else:
            part._parameters.update(made)

    def _alone(self) -> Region:
        """For a replicated matrix, which every rank multiplies with what it has."""
        group = self.region.group
        return Region(Group("alone", (group.rank,), group.rank, group.ledger), sequence_sharded=False)

    def _low_rank(self, path: str, part: LowRankLinear, made: dict[str, nn.Parameter], split: Split) -> LowRank:
        columns_split = split.layer is RowLinear
        mask = MatrixInputMask(part.dropout, f"{path}.lora", self.noise, self.region, columns_split) if part.dropout else None
        return LowRank(made["lora_a"], made["lora_b"], part.scale, mask)

    def _member(self, path: str, key: str, plain: nn.Parameter, part: Part, split: Split | None, unit: str) -> Member:
        known = self.members.get(plain)
        if known is not None:  # the head's tied weight: one parameter, used twice
            record = dataclasses.replace(known.record, uses=known.record.uses + 1)
            member = dataclasses.replace(known, record=record, units=(*known.units, unit))
        else:
            dimension = None if split is None else split.dimension(key)
            record = self._record(f"{path}.{key}", tuple(plain.shape), dimension, part, key)
            empty = torch.empty(0, dtype=self.dtype, device=self.device)
            member = Member(record, nn.Parameter(empty, requires_grad=record.trainable), (unit,))
        self.members[plain] = member
        return member

    def _record(self, name: str, shape: tuple[int, ...], dimension: int | None, part: Part, key: str) -> ParameterRecord:
        group = self.region.group
        box, local, partial = [(0, n) for n in shape], list(shape), set()
        if dimension is not None:
            vocabulary = name in (EMBEDDING_WEIGHT, HEAD_WEIGHT)
            width = vocabulary_rows(shape[0], group.size) if vocabulary else math.ceil(shape[dimension] / group.size)
            start = min(width * group.index, shape[dimension])
            box[dimension], local[dimension] = (start, min(start + width, shape[dimension])), width
        elif group.size > 1 and (self.region.sequence_sharded or (isinstance(part, LowRankLinear) and key in ("lora_a", "lora_b"))):
            partial.add("tensor")
        tied = self.tied and name in (EMBEDDING_WEIGHT, HEAD_WEIGHT)
        if tied and self.apart:
            partial.add("tied")
        return ParameterRecord(
            name=EMBEDDING_WEIGHT if tied else name,
            shape=shape,
            region=tuple(box),
            local_shape=tuple(local),
            init=part.inits[key],
            decay=key in part.decayed,
            partial=frozenset(partial),
            trainable=self.added is None or name in self.added,
            primary=(dimension is not None or group.index == 0) and (self.first or not tied),
        )

    def _share_heads(self, core: AttentionCore, path: str) -> None:
        """Give the core this tensor rank's heads, and dropout that depends on their global indices."""
        total, group, dropout = len(core.heads), self.region.group, core.dropout
        width = total // group.size
        core.heads = range(width * group.index, width * (group.index + 1))
        if isinstance(dropout, Dropout) and dropout.p:
            core.dropout = ShardedAttentionDropout(dropout.p, f"{path}.dropout", self.noise, core.heads, total)
            core.in_blocks = BlockAttention(core.dropout)


def _set(model: nn.Module, path: str, layer: nn.Module) -> None:
    """Put ``layer`` in the place of another one, with its hooks."""
    parent, _, leaf = path.rpartition(".")
    plain = model.get_submodule(path)
    layer._forward_hooks, layer._forward_pre_hooks = plain._forward_hooks, plain._forward_pre_hooks
    setattr(model.get_submodule(parent), leaf, layer)
