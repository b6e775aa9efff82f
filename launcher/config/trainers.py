"""The trainers that are known by name: conf/trainer, runs/trainer, and a folder of the user's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from launcher.config.folders import group_folders, refuse_hidden
from launcher.config.trainer import TrainerProfile
from launcher.config.yaml_text import read_yaml
from trainer.shared.run.errors import ConfigError, listed, nearest
from trainer.shared.run.read import from_dict

OWN = "trireme"
"""The profile of this project's trainer."""


@cache
def profile(name: str, own: Path | None = None) -> TrainerProfile:
    """The profile ``name``, as ``trainer=NAME`` composes it. ``own``: a folder of the user's own. ``ConfigError`` if there is none."""
    return from_dict(TrainerProfile, composed(name, own), f"trainer={name}: ")


def profile_names(own: Path | None = None) -> list[str]:
    """All that can be named."""
    return sorted({path.stem for folder in group_folders(own) for path in (folder / "trainer").glob("*.yaml")})


def changed(base: TrainerProfile, changes: Mapping[str, Any], where: str = "trainer.") -> TrainerProfile:
    """``base`` with other values of some keys (``overlap.gradients``). ``ConfigError`` for unknown keys and wrong values."""
    import dataclasses

    data: dict[str, Any] = dataclasses.asdict(base)
    for name, value in changes.items():
        *path, last = name.split(".")
        section: Any = data
        for part in path:
            section = section.setdefault(part, {}) if isinstance(section, dict) else {}
        section[last] = value
    return from_dict(TrainerProfile, data, where)


def composed(name: str, own: Path | None, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """The keys of a profile: those that it builds on (``defaults``), then its own. ``above``: profiles that build on it."""
    if name in above:
        raise ConfigError(f"trainer={name} builds on itself ({' on '.join((*above, name))}); correct 'defaults' in its file")
    refuse_hidden("trainer", name, own)
    path = next((p for folder in group_folders(own) if os.path.isfile(p := folder / "trainer" / f"{name}.yaml")), None)
    if path is None:
        names = profile_names(own)
        raise ConfigError(f"trainer={name} does not exist{nearest(name, names)}; conf/trainer/ has {listed(names)}")
    data = read_keys(path)
    keys: dict[str, Any] = {}
    bases = data.pop("defaults", [])
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{path}: defaults={bases!r} is not a list of profiles; write [NAME, _self_]")
    for base in bases:
        if base != "_self_":
            keys = _merged(keys, composed(base, own, (*above, name)))
    return _merged(keys, data)


def read_keys(path: Path) -> dict[str, Any]:
    """The keys of a profile's file. ``ConfigError`` for one that cannot be read."""
    import yaml

    try:
        data = read_yaml(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path} ({error}); mend or remove it") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from None
    if not data:
        raise ConfigError(f"{path} is empty; say what it builds on, as in 'defaults: [unknown, _self_]', and what differs")
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not a mapping of keys to values")
    return data


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(below)
    for name, value in above.items():
        out[name] = _merged(out[name], value) if isinstance(value, dict) and isinstance(out.get(name), dict) else value
    return out
