"""Where files of config groups lie, and which of two of one name is meant."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.shared.run.errors import ConfigError


def project_dir() -> Path:
    """The folder that holds ``conf/``: the checkout, or the installed package."""
    package = Path(__file__).resolve().parent.parent
    return package if (package / "conf").is_dir() else package.parent


def conf_dir() -> Path:
    """The folder of Hydra's config groups."""
    return project_dir() / "conf"


def group_folders(own: Path | None) -> list[Path]:
    """Where files of config groups lie: conf/, what earlier runs wrote under runs/, and a folder of the user's own."""
    return [conf_dir(), Path("runs"), *([own] if own else [])]


def refuse_hidden(group: str, name: str, own: Path | None) -> None:
    """``ConfigError`` where the user's own folder has a file that ``GROUP=NAME`` does not mean: one of that name comes before it."""
    if own is None or not os.path.isfile(hidden := own / group / f"{name}.yaml"):
        return
    for root in group_folders(None):
        path = root / group / hidden.name
        if os.path.isfile(path) and not os.path.samefile(path, hidden):
            what = "a file that ships with Trireme" if root == conf_dir() else str(path)
            raise ConfigError(f"{hidden} has the name of {what}, and {group}={name} would still mean that one; choose another name")
