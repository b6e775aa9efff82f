"""Limits of a transfer of hyper-parameters. Pure."""

from __future__ import annotations

from trainer.shared.run.errors import ConfigError, listed
from trainer.shared.run.resolved import ResolvedModelConfig, ResolvedTrainConfig

BASE_KEYS = {"mup": ("hidden", "head_width"), "completep": ("hidden", "layers", "head_width")}
"""Keys that name a base. The width of its heads may be left out."""


def check_transfer(model: ResolvedModelConfig) -> None:
    """Raises ``ConfigError`` for a transfer without a base, with a base that it does not use, or to a model that it has no rule for."""
    transfer = model.transfer
    for name in ("hidden", "layers", "head_width"):
        value, kinds = getattr(transfer, name), [kind for kind, keys in BASE_KEYS.items() if name in keys]
        if value is None and transfer.kind in kinds and name != "head_width":
            raise ConfigError(
                f"model.transfer.kind={transfer.kind} carries hyper-parameters over from a base; say with model.transfer.{name} which "
                f"model.{name} they were found with (of the base itself: {getattr(model, name)})"
            )
        if value is not None and transfer.kind not in kinds:
            raise ConfigError(
                f"model.transfer.{name}={value} is for model.transfer.kind={listed(kinds)}, not {transfer.kind}; leave one of them out"
            )
    if transfer.kind == "none":
        return
    unlike = {
        f"model.family={model.family}, which has an encoder": bool(model.encoder_layers),
        f"model.latent.kv_rank={model.latent.kv_rank}": bool(model.latent.kv_rank),
    }
    for named in (named for named, there in unlike.items() if there):
        raise ConfigError(f"model.transfer.kind={transfer.kind} has no rule for {named}; use model.transfer.kind=none")


def check_transferred(config: ResolvedTrainConfig) -> None:
    """Raises ``ConfigError`` for a training that has no rule of transfer."""
    kind, optimizer = config.model.transfer.kind, config.optimizer
    if kind == "none":
        return
    if config.tune.method != "full":
        raise ConfigError(
            f"model.transfer.kind={kind} has no rule for what tune.method={config.tune.method} adds; use tune.method=full, or "
            "model.transfer.kind=none with the learning rate of this model"
        )
    if optimizer.kind == "muon" and optimizer.muon.scale != "aspect":
        raise ConfigError(
            f"optimizer.muon.scale={optimizer.muon.scale} makes updates of another size in each width, which model.transfer.kind={kind} "
            "is against; use optimizer.muon.scale=aspect"
        )
