"""Hardware files that a command writes: where they lie, and how."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.named_files import write_named
from trainer.shared.run.errors import ConfigError
from trainer.shared.run.read import to_dict

if TYPE_CHECKING:
    from launcher.config.schema import HardwareConfig


FOLDER = Path("runs") / "hardware"
"""Folder of user-made ``hardware=NAME`` files (``search_path`` of ``launcher.config.compose``)."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def target(name: str, option: str, folder: Path = FOLDER) -> Path:
    """The file to write for ``name``, which ``option`` gives. ``ConfigError`` when ``hardware=NAME`` could not find it."""
    from launcher.config.folders import conf_dir

    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{option}={name!r} cannot name a file; use up to 64 letters, digits, '.', '_' and '-', beginning with a letter or digit"
        )
    if name.endswith(".yaml") or not _is_word(name):
        raise ConfigError(f"{option}={name} cannot name a file, since hardware={name} is not read as that name; choose another one")
    if (conf_dir() / "hardware" / f"{name}.yaml").exists():
        raise ConfigError(
            f"{option}={name} is a device that ships with Trireme, and hardware={name} would still mean that one; choose another name"
        )
    return folder / f"{name}.yaml"


def _is_word(name: str) -> bool:
    """Returns whether ``hardware=NAME`` reads as a name rather than YAML's null."""
    from launcher.config.compose import parse_override
    from launcher.config.text_keys import TEXT, as_typed

    return bool(parse_override(f"hardware={as_typed(name, TEXT, True)}").value() == name)


def write(path: Path, found: HardwareConfig, words: str, option: str) -> None:
    """The file as Hydra composes it, whole or not at all; ``words`` say where it comes from."""
    from launcher.config.yaml_text import as_config_yaml

    default = type(found)()
    values = {key: value for key, value in to_dict(found).items() if value != getattr(default, key) or key == "name"}
    wide = {key: values.pop(key) for key in ("learnt", "calibration") if key in values}
    lines = [f"# @package cluster.hardware\n# {words}\n", as_config_yaml(values)]
    lines += [as_config_yaml({key: value}, default_flow_style=None, width=160) for key, value in wide.items()]
    write_named(path, "".join(lines), option)
