"""The constants of the cost model as they ship: conf/constants.yaml."""

from __future__ import annotations

from functools import cache
from typing import Any

from launcher.config.folders import conf_dir
from launcher.config.yaml_text import read_yaml

KINDS = ("pinned", "fitted", "set")


@cache
def constant_entries() -> dict[str, dict[str, Any]]:
    """By name: value, spread, kind (of ``KINDS``) and source."""
    entries: dict[str, dict[str, Any]] = read_yaml((conf_dir() / "constants.yaml").read_text())
    return entries


def constant_values() -> dict[str, float]:
    """Values by name."""
    return {name: float(entry["value"]) for name, entry in constant_entries().items()}
