"""A complete run as a recipe: the few keys that differ from the defaults, as a file of Hydra's group ``recipe``. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from launcher.config.schema import ClusterConfig, Config
from trainer.config import LayoutConfig, ModelConfig, OptimizerConfig, RunConfig, resolve_model, to_dict


def recipe(
    model: ModelConfig,
    optimizer: OptimizerConfig,
    run: RunConfig,
    layout: LayoutConfig | None = None,
    cluster: ClusterConfig | None = None,
    hardware: str | None = None,
    default: Config | None = None,
) -> dict[str, Any]:
    """The recipe as nested data: what differs from ``default``, the composed configuration without any override.

    ``hardware`` is the name of a file of conf/hardware; without one only the cluster's size is kept.
    """
    default = default or Config()
    made: dict[str, Any] = {}
    if hardware:
        made["defaults"] = [{"override /hardware": hardware}]
    made["model"] = changes(underived(model), default.model)
    if layout is not None:
        made["layout"] = changes(layout, default.layout, drop=("data",))
    made["optimizer"] = changes(optimizer, default.optimizer)
    made["run"] = changes(run, default.run)
    if cluster is not None:
        made["cluster"] = {"nodes": cluster.nodes, "gpus_per_node": cluster.gpus_per_node}
    return made


def underived(model: ModelConfig) -> ModelConfig:
    """``model`` without the values that are derived from the others anyway."""
    whole = resolve_model(model)
    for field in dataclasses.fields(model):
        shorter = dataclasses.replace(model, **{field.name: None}) if field.default is None else model
        if resolve_model(shorter) == whole:
            model = shorter
    return model


def changes(config: Any, default: Any, drop: tuple[str, ...] = ()) -> dict[str, Any]:
    """The keys of ``config`` whose value is not the default's."""
    return _changes(to_dict(config), to_dict(default), drop)


def _changes(values: dict[str, Any], defaults: dict[str, Any], drop: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            if inner := _changes(value, defaults[key], ()):
                found[key] = inner
        elif key not in drop and value != defaults[key]:
            found[key] = value
    return found
