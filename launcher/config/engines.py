"""The inference engines that are known by name: conf/engine, and a folder of the user's own."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from launcher.config.engine import EngineProfile
from launcher.config.folders import group_folders
from launcher.config.trainers import read_keys
from trainer.shared.run.errors import ConfigError, listed, nearest
from trainer.shared.run.read import from_dict


@cache
def engine(name: str, own: Path | None = None) -> EngineProfile:
    """The profile ``name``, as ``engine=NAME`` composes it. ``ConfigError`` if there is none."""
    names = engine_names(own)  # a path is no name
    path = next((p for folder in group_folders(own) if os.path.isfile(p := folder / "engine" / f"{name}.yaml")), None)
    if path is None or name not in names:
        raise ConfigError(f"engine={name} does not exist{nearest(name, names)}; conf/engine/ has {listed(names)}")
    return from_dict(EngineProfile, read_keys(path), f"engine={name}: ")


def engine_names(own: Path | None = None) -> list[str]:
    """All that can be named."""
    return sorted({path.stem for folder in group_folders(own) for path in (folder / "engine").glob("*.yaml")})
