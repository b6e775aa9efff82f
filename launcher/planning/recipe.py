"""A complete run as a recipe: the keys that differ from the defaults, as a file of Hydra's group ``recipe``. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from launcher.config.schema import Config, HardwareConfig
from trainer.shared.run.derived import resolve_model
from trainer.shared.run.read import to_dict
from trainer.shared.run.schema import ModelConfig

SECTIONS = ("model", "layout", "data", "optimizer", "run", "tracking", "tune", "cluster")
"""Sections that define a trial; the others define the search for it. A foreign trainer belongs to it, too."""


def recipe(config: Config, default: Config, hardware: Mapping[str, HardwareConfig]) -> dict[str, Any]:
    """Returns ``config`` as nested data: its choice of cluster and device, and the keys in which it differs from these.

    ``default`` is the configuration composed with only its cluster's backend. ``hardware`` holds the named devices; any other device is
    written out. The layout's data degree is omitted and follows from the cluster.
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
    """Returns ``model`` without the values that follow from the others."""
    whole, model = resolve_model(model), ModelConfig(**vars(model))
    for field in dataclasses.fields(ModelConfig):
        derived: dict[str, Any] = {field.name: None} if field.default is None else {}
        shorter = dataclasses.replace(model, **derived)
        if resolve_model(shorter) == whole:
            model = shorter
    return model


def changes(config: Any, default: Any) -> dict[str, Any]:
    """Returns the keys of ``config`` whose value differs from the default's."""
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
