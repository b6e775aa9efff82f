"""The layouts of a space that a trainer can be told. Pure, over columns; ``launcher.config.command.inexpressible`` judges a single
layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from launcher.config.command import FREE, SHARDED, ZERO, mentioned, yaml_word
from launcher.config.trainer import TrainerProfile
from launcher.cost.inputs.layouts import WORDS, to_table
from launcher.planning.layout_filter import KEYS
from launcher.planning.space import Space
from trainer.shared.run.errors import ConfigError, listed
from trainer.shared.run.schema import LayoutConfig


def expressible(found: Space, trainer: TrainerProfile) -> Space:
    """``found`` without layouts that ``trainer`` has no words for; each counts for the first key that it lacks. ``ConfigError`` if none is
    left."""
    if not trainer.foreign:
        return found
    told = mentioned(trainer.launch)
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
        table = _kept(table, able, "trainer: cannot be told layout.sharding", dropped)
    if not len(table):
        reasons = [reason for reason in dropped if reason.startswith("trainer: ")]
        raise ConfigError(
            f"no layout is left that trainer={trainer.name} can be told ({listed(reasons)}); add words for it to the profile's launch part"
        )
    return Space(table, dropped)


def zero_stages(table: np.ndarray) -> np.ndarray:
    """Per layout the stage of ZeRO over all replicas; -1 for other factors."""
    params, grads, optimizer, data = (table[name] for name in ("params", "grads", "optimizer", "data"))
    shards = [optimizer, grads, params]
    whole = [(column == data) | (column == 1) for column in shards]
    ordered = whole[0] & whole[1] & whole[2]
    stage = sum((column == data).astype(int) for column in shards) if len(table) else np.zeros(0, int)
    return np.where(ordered, np.where(data == 1, 0, stage), -1)


def _kept(table: np.ndarray, able: np.ndarray, reason: str, dropped: dict[str, int]) -> np.ndarray:
    if not able.all():
        dropped[reason] = int((~able).sum())
    return table[able]


def _codes(name: str, table: np.ndarray, words: set[str]) -> Sequence[int]:
    return [code for code in np.unique(table[name]).tolist() if _word(name, code) in words]


def _word(name: str, code: object) -> str:
    if name in WORDS and isinstance(code, int):
        return str(WORDS[name][code])
    return yaml_word(None if code == -1 else code)
