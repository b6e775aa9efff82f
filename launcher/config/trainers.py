"""The trainers and the inference engines known by name: conf/trainer and conf/engine, those under runs/, and the user's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from launcher.config.engine import EngineProfile
from launcher.config.folders import ConfGroup, files_of
from launcher.config.trainer import TrainerProfile
from trainer.shared.run.read import from_dict

OWN = "trireme"
"""The profile of this project's trainer."""
TRAINERS, ENGINES = ConfGroup("trainer", TrainerProfile), ConfGroup("engine", EngineProfile)


@cache
def profile(name: str, own: Path | None = None) -> TrainerProfile:
    """Returns the trainer ``name``, as ``trainer=NAME`` composes it."""
    return TRAINERS.read(name, own)


@cache
def engine(name: str, own: Path | None = None) -> EngineProfile:
    """Returns the engine ``name``, as ``engine=NAME`` composes it."""
    return ENGINES.read(name, own)


def profile_names(own: Path | None = None) -> list[str]:
    """Lists the names of all trainers."""
    return list(files_of("trainer", own))


def engine_names(own: Path | None = None) -> list[str]:
    """Lists the names of all engines."""
    return list(files_of("engine", own))


def changed(base: TrainerProfile, changes: Mapping[str, Any], where: str = "trainer.") -> TrainerProfile:
    """Returns ``base`` with other values of some keys (``overlap.gradients``). Raises ``ConfigError`` for unknown keys and wrong values."""
    data: dict[str, Any] = dataclasses.asdict(base)
    for name, value in changes.items():
        *path, last = name.split(".")
        section: Any = data
        for part in path:
            section = section.setdefault(part, {}) if isinstance(section, dict) else {}
        section[last] = value
    return from_dict(TrainerProfile, data, where)
