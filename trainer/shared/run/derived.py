"""Values of a run that are derived from others. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from trainer.shared.families.family import BASE
from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.optimizer import GroupConfig, GroupsConfig
from trainer.shared.run.read import from_record
from trainer.shared.run.resolved import ResolvedModelConfig, ResolvedOptimizerConfig
from trainer.shared.run.schema import GATED, LayoutConfig, ModelConfig, TrainConfig
from trainer.shared.run.spans import written_tokens
from trainer.shared.run.transfer import score_factor

T = TypeVar("T")

FIRST_KEYS = (
    "family", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "tied", "activation", "dropout", "attention", "rope_theta",
    "norm_eps", "init_std",
)  # fmt: skip
"""Keys of the model that every version writes. A record that lacks a later one means its family's value."""


def with_derived(cls: type[T], config: Any, **derived: Any) -> T:
    """Makes a ``cls`` of the fields of ``config`` and its ``derived`` values."""
    return cls(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)} | derived)


def resolve_optimizer(config: TrainConfig) -> ResolvedOptimizerConfig:
    given = config.optimizer
    optimizer = with_derived(
        ResolvedOptimizerConfig,
        given,
        min_lr=given.lr / 10 if given.min_lr is None else given.min_lr,
        decay_steps=config.run.steps if given.decay_steps is None else given.decay_steps,
    )
    groups = {}
    for f in dataclasses.fields(GroupsConfig):
        group: GroupConfig = getattr(given.groups, f.name)
        lr = None if group.lr == given.lr else group.lr
        groups[f.name] = GroupConfig(lr, None if group.weight_decay == optimizer.usual_decay(f.name) else group.weight_decay)
    optimizer.groups = GroupsConfig(**groups)
    return optimizer


def resolve_model(model: ModelConfig) -> ResolvedModelConfig:
    """Fills in the family's defaults. An MLP with a gate has 8/3 hidden rounded up to 64, any other 4 hidden."""
    family = FAMILIES[model.family]
    chosen = {name: family.default(name) if (given := getattr(model, name)) is None else given for name in BASE}
    gated = chosen["activation"] in GATED
    head = model.head_width or max(1, model.hidden // model.heads)
    further = model.latent.rotary if model.latent.kv_rank else 0
    ffn = model.ffn or (64 * math.ceil(8 * model.hidden / 3 / 64) if gated else 4 * model.hidden)
    return with_derived(
        ResolvedModelConfig,
        model,
        **chosen,
        kv_heads=model.kv_heads or model.heads,
        ffn=ffn,
        init_std=family.init_scale / math.sqrt(model.transfer.hidden or model.hidden) if model.init_std is None else model.init_std,
        head_width=head,
        attention_scale=model.attention_scale or (family.attention_scale or 1 / math.sqrt(head + further)) * score_factor(model, head),
        residual_scale=model.residual_scale or 1 / model.deeper,
        logit_scale=model.logit_scale or 1 / model.wider,
        encoder_layers=(model.layers // 2 if family.encoder_decoder else 0) if model.encoder_layers is None else model.encoder_layers,
        decoder_seq=model.decoder_seq or (written_tokens(model.seq) if family.encoder_decoder else 0),
    )


def recorded_model(saved: Mapping[str, Any]) -> ResolvedModelConfig:
    """Returns the model that any version has recorded."""
    return resolve_model(from_record(ModelConfig, saved))


def world_size_of(layout: LayoutConfig) -> int:
    """Returns the ranks that a resolved layout occupies: tensor x pipeline x context x data. Expert ranks are data ranks."""
    return layout.tensor * layout.pipeline * layout.context * (layout.data or 1)


def shared_ranks(layout: LayoutConfig) -> int:
    """Returns how many ranks hold the same parameters of a resolved layout, and may share them out: data x context."""
    return (layout.data or 1) * layout.context


def micro_batches(config: TrainConfig) -> int:
    """Returns the micro-batches that each replica runs per step: global_batch / (micro_batch x data)."""
    return config.run.global_batch // (config.layout.micro_batch * (config.layout.data or 1))


def folded_experts(layout: LayoutConfig) -> int:
    """Returns how many of the ranks of tensor, context and data together have all experts."""
    return layout.expert_tensor * layout.expert
