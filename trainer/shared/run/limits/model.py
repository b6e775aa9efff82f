"""Rules of a model, whatever its layout."""

from __future__ import annotations

import dataclasses
from typing import Any

from trainer.shared.families.registry import FAMILIES
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError, divisors, listed
from trainer.shared.run.limits.transfer import check_transfer
from trainer.shared.run.resolved import ResolvedModelConfig
from trainer.shared.run.schema import ExpertsConfig, LatentConfig, ModelConfig, RopeConfig


def check_model(given: ModelConfig) -> None:
    """Raises ``ConfigError`` on the first rule that a model breaks in any layout."""
    if given.head_width is None and given.hidden % given.heads:
        raise ConfigError(
            f"model.heads={given.heads} does not divide model.hidden={given.hidden}; use {_few_divisors(given.hidden)}, or set "
            "model.head_width"
        )
    model = resolve_model(given)
    if model.heads % model.kv_heads:
        raise ConfigError(f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}; use {listed(divisors(model.heads))}")
    if model.dropout >= 1:
        raise ConfigError(f"model.dropout={model.dropout:g} drops everything; use a value from 0 to below 1")
    if model.positions == "rotary":
        _check_rope(model)
    if model.window is None and model.full_every:
        raise ConfigError(f"model.full_every={model.full_every} says which blocks ignore a window, and there is none; set model.window")
    if model.score_cap is not None and model.positions == "alibi":
        raise ConfigError(
            f"model.score_cap={model.score_cap:g} would cap the linear biases of model.positions=alibi, which are told up to a constant of "
            "each row; leave the cap out or use model.positions=rotary"
        )
    if "head" in model.biases and model.tied:
        raise ConfigError("model.biases has a bias of the head, which model.tied=true shares with the embedding; leave one of them out")
    if "head" in model.zero_init and model.tied:
        raise ConfigError("model.zero_init has the head, which model.tied=true shares with the embedding; leave one of them out")
    _check_latent(model)
    _check_experts(model)
    _check_stacks(given, model)
    check_transfer(model)


ONE_STACK: dict[str, Any] = {
    "window": None, "full_every": 0, "score_cap": None, "qk_norm": "none", "norm_at": "before", "residual": "sequential",
    "residual_scale": 1.0, "predicted_tokens": 0, "rope": RopeConfig(), "experts": ExpertsConfig(), "latent": LatentConfig(),
}  # fmt: skip
"""Keys of the model that a network with an encoder leaves at these values."""


def _check_stacks(given: ModelConfig, model: ResolvedModelConfig) -> None:
    """Checks the keys of an encoder and its decoder, and those that only a network with one stack has."""
    if not FAMILIES[model.family].encoder_decoder:
        theirs = {"encoder_layers": model.encoder_layers, "decoder_seq": given.decoder_seq}
        for name, value in theirs.items():
            if value:
                raise ConfigError(
                    f"model.{name}={value} is for a family with an encoder, and model.family={model.family} has none; leave it out"
                )
        if model.positions == "relative":
            raise ConfigError(f"model.positions=relative is for model.family=t5, not {model.family}; use learned, rotary, alibi or none")
        return
    if not 0 < model.encoder_layers < model.layers:
        raise ConfigError(
            f"model.encoder_layers={model.encoder_layers} of model.layers={model.layers} leaves a stack without a block; "
            + (f"use 1 to {model.layers - 1}" if model.layers > 1 else "raise model.layers")
        )
    for name, usual in ONE_STACK.items():
        if (value := getattr(model, name)) != usual:
            key, value = _first_other(name, value, usual)
            raise ConfigError(
                f"model.{key}={value} is for families without an encoder, and model.family={model.family} has one; leave it out"
            )
    if model.positions in ("rotary", "alibi"):
        raise ConfigError(f"model.positions={model.positions} is for families without an encoder; use relative, learned or none")
    if model.kv_heads != model.heads:
        raise ConfigError(f"model.kv_heads={model.kv_heads}: model.family={model.family} has a key and a value for each head; leave it out")
    if model.positions == "relative" and model.relative_distance <= model.relative_buckets // 2:
        raise ConfigError(
            f"model.relative_distance={model.relative_distance} is not beyond the {model.relative_buckets // 2} exact distances of "
            f"model.relative_buckets={model.relative_buckets}; raise it, or lower the buckets"
        )


def _first_other(name: str, value: Any, usual: Any) -> tuple[str, Any]:
    """Returns the key that is not as usual, and its value: of a group of keys, the first such one in it."""
    if not dataclasses.is_dataclass(value):
        return name, value
    return next((f"{name}.{f.name}", own) for f in dataclasses.fields(value) if (own := getattr(value, f.name)) != getattr(usual, f.name))


def _check_latent(model: ResolvedModelConfig) -> None:
    if model.latent.kv_rank and model.positions == "rotary" and not model.latent.rotary:
        raise ConfigError("model.latent.rotary=0 leaves no number for model.positions=rotary; set one of them, as model.latent.rotary=64")


def _check_rope(model: ResolvedModelConfig) -> None:
    rope, width = model.rope, model.turning
    if rope.share > 1:
        raise ConfigError(f"model.rope.share={rope.share:g} is more than a head has; use a value from above 0 to 1")
    if not width.is_integer() or width % 2:
        name = "model.latent.rotary" if model.latent.kv_rank else "model.head_width"
        raise ConfigError(
            f"{name}={width / rope.share:g} x model.rope.share={rope.share:g} is {width:g} dimensions, which turn in pairs; "
            "change one of them (model.head_width is model.hidden / model.heads unless it is given)"
        )
    if rope.kind in ("yarn", "llama3", "longrope") and rope.original is None:
        raise ConfigError(f"model.rope.kind={rope.kind} needs the sequence length before scaling; set model.rope.original")
    if rope.kind == "llama3" and rope.high < rope.low:
        raise ConfigError(f"model.rope.high={rope.high:g} must not be below model.rope.low={rope.low:g}; change one of them")
    for name in ("short", "long") if rope.kind == "longrope" else ():
        if len(getattr(rope, name)) != width / 2:
            raise ConfigError(f"model.rope.{name} has {len(getattr(rope, name))} factors; give one for each of the {width / 2:g} pairs")


def _check_experts(model: ResolvedModelConfig) -> None:
    experts = model.experts
    if not experts.count:
        return
    if experts.active > experts.count:
        raise ConfigError(f"model.experts.active={experts.active} is more than model.experts.count={experts.count}; lower it")
    if experts.dense_layers >= model.layers or experts.every > model.layers:
        raise ConfigError(
            f"model.experts.dense_layers={experts.dense_layers} and model.experts.every={experts.every} leave no block of "
            f"model.layers={model.layers} with experts; lower one of them, or set model.experts.count=0"
        )
    _check_expert_groups(experts)


def _check_expert_groups(experts: ExpertsConfig) -> None:
    if experts.count % experts.groups:
        allowed = listed(d for d in divisors(experts.count) if d <= 64)
        raise ConfigError(f"model.experts.groups={experts.groups} does not divide model.experts.count={experts.count}; use {allowed}")
    if experts.active_groups > experts.groups:
        raise ConfigError(
            f"model.experts.active_groups={experts.active_groups} is more than model.experts.groups={experts.groups}; lower it"
        )
    each = experts.count // experts.groups
    if experts.active > experts.active_groups * each:
        raise ConfigError(
            f"model.experts.active={experts.active} is more than the {experts.active_groups * each} experts of "
            f"model.experts.active_groups={experts.active_groups}; raise that, or lower model.experts.active"
        )
    if experts.groups > 1 and experts.correction is not None and each == 1:
        raise ConfigError(
            f"model.experts.groups={experts.groups} leaves one expert in each group, and with model.experts.correction a group is as good "
            "as its best two; lower it"
        )


def _few_divisors(n: int) -> str:
    found = divisors(n)
    return listed(found if len(found) <= 12 else found[:12])
