"""The layouts of a space that a trainer has options for. Pure, over columns; ``launcher.config.command.inexpressible`` judges a single
layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from launcher.config.command import FREE, SHARDED, ZERO, mentioned, yaml_word
from launcher.config.search import SpaceConfig
from launcher.config.trainer import TrainerProfile
from launcher.cost.inputs.layouts import WORDS, to_table
from launcher.planning.layout_filter import KEYS
from launcher.planning.space import Space
from trainer.shared.run.errors import ConfigError, listed
from trainer.shared.run.schema import LayoutConfig

FURTHER_AXES = ("context", "expert", "expert_tensor", "slices")
"""Axes that not every trainer has."""
SLICED_APART = "trainer: slices keep keys and values on one rank, and context ranks share them"
APART = "trainer: a sharding factor neither divides context nor is a multiple of it, and those ranks are apart"
UNEVEN_EXPERTS = "trainer: expert or its parts neither divide tensor nor are a multiple of it"
CUT_EXPERTS = "trainer: deals out experts to context and data ranks alone"


def expressible(found: Space, trainer: TrainerProfile) -> Space:
    """Removes layouts that ``trainer`` has no options for; each counts for the first missing key. ``ConfigError`` if none is left."""
    if not trainer.foreign:
        return folding(found, trainer)
    found, told = folding(found, trainer), mentioned(trainer.launch)
    default = to_table([LayoutConfig(data=1)])[0]
    table, dropped = found.table, dict(found.dropped)
    for name, key in KEYS.items():
        if key in FREE or (key in SHARDED and (key in told or ZERO in told)):
            continue
        words = told.get(key, {_word(name, default[name].item())})
        if words is not None:
            table = _kept(table, np.isin(table[name], _codes(name, table, words)), f"trainer: cannot be told {key}", dropped)
    if ZERO in told and not set(SHARDED) & told.keys():
        stages, words = zero_stages(table), told[ZERO]
        able = stages >= 0 if words is None else np.isin(stages, [int(word) for word in words if word.isdigit()])
        if trainer.launch.shards_context:
            able &= (stages > 0) | (table["context"] == 1)
        table = _kept(table, able, "trainer: cannot be told layout.sharding", dropped)
    if not len(table):
        reasons = [reason for reason in dropped if reason.startswith("trainer: ")]
        raise ConfigError(
            f"no layout is left that trainer={trainer.name} can be told ({listed(reasons)}); add words for it to the profile's launch part"
        )
    return Space(table, dropped)


def within_told(limits: SpaceConfig, trainer: TrainerProfile) -> SpaceConfig:
    """Sets to 1 the limits of ``FURTHER_AXES`` that ``trainer`` has no option for, so that they are not enumerated. The profile of one
    that is only predicted lists its options, too."""
    if trainer.embedded:
        return limits
    told = mentioned(trainer.launch).keys()
    untold: dict[str, Any] = {f"max_{name}": 1 for name in FURTHER_AXES if f"layout.{name}" not in told}
    return dataclasses.replace(limits, **untold)


def refuse_axes(trainer: TrainerProfile, wanted: Mapping[str, Sequence[Any]]) -> None:
    """Raises ``ConfigError`` for a requested degree of an axis that ``trainer`` has no option for."""
    limits = within_told(SpaceConfig(), trainer)
    for name in FURTHER_AXES:
        value = max(wanted.get(name, [1]))
        if value > 1 and getattr(limits, f"max_{name}") == 1:
            raise ConfigError(f"trainer={trainer.name} cannot be told layout.{name}={value}; use another layout, or add it to its profile")


def folding(found: Space, trainer: TrainerProfile) -> Space:
    """Removes layouts whose experts would need tensor ranks if ``trainer`` splits every expert over those."""
    table, dropped = found.table, dict(found.dropped)
    if not trainer.memory.whole_experts:
        table = _kept(table, table["data"] * table["context"] % table["expert"] == 0, CUT_EXPERTS, dropped)
    if trainer.embedded:
        table = _kept(table, (table["slices"] == 1) | (table["context"] == 1), SLICED_APART, dropped)
        far = table["order"] != WORDS["order"].index("tensor-data-pipeline")
        near = (table["tensor"], table["tensor"] * np.where(far, table["context"], 1))  # ranks further on may be a pipeline apart
        parts = (table["expert_tensor"], table["expert_tensor"] * table["expert"])
        even = np.all([(unit % ranks == 0) | (ranks % unit == 0) for ranks in parts for unit in near], axis=0)
        table = _kept(table, even, UNEVEN_EXPERTS, dropped)
        context, factors = table["context"], (table[name] for name in ("params", "grads", "optimizer"))
        even = np.all([(factor % context == 0) | (context % factor == 0) for factor in factors], axis=0)
        table = _kept(table, even | (table["order"] == WORDS["order"].index("tensor-data-pipeline")), APART, dropped)
    return Space(table, dropped)


def zero_stages(table: np.ndarray) -> np.ndarray:
    """Returns the stage of ZeRO over all replicas per layout; -1 for other factors."""
    params, grads, optimizer = (table[name] for name in ("params", "grads", "optimizer"))
    data = table["data"] * table["context"]
    shards = [optimizer, grads, params]
    whole = [(column == data) | (column == 1) for column in shards]
    ordered = whole[0] & whole[1] & whole[2]
    stage = sum((column == data).astype(int) for column in shards) if len(table) else np.zeros(0, int)
    return np.where(ordered, np.where(data == 1, 0, stage), -1)


def _kept(table: np.ndarray, able: np.ndarray, reason: str, dropped: dict[str, int]) -> np.ndarray:
    if able.all():
        return table
    dropped[reason] = int((~able).sum())
    return table[able]


def _codes(name: str, table: np.ndarray, words: set[str]) -> Sequence[int]:
    return [code for code in np.unique(table[name]).tolist() if _word(name, code) in words]


def _word(name: str, code: object) -> str:
    if name in WORDS and isinstance(code, int):
        return str(WORDS[name][code])
    return yaml_word(None if code == -1 else code)
