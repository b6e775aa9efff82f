"""A complete run as a recipe: the few keys that differ from the defaults, as a file of Hydra's group ``recipe``. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from launcher.config.schema import Config, HardwareConfig
from trainer.shared.run.read import to_dict
from trainer.shared.run.rules import resolve_model
from trainer.shared.run.schema import ModelConfig

SECTIONS = ("model", "layout", "data", "optimizer", "run", "tracking", "tune", "cluster")
"""What a trial is; all else says how it is looked for. A trainer that is not ours belongs to it, too."""


def recipe(config: Config, default: Config, hardware: Mapping[str, HardwareConfig]) -> dict[str, Any]:
    """``config`` as nested data: the cluster and the device that it chooses, and the keys in which it differs from these.

    ``default`` is the configuration composed with its cluster's backend and nothing else. ``hardware`` are the devices that have a name;
    another one is written out. The layout's data degree is left to follow from the cluster.
    """
    place = config.cluster
    device = next((name for name, known in hardware.items() if known == place.hardware), None)
    if device:
        default = dataclasses.replace(default, cluster=dataclasses.replace(default.cluster, hardware=place.hardware))
    layout = dataclasses.replace(config.layout, data=None)
    config = dataclasses.replace(config, model=underived(config.model), layout=layout)
    choices = {"cluster": None if isinstance(place, type(Config().cluster)) else place.backend, "hardware": device}
    made: dict[str, Any] = {"defaults": [{f"override /{group}": name} for group, name in choices.items() if name]}
    sections = (*SECTIONS, "trainer") if config.trainer.foreign else SECTIONS
    made |= {section: changes(getattr(config, section), getattr(default, section)) for section in sections}
    return {name: part for name, part in made.items() if part}


def underived(model: ModelConfig) -> ModelConfig:
    """``model`` without the values that are derived from the others anyway."""
    whole, model = resolve_model(model), ModelConfig(**vars(model))
    for field in dataclasses.fields(ModelConfig):
        derived: dict[str, Any] = {field.name: None} if field.default is None else {}
        shorter = dataclasses.replace(model, **derived)
        if resolve_model(shorter) == whole:
            model = shorter
    return model


def changes(config: Any, default: Any) -> dict[str, Any]:
    """The keys of ``config`` whose value is not the default's."""
    return _changes(to_dict(config), to_dict(default))


def _changes(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            if inner := _changes(value, defaults.get(key) or {}):
                found[key] = inner
        elif key not in defaults or value != defaults[key]:
            found[key] = value
    return found
