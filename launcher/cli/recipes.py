"""Recipes as files of Hydra's group ``recipe``."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from launcher.named_files import write_named

HEADER = "# @package _global_\n"


def as_yaml(recipe: dict[str, Any], comment: str = "") -> str:
    """Returns the text of the file: Hydra's package line, a comment, the keys."""
    from launcher.config.yaml_text import as_config_yaml

    lines = "".join(f"# {line}\n" for line in textwrap.wrap(comment, 130))
    return HEADER + lines + as_config_yaml(recipe, default_flow_style=None, width=140)


def write(path: Path, recipe: dict[str, Any], comment: str, what: str) -> None:
    """Writes the file that the option or key ``what`` names. Raises ``ConfigError`` if it cannot be written."""
    write_named(path, as_yaml(recipe, comment), what)
