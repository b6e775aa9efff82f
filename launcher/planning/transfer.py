"""The small base whose hyper-parameters a model is trained with (``model.transfer``). Pure."""

from __future__ import annotations

import dataclasses
import math

from launcher.planning.coordinates import widened
from launcher.planning.recipe import underived
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.limits.transfer import check_transfer
from trainer.shared.run.schema import ModelConfig, TransferConfig

LEAST_WIDTH, LEAST_DEPTH = 256, 2
"""The smallest width and depth of a base that is chosen. Narrower ones have too few heads to be like their model."""


def with_base(model: ModelConfig, kind: str) -> ModelConfig:
    """Returns ``model`` with a base for a transfer of this ``kind``: the narrowest with whole heads, and for completep a shallow one."""
    model = underived(model)
    width = next((each for each in range(LEAST_WIDTH, model.hidden, LEAST_WIDTH // 4) if _is_whole(model, each)), model.hidden)
    depth = min(LEAST_DEPTH, model.layers) if kind == "completep" else None
    made = resolve_model(dataclasses.replace(model, transfer=TransferConfig(kind, width, depth)))
    check_transfer(made)
    return made


def base_of(model: ModelConfig) -> ModelConfig:
    """Returns the model whose hyper-parameters ``model`` has: itself without a transfer."""
    transfer = model.transfer
    if transfer.kind == "none":
        return model
    width = transfer.hidden or model.hidden
    try:
        base = widened(model, width)
    except ConfigError as error:
        raise ConfigError(f"model.transfer.hidden={width}: {str(error).partition(': ')[2]}") from None
    return dataclasses.replace(base, layers=transfer.layers or model.layers)


def words_of(base: ModelConfig, model: ModelConfig) -> list[str]:
    """Returns the overrides that make ``base`` of ``model``."""
    known = resolve_model(base), resolve_model(model)
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "experts.ffn", "experts.shared_ffn")
    found = [(name, *(_value(each, name) for each in known)) for name in names]
    return [f"model.{name}={own}" for name, own, other in found if own != other]


def _value(model: ModelConfig, name: str) -> int:
    value: int = model.experts.__dict__[name.removeprefix("experts.")] if name.startswith("experts.") else getattr(model, name)
    return value


def _is_whole(model: ModelConfig, width: int) -> bool:
    """Returns whether a base of this width has whole heads and inner widths."""
    parts = [model.heads, model.kv_heads, model.ffn, model.experts.ffn, model.experts.shared_ffn]
    return width % math.lcm(*(model.hidden // math.gcd(model.hidden, part) for part in parts if part)) == 0
