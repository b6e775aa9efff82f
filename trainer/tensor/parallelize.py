"""Applies tensor parallelism to a plain model: layers become their parallel forms, parameters the parts that their placements give a
rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from trainer.comm.collectives import Group
from trainer.models.attention import AttentionCore, AttentionDropout, Rotary
from trainer.models.encoder_decoder import Entry, InnerDropout
from trainer.models.experts import ExpertLinear, MixtureOfExperts, Router
from trainer.models.latent import MultiHeadLatentAttention
from trainer.models.layers import Dropout, Linear, ParameterModule, ParameterSpec, PositionEmbedding, TokenEmbedding, WidthNorm
from trainer.models.transformer import Transformer
from trainer.models.tuned import LowRankLinear, Prompts
from trainer.shared.parallel.placement import Partial, counts, local_part, resolved
from trainer.state.parameters import ModelParameter, ParameterRecord
from trainer.tensor.block_attention import BlockAttention
from trainer.tensor.context import ContextExchange, HeadExchange
from trainer.tensor.dropout import ColumnDropout, HiddenDropout, MatrixInputMask, Noise, ShardedAttentionDropout
from trainer.tensor.eight_bits import EightBitProduct
from trainer.tensor.entered import EnteredHeads
from trainer.tensor.experts import ExpertBalance, ExpertDispatcher, ShardedExpertLinear, ShardedRouter
from trainer.tensor.fused import FusedProducts
from trainer.tensor.layers import (
    ColumnLinear,
    Gradients,
    LowRank,
    RowLinear,
    ShardedPositionEmbedding,
    SumOverRanks,
    VocabularyEmbedding,
)
from trainer.tensor.region import Region
from trainer.tensor.slices import EarlierKeys


@dataclass
class Parallelizer:
    """Turns plain parts of a model into this rank's share of them.

    ``axes``: this rank's groups by the axis that placements name. ``added`` names the only parameters that are trained; None: all are.
    Parameters become empty tensors of ``dtype`` on ``device``; the buckets that own their storage set their data.
    """

    axes: Mapping[str, Group]
    region: Region
    gradients: Gradients
    noise: Noise
    dtype: torch.dtype
    device: torch.device
    added: frozenset[str] | None = None
    eight_bits: EightBitProduct | None = None  # of the blocks' matrices
    fused: FusedProducts | None = None  # of the same matrices
    balance: ExpertBalance | None = None  # of mixtures of experts
    exchange: ContextExchange | EarlierKeys | None = None  # of context ranks, or of slices of sequences
    made: dict[nn.Parameter, ModelParameter] = field(default_factory=dict)  # by the plain model's parameter

    def apply(self, model: Transformer) -> list[ModelParameter]:
        """Replaces the layers of ``model`` by their parallel forms. Returns its parameters in order of registration."""
        self.made = {}
        for unit, root in model.units():
            for path, part in list(root.named_modules(prefix=unit)):
                if isinstance(part, ParameterModule):
                    self._replace(model, path, part, unit)
                elif isinstance(part, MixtureOfExperts):
                    self._dispatch(part, path)
                elif isinstance(part, MultiHeadLatentAttention):
                    part.entered = EnteredHeads(self.region)
                elif isinstance(part, AttentionCore):
                    self._share_heads(part, path)
                elif isinstance(part, Rotary):
                    part.runs = self.region.whole_runs
                elif isinstance(part, Prompts):
                    part.runs = self.region.runs
                elif isinstance(part, InnerDropout) and part.p:
                    _set(model, path, ColumnDropout(part.p, path, self.noise, self.region))
                elif type(part) is Dropout and part.p:
                    _set(model, path, HiddenDropout(part.p, path, self.noise, self.region))
        for name, part in list(model.named_children()):
            if isinstance(part, Entry):
                _set(model, name, EnteredHeads(self.region))
        return list(self.made.values())

    def _replace(self, model: Transformer, path: str, part: ParameterModule, unit: str) -> None:
        learned = {key: plain for key, plain in part.named_parameters(recurse=False) if part.specs[key].learned}
        made = {key: self._parameter(f"{path}.{key}", plain, part.specs[key], unit) for key, plain in learned.items()}
        if isinstance(part, TokenEmbedding):
            _set(model, path, VocabularyEmbedding(made["weight"], self.region, self.gradients))
        elif isinstance(part, PositionEmbedding):
            _set(model, path, ShardedPositionEmbedding(made["weight"], self.region))
        elif isinstance(part, Router):
            _set(model, path, ShardedRouter(made["weight"], made.get("bias"), part, self.gradients))
        elif isinstance(part, ExpertLinear):
            _set(model, path, ShardedExpertLinear(made["weight"], self.gradients))
        elif isinstance(part, Linear):
            _set(model, path, self._linear(path, part, made, unit))
        else:
            part._parameters.update(made)
            if isinstance(part, WidthNorm):
                part.total = SumOverRanks(self.region.group)

    def _linear(self, path: str, part: Linear, made: dict[str, nn.Parameter], unit: str) -> ColumnLinear | RowLinear:
        """Returns the parallel form, also of a matrix that is not cut: torch's own would keep a view of gathered weights, whose storage has
        another use by backward."""
        low = self._low_rank(path, part, made) if isinstance(part, LowRankLinear) else None
        form, region = RowLinear if part.cuts_inputs else ColumnLinear, self.region if part.cut and not part.entered else self._alone()
        layer = form(made["weight"], made.get("bias"), region, self.gradients, low)
        if part.cut and unit.startswith("blocks."):
            layer.eight_bits, layer.fused = self.eight_bits, None if part.entered else self.fused
        return layer

    def _dispatch(self, mixture: MixtureOfExperts, path: str) -> None:
        """Lets tokens travel to the ranks of their experts, and balances the load of those."""
        assert self.balance is not None
        mixture.dispatcher = ExpertDispatcher(self.region, self.axes["expert"], self.axes["expert_tensor"])
        router, record = mixture.router, None
        if isinstance(router.correction, nn.Parameter):
            record = self._record(f"{path}.router.correction", tuple(router.correction.shape), router.specs["correction"])
        self.balance.attach(path, mixture, record)

    def _alone(self) -> Region:
        """Returns the region of a replicated matrix, which every rank multiplies with its own activations."""
        group = self.region.group
        alone = Group("alone", (group.rank,), group.rank, group.ledger)
        return Region(alone, sequence_sharded=False, context=alone)

    def _low_rank(self, path: str, part: LowRankLinear, made: dict[str, nn.Parameter]) -> LowRank:
        mask = MatrixInputMask(part.dropout, f"{path}.lora", self.noise, self.region, part.cuts_inputs) if part.dropout else None
        return LowRank(made["lora_a"], made["lora_b"], part.scale, mask)

    def _parameter(self, name: str, plain: nn.Parameter, spec: ParameterSpec, unit: str) -> nn.Parameter:
        """Returns this rank's part of a plain parameter. A tied weight that is embedding and head here is one parameter, used twice."""
        if plain in self.made:
            self.made[plain].units += [unit] * spec.uses
        else:
            record = self._record(name, tuple(plain.shape), spec)
            empty = torch.empty(0, dtype=self.dtype, device=self.device)
            self.made[plain] = ModelParameter(record, nn.Parameter(empty, requires_grad=record.trainable), *[unit] * spec.uses)
        return self.made[plain].tensor

    def _record(self, name: str, shape: tuple[int, ...], spec: ParameterSpec) -> ParameterRecord:
        at, degrees = ({axis: getattr(group, key) for axis, group in self.axes.items()} for key in ("index", "size"))
        declared = {**spec.placement, **({"tied": Partial()} if spec.tied else {})}
        placement = resolved(declared, degrees, ["tensor"] if self.region.sequence_sharded else [])
        region, local_shape = local_part(shape, placement, degrees, at)
        return ParameterRecord(
            name=spec.tied or name,
            shape=shape,
            region=region,
            local_shape=local_shape,
            init=spec.init,
            group=spec.group,
            placement=placement,
            learned=spec.learned,
            trainable=self.added is None or name in self.added,
            primary=counts(placement, at),
        )

    def _share_heads(self, core: AttentionCore, path: str) -> None:
        """Gives the core this rank's heads, and dropout that depends on their global indices."""
        total, group, dropout = len(core.heads), self.region.group, core.dropout
        core.exchange = self.exchange
        core.heads = _part(core.heads, group)
        if isinstance(self.exchange, HeadExchange):
            core.heads = _part(core.heads, self.region.context)
        if isinstance(dropout, AttentionDropout) and dropout.p:
            core.dropout = ShardedAttentionDropout(dropout.p, f"{path}.dropout", self.noise, core.heads, total, core.crosses)
        sharded = core.dropout if isinstance(core.dropout, ShardedAttentionDropout) else None
        if sharded is not None or core.cap is not None:
            core.in_blocks = BlockAttention(sharded, core.window, core.cap)


def _part(heads: range, group: Group) -> range:
    width = len(heads) // group.size
    return heads[width * group.index : width * (group.index + 1)]


def _set(model: nn.Module, path: str, layer: nn.Module) -> None:
    """Puts ``layer`` in the place of another one, with its hooks."""
    parent, _, leaf = path.rpartition(".")
    plain = model.get_submodule(path)
    layer._forward_hooks, layer._forward_pre_hooks = plain._forward_hooks, plain._forward_pre_hooks
    setattr(model.get_submodule(parent), leaf, layer)
