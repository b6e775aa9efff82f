"""Files of config groups: their folders, the precedence among files of one name, and their content."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from launcher.config.yaml_text import read_yaml
from trainer.shared.run.errors import ConfigError, nearest, options_listed
from trainer.shared.run.read import from_dict

T = TypeVar("T")
PRIMARY = "config"
"""Name of the file of conf/ that chooses from its groups."""


@cache
def project_dir() -> Path:
    """Returns the folder that holds ``conf/``: the checkout, or the installed package."""
    package = Path(__file__).resolve().parent.parent
    return package if (package / "conf").is_dir() else package.parent


def conf_dir() -> Path:
    """Returns the folder of Hydra's config groups."""
    return project_dir() / "conf"


@cache
def shipped(name: str) -> dict[str, Any]:
    """Reads conf/NAME.yaml, which users cannot replace."""
    return dict(read_yaml((conf_dir() / f"{name}.yaml").read_text()))


def group_folders(own: Path | None) -> list[Path]:
    """Returns the folders of config groups: conf/, runs/ (written by earlier runs), and a folder of the user's own."""
    return [conf_dir(), Path("runs"), *([own] if own else [])]


def files_of(group: str, own: Path | None = None) -> dict[str, Path]:
    """Returns the files of a group by the name that chooses each. Of several files of one name, the one in the first folder is chosen."""
    written = [_files_in(root / group) for root in group_folders(own)[1:]]
    return dict(sorted(ChainMap(_shipped_files(group), *written).items()))


@cache
def _shipped_files(group: str) -> dict[str, Path]:
    return _files_in(conf_dir() / group)


def _files_in(folder: Path) -> dict[str, Path]:
    return {str(path.relative_to(folder).with_suffix("")): path for path in folder.glob("**/*.yaml") if path.is_file()}


def groups_of(own: Path | None, shipped: Collection[str]) -> list[str]:
    """Returns the groups that only the user's ``own`` folder has: its folders with YAML files, but for ``shipped`` groups and Hydra's."""
    parents = {path.parent.relative_to(own) for path in own.glob("**/*.yaml")} if own is not None else set()
    folders = {folder for parent in parents for folder in (parent, *parent.parents) if folder.parts}
    return sorted(folder.as_posix() for folder in folders if folder.parts[0] not in (*shipped, "hydra"))


def primary_of(own: Path | None, name: str) -> str:
    """Returns the ``name``, without suffix, of a file of the user's own that builds on conf/config.yaml. Raises ``ConfigError`` if it does
    not exist, or does not build on that."""
    name = name.removesuffix(".yaml")
    if own is None:
        raise ConfigError(f"--config-name={name} needs the folder that holds {name}.yaml; give it with --config-dir DIR")
    path, known = own / f"{name}.yaml", [found.stem for found in own.glob("*.yaml")]
    if not path.is_file():
        has = f"{own} has {options_listed(sorted(known))}" if known else f"{own} has no configuration of that kind"
        raise ConfigError(f"--config-name={name} does not exist{nearest(name, known)}; {has}")
    if name == PRIMARY:
        raise ConfigError(f"{path} has the name of the file that ships with Trireme; choose another name")
    data = content(path)
    bases = data.get("defaults") if isinstance(data, dict) else None
    if not isinstance(bases, list) or not {PRIMARY, f"/{PRIMARY}"} & {base for base in bases if isinstance(base, str)}:
        raise ConfigError(f"{path} does not build on what ships with Trireme; begin it with 'defaults: [{PRIMARY}, _self_]'")
    return name


def refuse_hidden(group: str, name: str, own: Path | None) -> None:
    """Raises ``ConfigError`` if the user's own folder has a file that ``GROUP=NAME`` does not choose: one of that name precedes it."""
    if own is None or not os.path.isfile(hidden := own / group / f"{name}.yaml"):
        return
    for root in group_folders(None):
        path = root / group / hidden.name
        if os.path.isfile(path) and not os.path.samefile(path, hidden):
            what = "a file that ships with Trireme" if root == conf_dir() else str(path)
            raise ConfigError(f"{hidden} has the name of {what}, and {group}={name} would still mean that one; choose another name")


def content(path: Path) -> Any:
    """Reads a file of a group. Raises ``ConfigError`` if it cannot be read."""
    try:
        return read_yaml(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path} ({error}); fix or remove it") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {str(error).splitlines()[0]}") from None


@dataclass(frozen=True)
class ConfGroup(Generic[T]):
    """A group whose files describe one ``kind`` of thing each, and may build on others (``defaults``)."""

    name: str
    kind: type[T]

    def read(self, name: str, own: Path | None = None) -> T:
        """Composes ``GROUP=NAME``, with ``own`` as a folder of the user's own. Raises ``ConfigError`` for a missing or wrong file."""
        return from_dict(self.kind, self.keys(name, own), f"{self.name}={name}: ")

    def keys(self, name: str, own: Path | None = None, above: tuple[str, ...] = ()) -> dict[str, Any]:
        """Returns the keys of a file: those that it builds on, then its own. ``above``: files that build on it."""
        if name in above:
            raise ConfigError(f"{self.name}={name} builds on itself ({' on '.join((*above, name))}); correct 'defaults' in its file")
        refuse_hidden(self.name, name, own)
        known = files_of(self.name, own)
        if name not in known:
            raise ConfigError(f"{self.name}={name} does not exist{nearest(name, known)}; conf/{self.name}/ has {options_listed(known)}")
        path = known[name]
        data = _mapping(path)
        bases = data.pop("defaults", [])
        if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
            raise ConfigError(f"{path}: defaults={bases!r} is not a list of profiles; write [NAME, _self_]")
        keys: dict[str, Any] = {}
        for base in bases:
            if base != "_self_":
                keys = _merged(keys, self.keys(base, own, (*above, name)))
        return _merged(keys, data)


def _mapping(path: Path) -> dict[str, Any]:
    data = content(path)
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
