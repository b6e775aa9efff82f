"""The constants of inference as they ship: conf/inference.yaml."""

from __future__ import annotations

from functools import cache
from typing import Any

from launcher.config.folders import conf_dir
from launcher.config.yaml_text import read_yaml


@cache
def inference_entries() -> dict[str, dict[str, Any]]:
    """The constants of inference as they ship (conf/inference.yaml), by name: value, default, spread, kind and source."""
    entries: dict[str, dict[str, Any]] = read_yaml((conf_dir() / "inference.yaml").read_text())
    return entries


def inference_values() -> dict[str, float]:
    """Values by name."""
    return {name: float(entry["value"]) for name, entry in inference_entries().items()}
